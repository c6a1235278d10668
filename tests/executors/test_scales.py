"""Tensors that ranks hold scaled: weights follow, rounded once; moments say why they cannot."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from restride.algebra.scales import is_rounded_once
from restride.api import check, convert
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.comparison import diff
from restride.errors import UnsupportedError
from restride.executors.events import NullObserver
from restride.executors.serial import SerialExecutor
from restride.executors.streaming import StreamingExecutor
from restride.layouts import replicated
from restride.planning.jobs import (
    Job,
    plan_comparison,
    plan_conversion,
    plan_reading,
    whole_layout,
)
from restride.planning.scales import factor_of
from restride.testing.moving import MemoryFiles, job_between, store
from restride.testing.oracles import walk_padding, walk_relation
from restride.testing.rounding import nearest_bits, value_of
from restride.testing.strategies import layout_pairs
from restride.testing.zero_files import Parameter, ZeroRun, box_map, write_zero_run

FLOAT32 = DTYPES["float32"]
BUDGET = 8 << 20  # some layouts of fifty elements have a thousand walks


def factors(target, source):
    """By what the element at each target address is multiplied: 1 where any copy allows it."""
    held: dict[int, set[Fraction]] = {}
    for element, _, _, scale in walk_relation(source):
        held.setdefault(element, set()).add(scale)
    return {
        (rank, index): min(
            (scale / found for found in held[element]),
            key=lambda factor: (factor != 1, not is_rounded_once(factor), factor),
        )
        for element, rank, index, scale in walk_relation(target)
    }


@pytest.mark.parametrize("executor", [SerialExecutor, StreamingExecutor])
@given(pair=layout_pairs(), seed=st.integers(0, 99))
def test_every_element_is_the_one_that_was_read_times_its_factor(executor, pair, seed):
    target, source = pair
    full = np.random.default_rng(seed).standard_normal(source.full_numel).astype(np.float32)
    stored = store(source, FLOAT32, full.view(np.uint32))
    job, sizes = job_between(stored, target, FLOAT32, "first")
    wanted = factors(target, source)
    if not all(map(is_rounded_once, wanted.values())):
        event("refused")
        with pytest.raises(UnsupportedError, match="would round each element twice"):
            plan_conversion([job], budget_nbytes=BUDGET, workers=2)
        return
    event("scaled" if any(factor != 1 for factor in wanted.values()) else "copied")

    plan = plan_conversion([job], budget_nbytes=BUDGET, workers=2)
    out = MemoryFiles([b"\xff" * size for size in sizes])
    executor().execute(plan, MemoryFiles(stored.contents), out, NullObserver())

    words = [np.frombuffer(content, np.uint32) for content in out.contents]
    for element, rank, index, _ in walk_relation(target):
        bits = int(full.view(np.uint32)[element])
        factor = wanted[rank, index]
        exact = (value_of(bits, FLOAT32) or Fraction(0)) * factor
        assert words[rank][index] == (nearest_bits(exact, FLOAT32) if factor != 1 else bits)
    assert all(words[rank][index] == 0 for rank, index, _ in walk_padding(target))


def job(source, state, target, **more):
    stored = store(source, FLOAT32, np.arange(source.full_numel, dtype=np.uint32))
    sizes = [target.shard_numel(rank) for rank in range(target.rank_count)]
    regions = tuple(Region(rank, 0) if size else None for rank, size in enumerate(sizes))
    return stored, Job("b", state, stored.entry, target, regions, FLOAT32, **more)


def test_a_moment_is_refused_with_what_the_optimizer_would_need():
    # The bias is stored halved, so its second moment is stored four times as large.
    _, moment = job(
        replicated((8,), mesh={"tp": 2}, scale=Fraction(4)),
        "exp_avg_sq",
        replicated((8,), mesh={"tp": 1}),
    )

    with pytest.raises(UnsupportedError) as caught:
        plan_conversion([moment], budget_nbytes=BUDGET, workers=1)
    assert str(caught.value) == (
        "tensor 'b', state 'exp_avg_sq': the state 'exp_avg_sq' changes by a factor of 1/4 with "
        "the scale of its tensor, and the optimizer would take the same steps only with lr * (2) "
        "and eps / (2), which belong to the other parameters of its group too; convert the weights "
        "alone, keep the number of ranks, or ask for the optimizer to be transformed where all "
        "parameters of the group are scaled alike"
    )


def test_the_numbers_of_the_refusal_are_those_with_which_adam_takes_the_same_steps():
    """Six steps of Adam on w and on s * w: with lr * s and eps / s they stay s apart."""
    for scale in (0.5, 3.0):
        plain, scaled = (adam(np.random.default_rng(1), s, adapt=True) for s in (1.0, scale))
        assert np.allclose(scaled, plain * scale, rtol=1e-12)
        left = adam(np.random.default_rng(1), scale, adapt=False)
        assert not np.allclose(left, plain * scale, rtol=1e-3)


def adam(rng, scale, *, adapt):
    """A parameter kept as `scale * w`, from moments that follow the powers -1 and -2."""
    w, m, v = rng.standard_normal(5), 0.1 * rng.standard_normal(5), rng.random(5) * 1e-6
    lr, eps = (0.01 * scale, 1e-3 / scale) if adapt else (0.01, 1e-3)
    w, m, v = w * scale, m / scale, v / scale**2
    for _ in range(6):
        gradient = np.sin(3 * w / scale) / scale
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        w = w - lr * m / (np.sqrt(v) + eps)
    return w


@pytest.mark.parametrize(
    ("state", "scale", "dtype", "words"),
    [
        ("momentum_buffer", "1/2", "float32", "only with settings of its own"),
        ("exp_avg_sq", "1/3", "float32", "only with settings of its own"),
        ("exp_avg_sq", "-4", "float32", "only with settings of its own"),
        ("weight", "3/5", "float32", "a factor of 3/5 would round each element twice"),
        ("weight", "1/2", "int32", "elements of dtype int32 are not multiplied"),
        ("weight", "1/2", "float8_e4m3fn", "elements of dtype float8_e4m3fn"),
        ("exp_avg", "1/2", "float32", "lr * (2) and eps / (2)"),
    ],
)
def test_what_cannot_follow_a_scale_is_refused(state, scale, dtype, words):
    with pytest.raises(UnsupportedError) as caught:
        factor_of(state, Fraction(scale), DTYPES[dtype], "resume")
    assert words in str(caught.value)


def test_nothing_changes_where_both_sides_are_scaled_alike():
    halves = replicated((8,), mesh={"tp": 2}, scale=Fraction(1, 2))
    _, moment = job(halves, "exp_avg", halves)

    plan = plan_conversion([moment], budget_nbytes=BUDGET, workers=1)

    assert all(fill.scale == 1 for region in plan.regions for fill in region.fills)


def test_reading_scales_moments_and_comparing_scales_nothing():
    halves = replicated((8,), mesh={"tp": 2}, scale=Fraction(1, 2))
    stored, _ = job(halves, "exp_avg", whole_layout((8,)))
    states = [("b", "exp_avg", stored.entry)]

    read = plan_reading(states, budget_nbytes=BUDGET, workers=1)
    compared = plan_comparison(states, budget_nbytes=BUDGET, workers=1)

    assert [fill.scale for region in read.regions for fill in region.fills] == [Fraction(2)]
    assert [fill.scale for region in compared.regions for fill in region.fills] == [1]


def scaled_run(states, scale):
    """A checkpoint of two ranks that hold a bias scaled, and its states alike."""
    run = ZeroRun(1, 2, {"o_proj.bias": Parameter((12,), states)})
    stored = box_map(run, "o_proj.bias")
    for entry in stored["ranks"].values():
        for piece in entry["pieces"]:
            piece["scale"] = scale
    maps = {"version": 1, "params": {r"^o_proj\.bias$": stored}}
    return ZeroRun(1, 2, run.parameters, extra={"universal_checkpoint_info": {"affine_map": maps}})


def test_a_pre_divided_bias_of_a_checkpoint_is_whole_again(tmp_path):
    bias = np.random.default_rng(3).standard_normal(12).astype(np.float32)
    states = {"weight": bias / 2, "fp32": bias / 2, "exp_avg": bias, "exp_avg_sq": bias * bias}
    write_zero_run(tmp_path / "halves", scaled_run(states, 0.5))
    plain = {"weight": bias, "fp32": bias, "exp_avg": bias / 2, "exp_avg_sq": bias * bias / 4}
    write_zero_run(tmp_path / "plain", ZeroRun(1, 2, {"o_proj.bias": Parameter((12,), plain)}))

    convert(tmp_path / "halves", tmp_path / "out")
    with pytest.raises(
        UnsupportedError, match="the state 'exp_avg' changes by a factor of 1/2 with"
    ):
        convert(tmp_path / "halves", tmp_path / "all", states="all")

    assert (tmp_path / "out" / "model.safetensors").read_bytes()[-48:] == bias.tobytes()
    assert not (tmp_path / "all").exists()
    assert check(tmp_path / "halves").verdict == "ok"
    # States are read in the coordinates of the full tensor, so they are those of a run without.
    assert diff(tmp_path / "halves", tmp_path / "plain").verdict == "same"
