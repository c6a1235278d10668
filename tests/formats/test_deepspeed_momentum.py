"""Muon's momentum, whole on every rank that has a part of the parameter, and cut elsewhere."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.errors import CorruptError
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, stored, write_zero_run
from restride.testing.zero_runs import distinct, muon_runs, zero_runs

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_optimizers"


def held(found: dict[str, np.ndarray], key: str) -> np.ndarray:
    """A state as it was read, as numbers."""
    return found[key].view(np.float32)[..., 0]


@given(muon_runs())
@settings(max_examples=40)
def test_every_copy_of_a_whole_momentum_is_found(run):
    """`gather_all` compares the copies."""
    with TemporaryDirectory() as folder:
        write_zero_run(Path(folder) / "run", run)

        catalog = read_catalog(Path(folder) / "run")
        found = gather_all(catalog)

        for name, parameter in run.parameters.items():
            for state in ("fp32", "momentum_buffer"):
                assert np.array_equal(held(found, f"{name}/{state}"), parameter.states[state])
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
            array = held(found, f"{name}/momentum_buffer")
            assert np.array_equal(array, parameter.states["momentum_buffer"]), name


def groups_of(root):
    return root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def test_as_long_as_a_partition_and_whole_all_the_same(tmp_path):
    """The second rank has a part of 31 of 34 elements, and 3 of padding; whole it is 40 as well."""
    sizes = {"layer.0.a": 37, "layer.1.b": 34, "layer.2.c": 6}
    states = ("weight", "fp32", "momentum_buffer")
    parameters = {
        name: Parameter((n,), {s: distinct((n,), 1000 * n + 100 * k) for k, s in enumerate(states)})
        for name, n in sizes.items()
    }
    write_zero_run(tmp_path / "run", ZeroRun(2, 1, parameters, is_muon=True))

    catalog = read_catalog(tmp_path / "run")
    (entry,) = (t.states["momentum_buffer"] for t in catalog.tensors if t.name == "layer.2.c")

    array = gather(catalog, entry).view(np.float32)[..., 0]
    assert np.array_equal(array, parameters["layer.2.c"].states["momentum_buffer"])

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


def test_a_universal_folder_of_muon_is_warned_of(tmp_path):
    report = api.convert(RECORDED / "muon_z2", tmp_path / "out", to="universal")

    assert [finding.kind for finding in report.findings] == ["not-loaded"]
    assert "--to deepspeed, for any" in report.findings[0].message
    found = gather_all(api.open(tmp_path / "out"))
    source = gather_all(api.open(RECORDED / "muon_z2"))
    assert np.array_equal(found["0.weight/momentum_buffer"], source["0.weight/momentum_buffer"])
