"""Muon's momentum, whole on every rank that has a part of the parameter, and cut elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from restride import api
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, shard_of, stored, write_zero_run
from restride.testing.zero_runs import distinct, zero_runs

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_optimizers"


def momentum(name: str, parameter: Parameter) -> np.ndarray:
    """Values that no other state has."""
    number = int("".join(filter(str.isdigit, name)))
    return distinct(parameter.shape, 500_000 + 1000 * number + (0 if "layer" in name else 500))


def as_muon(run: ZeroRun) -> ZeroRun:
    """The same run with a momentum and nothing else, in one group."""
    return replace(
        run,
        parameters={
            name: Parameter(
                parameter.shape,
                {key: parameter.states[key] for key in ("weight", "fp32")},
                parameter.cut,
            )
            for name, parameter in run.parameters.items()
        },
    )


def keep_whole(folder: Path, run: ZeroRun) -> None:
    """Give each file the momentum of every parameter that it has an element of, end to end."""
    for tp in range(run.tp):
        owners = [
            name
            for name in in_flat_order(run, tp)
            for _ in range(shard_of(run, name, "weight", tp).size)
        ]
        width = -(-len(owners) // (2 * run.dp)) * 2
        for dp in range(run.dp):
            held = dict.fromkeys(owners[dp * width : (dp + 1) * width])
            arrays = {name: momentum(name, run.parameters[name]) for name in run.parameters}
            whole = {
                name: Parameter(run.parameters[name].shape, {"m": array}, run.parameters[name].cut)
                for name, array in arrays.items()
            }
            parts = [shard_of(replace(run, parameters=whole), n, "m", tp).ravel() for n in held]
            buffer = np.concatenate([np.zeros(0, np.float32), *parts])

            def change(root, buffer=buffer) -> None:
                base = root["optimizer_state_dict"]["base_optimizer_state"]
                base["state"][0] = {"momentum_buffer": stored(buffer)}
                base["param_groups"][0]["use_muon"] = True

            edit_file(folder / f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt", change)


def in_flat_order(run: ZeroRun, tp: int) -> list[str]:
    names = [name for name in run.parameters if shard_of(run, name, "weight", tp).size]
    if run.is_round_robin:
        names = [name for first in range(run.dp) for name in names[first :: run.dp]]
    return names


@given(zero_runs(writers=["zero"]).filter(lambda run: run.alignment == 1))
@settings(max_examples=40)
def test_every_copy_of_a_whole_momentum_is_found(run):
    """`gather_all` compares the copies."""
    run = as_muon(run)
    with TemporaryDirectory() as folder:
        write_zero_run(Path(folder) / "run", run)
        keep_whole(Path(folder) / "run" / "step", run)

        catalog = read_catalog(Path(folder) / "run")
        found = gather_all(catalog)

        for name, parameter in run.parameters.items():
            array = found[f"{name}/momentum_buffer"].view(np.float32)[..., 0]
            assert np.array_equal(array, momentum(name, parameter)), name
            assert np.array_equal(
                found[f"{name}/fp32"].view(np.float32)[..., 0], parameter.states["fp32"]
            )
        assert not [finding for finding in catalog.findings if finding.kind == "uncut-state"]


@given(zero_runs(writers=["zero"]), st.integers(0, 1))
@settings(max_examples=20)
def test_a_momentum_that_is_cut_like_the_weights_is_read_like_them(run, number):
    """With the optimizer on the CPU it is; and after a resume."""
    states = ("weight", "fp32", "momentum_buffer")
    run = replace(
        run,
        parameters={
            name: Parameter(
                parameter.shape,
                dict(zip(states, parameter.states.values(), strict=False)),
                parameter.cut,
                parameter.group,
            )
            for name, parameter in run.parameters.items()
        },
    )
    with TemporaryDirectory() as folder:
        write_zero_run(Path(folder) / "run", run)
        for file in (Path(folder) / "run" / "step").glob("*optim_states.pt"):
            edit_file(file, lambda root: groups_of(root)[-number].update(use_muon=True))

        found = gather_all(read_catalog(Path(folder) / "run"))

        for name, parameter in run.parameters.items():
            array = found[f"{name}/momentum_buffer"].view(np.float32)[..., 0]
            assert np.array_equal(array, parameter.states["momentum_buffer"]), name


def groups_of(root):
    return root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def test_as_long_as_a_partition_and_whole_all_the_same(tmp_path):
    """The second rank has a part of 37 of 40 elements, and 3 of padding; whole it is 40 as well."""
    sizes = {"layer.0.a": 37, "layer.1.b": 6, "layer.2.c": 34}
    parameters = {
        name: Parameter((n,), {s: distinct((n,), 1000 * n) for s in ("weight", "fp32")})
        for name, n in sizes.items()
    }
    run = ZeroRun(2, 1, parameters)
    write_zero_run(tmp_path / "run", run)
    keep_whole(tmp_path / "run" / "step", run)

    catalog = read_catalog(tmp_path / "run")
    (entry,) = (t.states["momentum_buffer"] for t in catalog.tensors if t.name == "layer.2.c")

    array = gather(catalog, entry).view(np.float32)[..., 0]
    assert np.array_equal(array, momentum("layer.2.c", parameters["layer.2.c"]))

    # Without the first rank, the second could have a partition of another run as well.
    (tmp_path / "run" / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptError, match="whether Muon keeps its momentum whole"):
        read_catalog(tmp_path / "run")


@pytest.mark.parametrize("length", [1, 41, 79])
def test_a_momentum_of_another_length_is_of_no_parameter(tmp_path, length):
    parameters = {
        f"layer.{n}.w": Parameter((40,), {s: distinct((40,), n) for s in ("weight", "fp32")})
        for n in range(2)
    }
    run = ZeroRun(1, 1, parameters)
    write_zero_run(tmp_path / "run", run)

    def change(root) -> None:
        groups_of(root)[0]["use_muon"] = True
        base = root["optimizer_state_dict"]["base_optimizer_state"]
        base["state"][0] = {"momentum_buffer": stored(np.zeros(length, np.float32))}

    edit_file(tmp_path / "run" / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", change)

    catalog = read_catalog(tmp_path / "run")

    assert [finding.kind for finding in catalog.findings] == ["uncut-state"]
    assert all("momentum_buffer" not in tensor.states for tensor in catalog.tensors)


def test_sharded_files_of_muon_are_those_of_zero_3(tmp_path):
    """An engine resumed from such files trains on with the losses of its own."""
    source = RECORDED / "muon_z1"
    with pytest.raises(UnsupportedError, match="keeps whole on every rank"):
        api.convert(source, tmp_path / "out", to="deepspeed", zero=2)

    api.convert(source, tmp_path / "out", to="deepspeed", zero=3)

    expected, found = (gather_all(api.open(path)) for path in (source, tmp_path / "out"))
    kept = {key for key in expected if key.endswith(("/fp32", "/momentum_buffer", "/exp_avg"))}
    assert len(kept) == 5 + 2 + 3
    for key in kept:
        assert np.array_equal(found[key], expected[key]), key


def test_a_universal_folder_of_muon_is_warned_of(tmp_path):
    report = api.convert(RECORDED / "muon_z2", tmp_path / "out", to="universal")

    assert [finding.kind for finding in report.findings] == ["not-loaded"]
    assert "--to deepspeed --zero 3" in report.findings[0].message
    found = gather_all(api.open(tmp_path / "out"))
    source = gather_all(api.open(RECORDED / "muon_z2"))
    assert np.array_equal(found["0.weight/momentum_buffer"], source["0.weight/momentum_buffer"])
