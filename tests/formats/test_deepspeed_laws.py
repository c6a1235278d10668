"""Whatever a run writes is read back: the reader against a slow writer on whole arrays."""

from __future__ import annotations

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from restride.algebra.coverage import Covered, prove
from restride.formats.deepspeed import read_catalog
from restride.testing.gather import gather, gather_all
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn


def _distinct(shape, first):
    """Values of which no two are equal, so that no two elements can be mixed up."""
    return (first + np.arange(prod(shape), dtype=np.float32)).reshape(shape)


@st.composite
def _widths(draw: DrawFn, ranks: int) -> tuple[int, ...]:
    widths = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return tuple(widths) if any(widths) else (1, *widths[1:])


@st.composite
def _runs(draw: DrawFn) -> ZeroRun:
    dp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parameters = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        cut = None
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            widths = draw(_widths(tp))
            shape = (*shape[:dim], sum(widths), *shape[dim + 1 :])
            cut = (dim, widths)
        states = {
            state: _distinct(shape, 10_000 * number + 1000 * place)
            for place, state in enumerate(["weight", "fp32", "exp_avg", "exp_avg_sq"])
        }
        parameters[f"layer.{number}.weight"] = Parameter(shape, states, cut, group=0)
    # The first parameter of every group is whole, so that no rank's group is empty.
    whole = Parameter((3,), {s: _distinct((3,), 90_000 + n) for n, s in enumerate(states)})
    groups = draw(st.integers(1, 2))
    grouped = {
        name: Parameter(p.shape, p.states, p.cut, draw(st.integers(0, groups - 1)))
        for name, p in parameters.items()
    }
    for group in range(groups):
        shifted = {state: array + 10 * group for state, array in whole.states.items()}
        grouped[f"norm.{group}"] = Parameter(whole.shape, shifted, None, group)
    writer = draw(st.sampled_from(["zero", "elastic", "bf16_optimizer"]))
    is_plain = writer == "bf16_optimizer"
    return ZeroRun(
        dp,
        tp,
        grouped,
        writer=writer,
        alignment=1 if is_plain else draw(st.sampled_from([1, 1, 4, 8])),
        is_round_robin=not is_plain and draw(st.booleans()),
        has_mappings=draw(st.integers(0, 4)) > 0,
    )


@given(_runs())
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


@given(_runs())
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
    states = {s: _distinct((4, 3), 100 * n) for n, s in enumerate(["weight", "fp32", "exp_avg"])}
    parameters = {
        "k_proj": Parameter((4, 3), states, (0, (4, 0))),
        "norm": Parameter((2,), {s: _distinct((2,), 50 + n) for n, s in enumerate(states)}),
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
    states = {"weight": weight, "fp32": _distinct((5,), 1), "exp_avg": _distinct((5,), 9)}
    write_zero_run(tmp_path / "run", ZeroRun(2, 1, {"norm": Parameter((5,), states)}))

    catalog = read_catalog(tmp_path / "run")
    (norm,) = catalog.tensors

    assert [norm.states[s].dtype.name for s in ("weight", "fp32")] == ["float16", "float32"]
    assert np.array_equal(gather(catalog, norm.states["weight"]).view(np.float16)[:, 0], weight)
