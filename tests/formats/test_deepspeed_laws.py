"""Whatever a run writes is read back: the reader against a slow writer on whole arrays."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings

from restride.algebra.coverage import Covered, prove
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct, zero_runs


@given(zero_runs())
@settings(max_examples=40)
def test_every_state_is_found_in_the_files_element_by_element(run):
    with TemporaryDirectory() as folder:
        write_zero_run(Path(folder) / "run", run)

        catalog = read_catalog(Path(folder) / "run")
        found = gather_all(catalog)

        for name, parameter in run.parameters.items():
            for state, expected in parameter.states.items():
                actual = found.pop(f"{name}/{state}")
                assert np.array_equal(actual.view(np.float32)[..., 0], expected)
            assert found.pop(f"{name}/step").view(np.float32) == 2
        assert not found


@given(zero_runs())
@settings(max_examples=20)
def test_every_layout_is_proved_whole(run):
    with TemporaryDirectory() as folder:
        write_zero_run(Path(folder) / "run", run)

        catalog = read_catalog(Path(folder) / "run")

        for tensor in catalog.tensors:
            assert isinstance(prove(tensor.layout), Covered)
            for entry in tensor.states.values():
                assert isinstance(prove(entry.layout, side="full"), Covered)
        kinds = {finding.kind for finding in catalog.findings}
        assert kinds <= {"slice-mapping-order"}


def test_a_parameter_that_a_rank_has_none_of_is_whole_on_the_others(tmp_path):
    states = {s: distinct((4, 3), 100 * n) for n, s in enumerate(["weight", "fp32", "exp_avg"])}
    parameters = {
        "k_proj": Parameter((4, 3), states, (0, (4, 0))),
        "norm": Parameter((2,), {s: distinct((2,), 50 + n) for n, s in enumerate(states)}),
    }
    write_zero_run(tmp_path / "run", ZeroRun(2, 2, parameters))

    catalog = read_catalog(tmp_path / "run")
    entry = catalog.tensors[0].states["fp32"]

    assert [entry.layout.shard_shape(rank) for rank in range(4)] == [(8,), (0,), (4,), (0,)]
    assert [region is None for region in entry.regions] == [False, True, False, True]
    assert np.array_equal(gather(catalog, entry).view(np.float32)[..., 0], states["fp32"])


def test_weights_and_masters_have_their_own_dtypes(tmp_path):
    """fp16 differs from bf16 in nothing but the dtype of the weights."""
    weight = np.arange(5, dtype=np.float16)
    states = {"weight": weight, "fp32": distinct((5,), 1), "exp_avg": distinct((5,), 9)}
    write_zero_run(tmp_path / "run", ZeroRun(2, 1, {"norm": Parameter((5,), states)}))

    catalog = read_catalog(tmp_path / "run")
    (norm,) = catalog.tensors

    assert [norm.states[s].dtype.name for s in ("weight", "fp32")] == ["float16", "float32"]
    assert np.array_equal(gather(catalog, norm.states["weight"]).view(np.float16)[:, 0], weight)
