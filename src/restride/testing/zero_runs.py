"""Small ZeRO runs of every kind, drawn with hypothesis, for `restride.testing.zero_files`."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.testing.zero_files import Parameter, ZeroRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import DrawFn
    from numpy.typing import NDArray

    from restride.testing.zero_files import Cut, Writer

__all__ = ["ADAM", "distinct", "muon_runs", "parameter", "zero_runs"]

ADAM = ("weight", "fp32", "exp_avg", "exp_avg_sq")
"""The states of a parameter that Adam trains."""


def distinct(shape: tuple[int, ...], first: int) -> NDArray[Any]:
    """Values of which no two are equal, so that no two elements can be mixed up."""
    return (first + np.arange(prod(shape), dtype=np.float32)).reshape(shape)


def parameter(
    first: int,
    shape: tuple[int, ...],
    cut: Cut = None,
    *,
    states: Sequence[str] = ADAM,
    group: int = 0,
) -> Parameter:
    """A parameter with the same values in weight and master copy, and others in each more state."""
    values = {
        state: distinct(shape, first + 1000 * max(place - 1, 0))
        for place, state in enumerate(states)
    }
    return Parameter(shape, values, cut, group)


@st.composite
def zero_runs(
    draw: DrawFn, *, writers: Sequence[Writer] = ("zero", "elastic", "bf16_optimizer")
) -> ZeroRun:
    """Runs of up to 4 x 3 ranks, some of which hold no element of some parameters."""
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
            state: distinct(shape, 10_000 * number + 1000 * place)
            for place, state in enumerate(ADAM)
        }
        parameters[f"layer.{number}.weight"] = Parameter(shape, states, cut, group=0)
    # The first parameter of every group is whole, so that no rank's group is empty.
    whole = Parameter((3,), {s: distinct((3,), 90_000 + n) for n, s in enumerate(ADAM)})
    groups = draw(st.integers(1, 2))
    grouped = {
        name: Parameter(p.shape, p.states, p.cut, draw(st.integers(0, groups - 1)))
        for name, p in parameters.items()
    }
    for group in range(groups):
        shifted = {state: array + 10 * group for state, array in whole.states.items()}
        grouped[f"norm.{group}"] = Parameter(whole.shape, shifted, None, group)
    writer = draw(st.sampled_from(writers))
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


@st.composite
def muon_runs(draw: DrawFn) -> ZeroRun:
    """Runs of one group that Muon updates; tensor-parallel ranks cut it evenly."""
    run = draw(zero_runs(writers=("zero",)))
    parameters = {}
    for number, (name, parameter) in enumerate(run.parameters.items()):
        shape, cut = parameter.shape, parameter.cut
        if cut is not None:
            dim, widths = cut
            width = max(widths)
            shape = (*shape[:dim], width * run.tp, *shape[dim + 1 :])
            cut = (dim, (width,) * run.tp)
        states = {
            state: distinct(shape, 10_000 * number + 3000 * place)
            for place, state in enumerate(("weight", "fp32", "momentum_buffer"))
        }
        parameters[name] = Parameter(shape, states, cut)
    return replace(run, parameters=parameters, is_muon=True)


@st.composite
def _widths(draw: DrawFn, ranks: int) -> tuple[int, ...]:
    widths = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return tuple(widths) if any(widths) else (1, *widths[1:])
