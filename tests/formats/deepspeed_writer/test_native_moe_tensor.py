"""Experts of DeepSpeed's own MoE layer for tensor-parallel ranks: whole ones, and cut ones."""

from __future__ import annotations

import itertools
from operator import mul
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride import api
from restride.algebra.coverage import Covered, prove
from restride.algebra.mesh import Mesh
from restride.checkpoint.training import ParameterGroup
from restride.errors import RuleError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._experts.native_cut import require_said
from restride.formats.deepspeed._experts.native_groups import ExpertOrder
from restride.formats.deepspeed._rank_blocks import block_of, chained_in_block, in_block
from restride.formats.deepspeed._spread import spread_cut_experts
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.layouts import split
from restride.layouts.flat import flat_chunks
from restride.testing.contents import file_content
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_native_moe"
CUT = ["tensor_cut_data_first_z1", "tensor_cut_z0", "tensor_cut_z2"]
WHOLE = ["tensor_whole_z0", "tensor_whole_z1"]
PREFIX = "layers.1.moe.deepspeed_moe.experts.deepspeed_experts"
RULES = """
format = "restride-rules/1"
rest = "whole"
[[rules]]
match = "**.up.{weight,bias}"
layout = "column"
[[rules]]
match = "**.down.weight"
layout = "row"
"""
WHOLE_RULES = RULES.replace("column", "whole").replace("row", "whole")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """Experts are cut, the one beside them as well; all else is whole."""
    (tmp_path / "rules.toml").write_text(RULES, "utf-8")
    return tmp_path / "rules.toml"


def same_states(a: Path, b: Path) -> bool:
    ours, theirs = gather_all(read_catalog(a)), gather_all(read_catalog(b))
    return ours.keys() == theirs.keys() and all(
        np.array_equal(ours[key], theirs[key]) for key in ours
    )


def axes_of(folder: Path) -> str:
    """Ranks that hold an expert."""
    tensors = {tensor.name: tensor for tensor in read_catalog(folder).tensors}
    return str(tensors[f"{PREFIX}.3.up.weight"].layout.mesh)


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_for_the_same_ranks_the_files_are_those_of_the_engine(name, require_saved_again, tmp_path):
    """What they say of the cut is not: the model said it in categories, which became maps."""
    api.convert(RECORDED / name, tmp_path / "out", to="deepspeed")

    require_saved_again(tmp_path / "out", RECORDED / name, "universal_checkpoint_info")
    assert axes_of(tmp_path / "out") == axes_of(RECORDED / name)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep", "zero"),
    [
        ("tensor_cut_data_first_z1", 2, 4, 2, 0),
        *(("tensor_cut_z0", tp, 2, 2, zero) for tp, zero in [(4, 1), (3, 0)]),
        ("tensor_cut_z2", 2, 3, 1, 1),
        ("tensor_whole_z0", 2, 2, 2, 1),
        *(("tensor_whole_z1", 2, dp, 2, zero) for dp, zero in [(3, 2), (1, 0)]),
        *(("residual_z1", tp, 2, 2, zero) for tp, zero in [(3, 2), (2, 0)]),
        ("data_first_z1", 2, 4, 2, 1),
        ("flat_z0", 2, 2, 2, 0),
        ("bf16_optimizer_z1", 2, 2, 1, 1),
        ("fp32_z0", 4, 1, 1, 2),
    ],
)
def test_every_bit_comes_to_other_ranks_and_back(name, tp, dp, ep, zero, rules, tmp_path):
    source, one, two = RECORDED / name, tmp_path / "one", tmp_path / "two"
    given = {} if name in WHOLE else {"rules": rules}

    api.convert(source, one, to="deepspeed", tp=tp, dp=dp, ep=ep, zero=zero, **given)
    api.convert(one, two, to="deepspeed", tp=1, dp=2, ep=2, zero=1)

    assert same_states(one, two)
    # Trained in fp32, a weight is its own master copy, and other stages write it a second time.
    assert name == "fp32_z0" or same_states(source, one)
    if tp > 1 and name not in WHOLE:
        assert axes_of(one) == f"ep={ep},tp={tp}"


def test_whole_experts_go_to_more_tensor_parallel_ranks_of_which_each_holds_some(tmp_path):
    (tmp_path / "whole.toml").write_text(WHOLE_RULES, "utf-8")
    source = RECORDED / "residual_z1"

    report = api.convert(
        source, tmp_path / "out", to="deepspeed", tp=2, dp=1, ep=2, rules=tmp_path / "whole.toml"
    )

    assert same_states(source, tmp_path / "out")
    assert axes_of(tmp_path / "out") == "ep=2"
    (note,) = (f for f in report.findings if f.kind == "expert-tensor-parallelism")
    assert "resume with enable_expert_tensor_parallelism=False" in note.message
    model = file_content(tmp_path / "out" / "step" / "mp_rank_01_model_states.pt")
    names = [name for _, group, *_ in model["param_shapes"][1] for name in group]
    assert [n.removeprefix(f"{PREFIX}.") for n in names if n.startswith(PREFIX)][:4:2] == [
        "0.up.weight",
        "1.up.weight",
    ]  # of the second rank, which has the experts 2 and 3


def test_who_said_nothing_of_the_experts_is_asked(tmp_path):
    with pytest.raises(RuleError, match="nothing in the checkpoint says how 2 ranks cut its"):
        api.convert(RECORDED / "residual_z1", tmp_path / "out", to="deepspeed", tp=2, ep=2)


def test_files_say_that_experts_stay_cut_where_no_layout_cuts_them(tmp_path):
    """Every rank has a file of each expert, which then differs in nothing."""
    source, folder = tmp_path / "source", tmp_path / "source" / "step"
    (tmp_path / "whole.toml").write_text(WHOLE_RULES, "utf-8")
    api.convert(RECORDED / "tensor_cut_z2", source, to="deepspeed", tp=1, dp=2, zero=1)
    for path in [*folder.glob("*mp_rank_00_*.pt")]:
        other = folder / path.name.replace("mp_rank_00", "mp_rank_01")
        other.write_bytes(path.read_bytes())
        edit_file(other, lambda _: None)  # a file of its own, and no copied one
    for path in folder.glob("mp_rank_*"):
        said = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": [".*"],
            "parameter_with_row_parallelism_patterns": [],
        }
        edit_file(path, lambda root: root.update(mp_world_size=2, universal_checkpoint_info=said))  # noqa: B023
        edit_file(path, lambda root: root.pop("checkpoint_parallel_dimensions") and None)

    report = api.convert(
        source, tmp_path / "out", to="deepspeed", tp=4, dp=2, rules=tmp_path / "whole.toml"
    )

    assert axes_of(tmp_path / "out") == "ep=2,tp=4"
    assert not [f for f in report.findings if f.kind == "expert-tensor-parallelism"]
    assert same_states(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        (
            "tensor_whole_z1",
            (2, 2, 1),
            "1 expert-parallel ones and whole experts DeepSpeed saves neither all model files nor",
        ),
        ("tensor_whole_z1", (4, 1, 2), "as a multiple of --tp (4, 8, ...)"),
        ("tensor_cut_z2", (2, 1, 2), "1 data-parallel ranks cannot be divided into groups of 2"),
    ],
)
def test_ranks_that_no_engine_saves_all_of_are_refused(name, target, words, tmp_path):
    tp, dp, ep = target

    with pytest.raises(UnsupportedError) as caught:
        api.convert(RECORDED / name, tmp_path / "out", to="deepspeed", tp=tp, dp=dp, ep=ep)

    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_whole_experts_after_data_parallelism_are_refused_for_tensor_parallel_ranks(tmp_path):
    (tmp_path / "whole.toml").write_text(WHOLE_RULES, "utf-8")

    def convert(dp: int) -> None:
        api.convert(
            RECORDED / "data_first_z1",
            tmp_path / "out",
            to="deepspeed",
            tp=2,
            dp=dp,
            ep=2,
            rules=tmp_path / "whole.toml",
        )

    with pytest.raises(UnsupportedError, match="saves the model file of the first alone"):
        convert(2)
    convert(1)  # every rank holds others, and none comes after data parallelism

    assert same_states(RECORDED / "data_first_z1", tmp_path / "out")


def test_the_preset_of_a_model_says_nothing_of_such_experts():
    how = {"a.weight": "preset llama", f"{PREFIX}.0.up.weight": "preset llama"}

    with pytest.raises(UnsupportedError, match="which preset llama knows nothing of; write a rule"):
        require_said(how, how)

    require_said(how, {**how, f"{PREFIX}.0.up.weight": "kept"})


def test_ranks_with_unequal_parts_that_would_split_a_group_differently_are_refused():
    """DeepSpeed splits the groups of experts by the size of what a rank has."""
    names = tuple(f"{PREFIX}.0.{rest}" for rest in "abc")
    group = ParameterGroup(names, {"name": "ep_size_1", "moe": True}, {})
    order = ExpertOrder({PREFIX: 1}, frozenset(names), {PREFIX: 1}, {PREFIX: 1}, [1])
    even, uneven = dict.fromkeys(names, 2), {**dict.fromkeys(names, 2), names[0]: 1}

    def bounds(*sizes: dict[str, int]) -> list[int]:
        before = dict.fromkeys(names, 1)
        return [len(own.names) for own in order.retold([group], before, sizes, most=5)]

    assert bounds(even, even) == [2, 1]
    with pytest.raises(UnsupportedError, match="split a group of more than 5 elements after"):
        bounds(even, uneven)


# Where the ranks are.


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_every_rank_is_one_cutter_and_one_partition(tp, ep, share, is_data_first):
    target = DeepSpeedTarget(tp=tp, dp=ep * share, zero=1, ep=ep)
    spread = spread_cut_experts(target, is_data_first=is_data_first)

    places = [spread.place(rank) for rank in range(target.mesh.size)]

    assert sorted(places) == [*itertools.product(range(ep * tp), range(share))]
    assert all(spread.ranks(c)[p] == rank for rank, (c, p) in enumerate(places))
    assert all(cutter % tp == rank % tp for rank, (cutter, _) in enumerate(places))


@pytest.mark.interop
@pytest.mark.parametrize("is_data_first", [False, True])
@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 4, 2), (3, 4, 4), (2, 6, 3), (4, 2, 1)])
def test_ranks_share_experts_as_deepspeed_groups_them(tp, dp, ep, is_data_first):
    groups = pytest.importorskip("deepspeed.utils.groups")
    spread = spread_cut_experts(
        DeepSpeedTarget(tp=tp, dp=dp, zero=1, ep=ep), is_data_first=is_data_first
    )

    parallel, shared = groups._get_expert_parallel_ranks(tp * dp, tp, ep, 1, is_data_first)

    ours = [spread.ranks(cutter) for cutter in range(ep * tp)]
    assert sorted(ours) == sorted(map(list, shared))
    for ranks in parallel:
        assert [spread.place(rank)[0] // tp for rank in ranks] == [*range(ep)]


@given(
    st.integers(1, 7),
    st.integers(1, 5),
    st.sampled_from([0, 1]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_a_block_of_ranks_shares_the_shards_of_one_tensor(rows, columns, dim, block, parts, own):
    count = own + 2
    sizes = [len(range(rank, (rows, columns)[dim], block)) for rank in range(block)]
    cut = split((rows, columns), mesh={"tp": block}, dim=dim, sizes=sizes)
    held = in_block(cut, Mesh((("ep", count), ("tp", block))), own * block)
    shares = Mesh((("part", parts),))
    inner = {
        rank: flat_chunks((held.shard_numel(rank),), mesh=shares) for rank in range(count * block)
    }
    mesh = Mesh((("dp", count * parts), ("tp", block)))

    chained = chained_in_block(held, inner, mesh, block)

    assert block_of(held, own * block, cut.mesh) == cut
    assert isinstance(prove(chained), Covered)
    for rank in range(mesh.size):
        of_block, part, tp = rank // (parts * block), rank // block % parts, rank % block
        expected: list[tuple[int, int]] = []
        if of_block == own:
            whole = dict(walked(cut, tp))
            flats = walked(inner[own * block + tp], part)
            expected = [(shard, whole[flat]) for shard, flat in flats]
        assert sorted(walked(chained, rank)) == sorted(expected)


def walked(layout, rank: int) -> list[tuple[int, int]]:
    """Every element of a shard, and where it is in the full tensor."""
    return [
        (
            piece.shard_base + sum(map(mul, steps, (axis.shard_stride for axis in piece.axes))),
            piece.full_base + sum(map(mul, steps, (axis.full_stride for axis in piece.axes))),
        )
        for piece in layout.pieces(rank)
        for steps in itertools.product(*(range(axis.extent) for axis in piece.axes))
    ]


# Universal folders.


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_a_universal_folder_has_all_experts_and_leads_to_tensor_parallel_ranks(
    name, rules, tmp_path
):
    api.convert(RECORDED / name, tmp_path / "folder", to="universal")
    to = {"to": "deepspeed", "tp": 2, "dp": 2, "ep": 2, "zero": 1}
    api.convert(tmp_path / "folder", tmp_path / "out", **to, rules=rules)

    assert same_states(RECORDED / name, tmp_path / "out")
    assert axes_of(tmp_path / "out") == "ep=2,tp=2"


def marks(folder: Path, name: str) -> dict[str, object]:
    """What a universal folder says of a tensor beside its elements."""
    path = next(folder.glob(f"*/zero/{name}/fp32.pt"))
    return {key: value for key, value in file_content(path).items() if key != "param"}


def test_what_is_said_of_an_expert_is_said_of_its_place_on_a_rank(tmp_path):
    """Expert 3 is 1 on the second rank; of 3 no category says anything."""
    source = tmp_path / "source"
    api.convert(RECORDED / "tensor_cut_z2", source, to="deepspeed", dp=2, ep=2)

    api.convert(source, tmp_path / "folder", to="universal")
    api.convert(RECORDED / "tensor_whole_z1", tmp_path / "whole", to="universal")

    expert = f"{PREFIX}.3"
    assert marks(tmp_path / "folder", f"{expert}.down.weight") == {"cat_dim": ("int", 1)}
    assert marks(tmp_path / "folder", f"{expert}.up.weight") == {"cat_dim": ("int", 0)}
    assert marks(tmp_path / "folder", f"{expert}.down.bias") == {}
    assert marks(tmp_path / "whole", f"{expert}.up.weight") == {}
    assert same_states(RECORDED / "tensor_cut_z2", source)
