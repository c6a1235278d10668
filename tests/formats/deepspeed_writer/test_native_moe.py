"""Experts of DeepSpeed's own MoE layer, written for other ranks: every bit, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.checkpoint.training import ParameterGroup
from restride.errors import UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._spread import spread_experts
from restride.formats.deepspeed._writing.native_target import (
    NativeLayer,
    PlacedNative,
    place_native,
)
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.layouts import replicated
from restride.testing.contents import file_content
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from restride.checkpoint.training import Training

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_native_moe"
NAMES = sorted(path.name for path in RECORDED.iterdir())
# Those beside tensor-parallel ranks, and on several numbers of ranks, have tests of their own.
TENSOR = [name for name in NAMES if name.startswith("tensor_")]
SEVERAL = [name for name in NAMES if name.startswith("several_")]
ALONE = [name for name in NAMES if name not in (*TENSOR, *SEVERAL)]
EXPERTS = "layers.1.moe.deepspeed_moe.experts.deepspeed_experts"
LAYERS = ["layers.0.moe", "layers.1.moe"]


def ranks_of(name: str) -> tuple[int, int, int]:
    """Data-parallel and expert-parallel ranks of a recorded run, and its ZeRO stage."""
    catalog = read_catalog(RECORDED / name)
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    experts = tensors[f"{EXPERTS}.0.up.weight"].layout.rank_count
    return dict(catalog.mesh.axes)["dp"], experts, int(catalog.format[-1])


def same_states(a: Path, b: Path) -> bool:
    ours, theirs = gather_all(read_catalog(a)), gather_all(read_catalog(b))
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[key], theirs[key]) for key in ours
    )


@pytest.mark.parametrize("name", sorted({*ALONE} - {"flat_z0", "round_robin_z2"}))
def test_for_the_same_ranks_the_files_are_those_of_the_engine(name, require_saved_again, tmp_path):
    """In two they are not: the weights of `flat_z0` are views, of which the engine saved copies.

    And in `round_robin_z2` its `param_slice_mappings` are in another order than its own buffer.
    """
    dp, ep, zero = ranks_of(name)

    api.convert(RECORDED / name, tmp_path / "out", to="deepspeed", dp=dp, ep=ep, zero=zero)

    require_saved_again(tmp_path / "out", RECORDED / name)


@pytest.mark.parametrize(
    ("name", "dp", "ep", "zero"),
    [
        ("bf16_optimizer_z1", 2, 1, 0),
        ("bf16_z0", 4, 2, 1),
        ("data_first_z1", 8, 2, 2),
        ("data_first_z1", 2, 2, 0),
        ("flat_z0", 4, 1, 0),
        ("flat_z0", 2, 2, 2),
        ("fp32_z0", 1, 1, 2),
        ("fp32_z0", 2, 1, 0),
        ("residual_z1", 1, 1, 2),
        ("residual_z1", 4, 2, 0),
        ("round_robin_z2", 2, 2, 2),
        ("round_robin_z2", 3, 1, 1),
    ],
)
def test_every_bit_comes_to_other_ranks_and_back(name, dp, ep, zero, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    source_dp, source_ep, source_zero = ranks_of(name)

    api.convert(RECORDED / name, one, to="deepspeed", dp=dp, ep=ep, zero=zero)
    api.convert(one, two, to="deepspeed", dp=source_dp, ep=source_ep, zero=source_zero)

    assert same_states(one, two)
    # Trained in fp32, a weight is its own master copy, and other stages write it a second time.
    assert name == "fp32_z0" or same_states(RECORDED / name, one)


@pytest.mark.parametrize("name", TENSOR)
@pytest.mark.parametrize(("dp", "ep", "zero"), [(1, 1, 0), (2, 2, 1), (4, 1, 2)])
def test_experts_leave_tensor_parallel_ranks_with_every_bit(name, dp, ep, zero, tmp_path):
    api.convert(RECORDED / name, tmp_path / "out", to="deepspeed", tp=1, dp=dp, ep=ep, zero=zero)

    assert same_states(RECORDED / name, tmp_path / "out")


def test_every_rank_calls_its_own_experts_by_their_places(tmp_path):
    api.convert(RECORDED / "data_first_z1", tmp_path / "out", to="deepspeed", dp=4, ep=2, zero=2)

    for rank in range(4):
        path = tmp_path / "out" / "step" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        mapping = file_content(path)["optimizer_state_dict"]["param_slice_mappings"][1][1][1]
        assert {name.partition("deepspeed_experts.")[2][0] for name in mapping} <= {"0", "1"}, rank


def test_as_many_expert_ranks_as_the_source_has_are_the_default(tmp_path):
    api.convert(RECORDED / "residual_z1", tmp_path / "out", to="deepspeed", dp=2)

    assert ranks_of(tmp_path / "out")[:2] == (2, 2)


# What goes with the experts.


def retold(training: Training, ranks: int, **changed: Any) -> list[ParameterGroup]:
    """The groups that an engine with so many expert-parallel ranks has."""
    catalog = read_catalog(RECORDED / "residual_z1")
    training = replace(training, **changed)
    placed = place_native(catalog, training, DeepSpeedTarget(1, ranks, 1, ep=ranks), {})
    assert placed is not None
    return list(placed.retold(training).groups)


def test_the_groups_are_those_of_an_engine_with_other_ranks():
    training = read_training(read_catalog(RECORDED / "residual_z1"))

    (matrices, vectors) = retold(training, 1)[2:]

    assert matrices.settings["name"] == vectors.settings["name"] == "ep_size_1"
    assert [matrices.names, vectors.names] == [
        tuple(
            f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.{rest}.{kind}"
            for layer, count in zip(LAYERS, (2, 4), strict=True)
            for number in range(count)
            for rest in ("up", "down")
        )
        for kind in ("weight", "bias")
    ]


@pytest.mark.interop
@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 60),
)
def test_groups_are_those_that_deepspeed_makes_for_the_ranks(counts, numels, before, after, most):
    torch = pytest.importorskip("torch")
    split = pytest.importorskip("deepspeed.moe.utils")

    def made(ranks: int) -> list[list[list[str]]]:
        """For each rank its groups."""
        found = []
        for rank in range(ranks):
            names, params = {}, [torch.nn.Parameter(torch.zeros(3))]
            for layer, count in enumerate(counts):
                held = count // ranks
                for number in range(rank * held, (rank + 1) * held):
                    for place, numel in enumerate(numels):
                        param = torch.nn.Parameter(torch.zeros(numel))
                        param.allreduce, param.group_name = False, f"ep_size_{ranks}"
                        names[id(param)] = f"{prefix(layer)}.{number}.p{place}"
                        params.append(param)
            group = {"params": params, "name": "dense"}
            groups = split.split_params_into_different_moe_groups_for_optimizer(group, most)
            # An empty group comes before a first parameter that is too large for one.
            parts = [own["params"] for own in groups[1:] if own["params"]]
            found.append([[names[id(param)] for param in own] for own in parts])
        return found

    def prefix(layer: int) -> str:
        return f"l{layer}.deepspeed_moe.experts.deepspeed_experts"

    layers = tuple(
        NativeLayer(
            number,
            prefix(number),
            count,
            tuple(
                tuple(f"{prefix(number)}.{expert}.p{place}" for place in range(len(numels)))
                for expert in range(count)
            ),
        )
        for number, count in enumerate(counts)
    )
    layouts = {
        name: replicated((numels[int(name[-1])],), mesh={"ep": after})
        for layer in layers
        for names in layer.names
        for name in names
    }
    target = DeepSpeedTarget(1, after, 1, ep=after)
    placed = placed_on(layers, layouts, before, target)
    settings_of = {"name": f"ep_size_{before}", "moe": True}
    # As the reader has them: what the ranks have of each layer, one rank after the other.
    groups = tuple(
        ParameterGroup(
            tuple(placed.order.everywhere(own, placed.before)),
            settings_of,
            {},
        )
        for own in made(before)[0]
    )
    training = replace(read_training(read_catalog(RECORDED / "residual_z1")), groups=groups)

    found = placed.retold(training, most=most).groups

    for rank, expected in enumerate(made(after)):
        own = [
            [
                name
                for name in group.names
                if int(name.split(".")[-2]) // (counts[int(name[1])] // after) == rank
            ]
            for group in found
        ]
        assert own == expected


def placed_on(layers, layouts, before: int, target: DeepSpeedTarget) -> PlacedNative:
    """Layers of which all are on as many ranks."""
    ranks = [dict.fromkeys((own.prefix for own in layers), n) for n in (before, target.ep)]
    spreads = {target.ep: spread_experts(target, is_data_first=False)}
    return PlacedNative(layers, layouts, *ranks, spreads, target)


def placed_for(before: int, after: int) -> PlacedNative:
    """One layer of four experts, each of two tensors, for other ranks."""
    prefix = "l.deepspeed_moe.experts.deepspeed_experts"
    names = tuple((f"{prefix}.{n}.up", f"{prefix}.{n}.down") for n in range(4))
    target = DeepSpeedTarget(1, after, 1, ep=after)
    layouts = {name: replicated((2,), mesh={"ep": after}) for own in names for name in own}
    return placed_on((NativeLayer(0, prefix, 4, names),), layouts, before, target)


def trained(names: list[str]) -> Training:
    """Which tensors of the experts are trained; the others are frozen."""
    prefix = "l.deepspeed_moe.experts.deepspeed_experts"
    group = ParameterGroup(
        tuple(f"{prefix}.{name}" for name in names), {"name": "ep_size_2", "moe": True}, {}
    )
    return replace(read_training(read_catalog(RECORDED / "residual_z1")), groups=(group,))


@pytest.mark.parametrize(
    ("names", "after"),
    [
        # The first expert of each of two ranks has a frozen tensor.
        (["0.up", "1.up", "1.down", "2.up", "3.up", "3.down"], 1),
        # Every expert has the same one.
        (["0.up", "1.up", "2.up", "3.up"], 4),
        (["0.up", "1.up", "2.up", "3.up"], 1),
    ],
)
def test_experts_that_are_trained_in_parts_come_to_ranks_that_have_the_same_parts(names, after):
    training = trained(names)

    (found,) = placed_for(2, after).retold(training).groups

    assert found.names == training.groups[0].names
    assert found.settings["name"] == f"ep_size_{after}"


def test_experts_that_ranks_would_train_in_different_parts_are_refused():
    """The model file of the first rank would name what the second one does not have."""
    training = trained(["0.up", "1.up", "1.down", "2.up", "3.up", "3.down"])

    with pytest.raises(UnsupportedError, match="that rank 1 of 4 holds than of those of rank 0"):
        placed_for(2, 4).retold(training)


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("residual_z1", (2, 2, 3), "does not train with ZeRO-3; choose --zero 0, 1 or 2"),
        ("residual_z1", (4, 4, 1), "2 experts do not divide over 4 expert-parallel ranks"),
        ("residual_z1", (3, 3, 1), "2 experts do not divide over 3 expert-parallel ranks"),
        ("frozen_z2", (2, 2, 1), "parts of them are frozen; choose --ep 1"),
        ("frozen_z2", (2, 2, 2), "with the frozen experts of the first with ZeRO-2"),
    ],
)
def test_what_no_engine_resumes_from_is_refused(source, target, words, tmp_path):
    dp, ep, zero = target

    with pytest.raises(UnsupportedError) as caught:
        api.convert(RECORDED / source, tmp_path / "out", to="deepspeed", dp=dp, ep=ep, zero=zero)

    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_experts_in_another_order_than_the_model_stay_on_their_ranks():
    """All weights and then all biases, say: with one expert on a rank nothing tells it apart."""
    training = read_training(read_catalog(RECORDED / "data_first_z1"))
    dense, experts = training.groups
    ordered = sorted(experts.names, key=lambda name: (name[:8], "bias" in name))
    groups = (dense, replace(experts, names=tuple(ordered)))

    assert retold(training, 2, groups=groups) == list(groups)
    with pytest.raises(UnsupportedError, match="is not known; choose --ep 2"):
        retold(training, 1, groups=groups)


# Universal folders.


@pytest.mark.parametrize("name", ["bf16_z0", "residual_z1", "round_robin_z2"])
def test_a_universal_folder_has_all_experts_and_leads_to_any_ranks(name, tmp_path):
    api.convert(RECORDED / name, tmp_path / "folder", to="universal")
    api.convert(tmp_path / "folder", tmp_path / "out", to="deepspeed", tp=1, dp=2, ep=2, zero=1)

    assert same_states(RECORDED / name, tmp_path / "out")


def test_a_universal_folder_is_for_an_engine_that_has_all_experts_on_every_rank(tmp_path):
    report = api.convert(RECORDED / "residual_z1", tmp_path / "out", to="universal")

    (finding,) = (finding for finding in report.findings if finding.kind == "own-moe")
    assert finding.severity == "warning"
    assert "convert with --to deepspeed --ep N" in finding.message
    model = file_content(tmp_path / "out" / "step_universal" / "mp_rank_00_model_states.pt")
    names = [name for _, group, *_ in model["param_shapes"][1] for name in group]
    assert [name for name in names if name.endswith("up.bias") and "experts" in name] == [
        f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.up.bias"
        for layer, count in zip(LAYERS, (2, 4), strict=True)
        for number in range(count)
    ]


def test_there_is_no_universal_folder_of_them_for_zero_3(tmp_path):
    with pytest.raises(UnsupportedError, match="does not train with ZeRO-3; choose --stage 1"):
        api.convert(RECORDED / "residual_z1", tmp_path / "out", to="universal", stage=3)
