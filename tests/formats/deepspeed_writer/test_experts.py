"""Experts of AutoEP, written for other expert-parallel ranks: every bit, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from restride import api
from restride.checkpoint.training import ParameterGroup
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.groups import regrouped
from restride.formats.deepspeed._writing.experts import place_experts
from restride.formats.deepspeed._writing.folding import expert_places
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts import replicated
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import file_content
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all
from restride.testing.saved_values import Array, edit_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.selection import Export

ROUTERS = [f"model.layers.{layer}.mlp" for layer in (0, 1)]
EXPERTS = [f"{router}.experts.w{weight}" for router in ROUTERS for weight in (1, 2, 3)]


def exported(source: Catalog, *target: int, **changed: Any) -> Export:
    layouts = {tensor.name: tensor.layout for tensor in source.tensors}
    training = replace(read_training(source), **changed)
    return lay_out(source, training, DeepSpeedTarget(1, *target), layouts)


def convert(source: Path, out: Path, *target: int) -> Export:
    catalog = read_catalog(source)
    export = exported(catalog, *target)
    write_export(catalog, export, out)
    return export


def require_same_states(source: Path, out: Path) -> None:
    """A weight may be stored on one side alone: ZeRO-3 stores none."""
    expected, found = (gather_all(read_catalog(folder)) for folder in (source, out))
    masters = {key for key in expected if not key.endswith("/weight")}
    assert masters == {key for key in found if not key.endswith("/weight")}
    assert set(EXPERTS) <= {key.rpartition("/")[0] for key in masters}
    for key in expected.keys() & found.keys():
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


# dp, zero, ep
@pytest.mark.parametrize(
    "target", [(2, 1, 1), (4, 1, 4), (6, 2, 2), (4, 3, 2), (4, 3, 4), (3, 3, 1), (4, 0, 4)]
)
@pytest.mark.parametrize("name", ["mixtral_ep2_z1", "mixtral_ep2_z3"])
def test_every_state_is_read_back_bit_for_bit(
    name: str, target: tuple[int, int, int], shared: Path, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / name

    convert(source, tmp_path / "out", *target)

    require_same_states(source, tmp_path / "out")
    again = read_catalog(tmp_path / "out")
    layouts = {tensor.name: tensor.layout for tensor in again.tensors}
    assert {layouts[name].rank_count for name in EXPERTS} == {target[2]}
    assert again.mesh == DeepSpeedTarget(1, *target).mesh


def test_there_and_back_the_files_hold_what_they_held(shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "mixtral_ep2_z1"

    convert(source, tmp_path / "there", 4, 3, 4)
    convert(tmp_path / "there", tmp_path / "further", 4, 2, 1)
    export = convert(tmp_path / "further", tmp_path / "back", 2, 1, 2)

    assert not export.findings
    require_same_files(tmp_path / "back", source)


# Four data-parallel ranks with two expert-parallel ones; in one of them neighbours share experts.
@pytest.mark.parametrize(
    "name", ["experts_z0", "experts_z1", "experts_z3", "experts_data_first_z1"]
)
def test_recorded_files_hold_what_they_held(name: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "data" / "deepspeed" / name

    convert(root, tmp_path / "out", 4, int(name[-1]), 2)

    require_same_files(tmp_path / "out", root)


def require_same_files(out: Path, source: Path) -> None:
    names = sorted(path.name for path in (source / "step").iterdir())
    assert names == sorted(path.name for path in (out / "step").iterdir())
    for name in names:
        found, expected = (
            with_plain_shapes(file_content(folder / "step" / name)) for folder in (out, source)
        )
        assert found == expected, name


def with_plain_shapes(content: Any) -> Any:
    """Shapes are plain tuples in the files of AutoEP, of which DeepSpeed's tools have no numel."""
    if content.get("param_shapes", (None, None))[1] is not None:
        content["param_shapes"] = [
            {name: numbers for name, (_, numbers) in group.items()}
            for _, group, *_ in content["param_shapes"][1]
        ]
    return content


def test_data_parallelism_may_come_first(
    shared: Path, tmp_path: Path, copied: Callable[[Path, Path], Path]
) -> None:
    """Neighbouring ranks then share their experts."""
    source = copied(shared / "checkpoints" / "mixtral_ep2_z1", tmp_path / "source")
    edit_file(
        source / "step" / "mp_rank_00_model_states.pt",
        lambda model: model["ds_config"].update(use_data_before_expert_parallelism=True),
    )

    convert(source, tmp_path / "out", 4, 3, 2)

    require_same_states(source, tmp_path / "out")
    layers = [
        open_torch_zip(
            tmp_path / "out" / "step" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        ).value["ds_autoep_layers"][1]
        for rank in range(4)
    ]
    assert [layer["ep_rank"] for layer in layers] == [0, 0, 1, 1]
    assert [layer["expert_data_parallel_rank"] for layer in layers] == [0, 1, 0, 1]


def test_as_many_expert_ranks_as_the_source_has_are_the_default(
    shared: Path, tmp_path: Path
) -> None:
    report = api.convert(
        shared / "checkpoints" / "mixtral_ep2_z1", tmp_path / "out", to="deepspeed", dp=4
    )

    assert "config-ep" not in {finding.kind for finding in report.findings}
    optimizer = tmp_path / "out" / "step" / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    state = open_torch_zip(optimizer).value["optimizer_state_dict"]
    assert state["partition_count"] == [4, 2]


def test_a_configuration_that_says_another_number_is_named(shared: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")

    notes = {finding.kind: finding.message for finding in exported(source, 4, 1, 4).findings}

    assert "autoep_size 2" in notes["config-ep"]
    assert notes["config-ep"].endswith("resume with 4")


# What goes with the experts.


def of_experts(*names: str, **settings: Any) -> ParameterGroup:
    return ParameterGroup(names, {"name": "ep_size_2", "moe": True, **settings}, {})


def members(groups: Any) -> list[tuple[str, ...]]:
    return [group.names for group in groups]


NUMELS = {"a": 8, "b": 8, "c": 8, "d": 8}


def test_fewer_experts_on_a_rank_are_fewer_groups() -> None:
    groups = [of_experts("a", "b"), of_experts("c", "d")]

    found = list(regrouped(groups, NUMELS, before=2, after=4, most=8))

    assert members(found) == [("a", "b", "c", "d")]
    assert found[0].settings == {"name": "ep_size_4", "moe": True}


def test_more_experts_on_a_rank_are_more_groups() -> None:
    found = regrouped([of_experts("a", "b")], NUMELS, before=2, after=1, most=8)

    assert members(found) == [("a",), ("b",)]


@pytest.mark.parametrize(
    "groups",
    [
        # The second one would have had room for more.
        [of_experts("a"), of_experts("b", "c")],
        # They are not alike.
        [of_experts("a", "b", lr=0.1), of_experts("c", "d", lr=0.2)],
        # The second one is not of experts.
        [of_experts("a", "b"), ParameterGroup(("c", "d"), {"lr": 0.1}, {})],
    ],
)
def test_bounds_that_are_not_of_size_stay(groups: list[ParameterGroup]) -> None:
    found = regrouped(groups, NUMELS, before=2, after=4, most=8)

    assert members(found) == members(groups)


@pytest.mark.interop
@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 40),
)
def test_groups_are_those_that_deepspeed_makes_for_the_ranks(sizes, before, after, most):
    """Groups of the user differ in something, as those of any model do."""
    torch = pytest.importorskip("torch")
    split = pytest.importorskip("deepspeed.moe.utils")

    def made(ranks):
        names, groups = {}, []
        for number, numels in enumerate(sizes):
            params = []
            for place, numel in enumerate(numels):
                param = torch.nn.Parameter(torch.zeros(4 * numel // ranks))
                param.allreduce, param.group_name = False, f"ep_size_{ranks}"
                names[id(param)] = f"{number}.{place}"
                params.append(param)
            groups.append({"params": params, "name": f"group {number}", "lr": number})
        found = split.split_params_into_different_moe_groups_for_optimizer(groups, most)
        return [
            ParameterGroup(
                tuple(names[id(param)] for param in group["params"]),
                {key: value for key, value in group.items() if key != "params"},
                {},
            )
            for group in found
            if group["params"]
        ]

    numels = {f"{g}.{p}": 4 * n for g, own in enumerate(sizes) for p, n in enumerate(own)}

    found = list(regrouped(made(before), numels, before=before, after=after, most=most))

    assert found == made(after)


def test_a_second_name_of_the_router_is_one_tensor_with_it(shared: Path, tmp_path: Path) -> None:
    """AutoEP's files have copies of it, or at ZeRO-3 nothing."""
    source = shared / "checkpoints" / "mixtral_ep2_z3"

    convert(source, tmp_path / "out", 2, 1, 2)

    model = open_torch_zip(tmp_path / "out" / "step" / "mp_rank_00_model_states.pt").value
    for router in ROUTERS:
        first, second = (
            model["module"][f"{router}.{child}.gate.weight"] for child in ("router", "gate")
        )
        assert first == second
    assert model["shared_params"] == {}
    assert not set(EXPERTS) & model["module"].keys()


def test_a_tensor_of_that_name_and_another_shape_stays_what_it_is(
    shared: Path, tmp_path: Path, copied: Callable[[Path, Path], Path]
) -> None:
    source = copied(shared / "checkpoints" / "mixtral_ep2_z1", tmp_path / "source")
    name = f"{ROUTERS[0]}.gate.gate.weight"
    edit_file(
        source / "step" / "mp_rank_00_model_states.pt",
        lambda model: model["module"].update({name: Array("bfloat16", (2,), b"abcd")}),
    )

    convert(source, tmp_path / "out", 4, 1, 4)

    found = gather_all(read_catalog(tmp_path / "out"))
    assert found[f"{name}/weight"].tobytes() == b"abcd"


def test_a_tensor_of_that_name_which_is_no_copy_stays_what_it_is(
    shared: Path, tmp_path: Path, copied: Callable[[Path, Path], Path]
) -> None:
    source = copied(shared / "checkpoints" / "mixtral_ep2_z1", tmp_path / "source")
    name = f"{ROUTERS[1]}.gate.gate.weight"
    catalog = read_catalog(source)
    entry = next(t for t in catalog.tensors if t.name == name).states["weight"]
    with (source / catalog.files[entry.regions[0].file].name).open("r+b") as file:
        file.seek(entry.regions[0].start_nbytes)
        file.write(b"\x12\x34")

    convert(source, tmp_path / "out", 2, 3, 2)

    expected, found = (gather_all(read_catalog(folder)) for folder in (source, tmp_path / "out"))
    np.testing.assert_array_equal(found[f"{name}/weight"], expected[f"{name}/weight"])


# Refusals.


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ((3, 1, 3), "4 experts do not divide over 3 expert-parallel ranks; choose --ep 1, 2 or 4"),
        ((8, 3, 8), "4 experts do not divide over 8 expert-parallel ranks; choose --ep 1, 2 or 4"),
    ],
)
def test_ranks_that_no_engine_could_have_are_refused(
    target: tuple[int, int, int], words: str, shared: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")

    with pytest.raises(UnsupportedError) as caught:
        exported(source, *target)
    assert words in str(caught.value)


def test_a_model_without_such_experts_has_no_expert_ranks(shared: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tp1dp2_z1")

    with pytest.raises(UnsupportedError, match=r"of AutoEP or of deepspeed\.moe.*, and 2"):
        exported(source, 2, 1, 2)


@pytest.mark.parametrize(("zero", "is_refused"), [(1, False), (2, True), (3, True)])
def test_frozen_experts_are_refused_where_deepspeed_loses_them(
    zero: int, *, is_refused: bool, shared: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")
    dense = read_training(source).groups[:1]
    if not is_refused:
        assert exported(source, 2, zero, 2, groups=dense).output.nbytes
        return

    with pytest.raises(UnsupportedError, match="DeepSpeed cannot resume frozen experts"):
        exported(source, 2, zero, 2, groups=dense)


def test_experts_beside_other_parameters_in_one_group_are_for_zero_3(
    shared: Path, tmp_path: Path
) -> None:
    """Its sub-groups are told apart anyway."""
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")
    dense, stacked = read_training(source).groups
    mixed = (replace(dense, names=(*stacked.names, *dense.names)),)

    export = exported(source, 2, 3, 2, groups=mixed)

    write_export(source, export, tmp_path / "out")
    require_same_states(shared / "checkpoints" / "mixtral_ep2_z1", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="experts beside other parameters"):
        exported(source, 2, 1, 2, groups=mixed)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts", 8, "says there are 8 experts"),
        ("expert_key_prefix", "model.layers.7.mlp.experts", "is not there"),
    ],
)
def test_layers_that_are_not_those_of_the_model_are_refused(
    key: str, value: object, words: str, shared: Path
) -> None:
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")
    first, second = read_training(source).experts

    with pytest.raises(CorruptError, match=words) as caught:
        exported(source, 2, 1, 2, experts=(first, {**second, key: value}))
    assert "ds_autoep_layers[1]" in str(caught.value)


@pytest.mark.parametrize("size", [0, None, "two"])
def test_experts_that_were_on_no_number_of_ranks_are_refused(size: object, shared: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "mixtral_ep2_z1")
    first, second = read_training(source).experts

    with pytest.raises(CorruptError, match=f"ep_size of layer '{ROUTERS[0]}' is {size!r}"):
        exported(source, 2, 1, 2, experts=({**first, "ep_size": size}, second))


def test_groups_that_are_joined_know_what_the_script_gave_to_the_optimizer() -> None:
    """Without ZeRO, optimizers in float32 number all of that."""
    first, second = of_experts("a", "b"), of_experts("c", "d")
    listed = replace(first, listed=("a", "x", "b")), replace(second, listed=("c", "d"))

    (joined,) = regrouped(listed, NUMELS, before=2, after=4, most=8)
    (unknown,) = regrouped((listed[0], second), NUMELS, before=2, after=4, most=8)
    apart = [*regrouped(listed, NUMELS, before=2, after=1, most=8)]

    assert joined.listed == ("a", "x", "b", "c", "d")
    assert unknown.listed is None
    assert [group.listed for group in apart] == [None] * 4


# What is read of it.


def test_a_second_name_that_zero_3_stores_nothing_of_is_no_lost_weight(shared: Path) -> None:
    catalog = read_catalog(shared / "checkpoints" / "mixtral_ep2_z3")

    told = {finding.where: finding for finding in catalog.findings}
    for router in ROUTERS:
        finding = told[f"tensor '{router}.gate.gate.weight'"]
        assert (finding.severity, finding.kind) == ("note", "second-name")
        assert f"{router}.router.gate.weight" in finding.message


# AutoEP with AutoTP: expert-parallel ranks fold tensor-parallel ones.

FOLDED = Path(__file__).parents[2] / "data" / "deepspeed"


@pytest.mark.parametrize("name", ["experts_folded_z0", "experts_folded_z1", "experts_folded_z3"])
def test_for_the_same_folded_ranks_the_files_are_those_of_the_engine(
    name: str, require_saved_again, tmp_path: Path
) -> None:
    api.convert(FOLDED / name, tmp_path / "out", to="deepspeed")

    require_saved_again(tmp_path / "out", FOLDED / name)


@pytest.mark.parametrize("name", ["experts_folded_z0", "experts_folded_z1", "experts_folded_z3"])
@pytest.mark.parametrize(
    ("tp", "dp", "ep", "zero"),
    [(1, 4, 2, 1), (2, 1, 2, 2), (2, 2, 4, 3), (1, 1, 1, 0), (2, 2, 2, 0), (2, 2, 4, 0)],
)
def test_folded_experts_come_to_other_ranks_and_back(
    name: str, tp: int, dp: int, ep: int, zero: int, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    api.convert(FOLDED / name, one, to="deepspeed", tp=tp, dp=dp, ep=ep, zero=zero)

    expected, found = (gather_all(read_catalog(folder)) for folder in (FOLDED / name, one))
    masters = [key for key in expected if not key.endswith("/weight")]
    assert masters == [key for key in found if not key.endswith("/weight")]
    assert all(np.array_equal(found[key], expected[key]) for key in expected.keys() & found.keys())
    if tp == 2:
        api.convert(one, two, to="deepspeed", dp=2, ep=2, zero=1)
        back = gather_all(read_catalog(two))
        assert all(np.array_equal(back[key], expected[key]) for key in masters)


@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 4, 8), (3, 4, 4), (2, 2, 1), (4, 1, 2)])
def test_every_pair_of_both_ranks_has_the_first_rank_that_is_it(tp: int, dp: int, ep: int) -> None:
    """Eight expert-parallel ranks fold two tensor-parallel ones, and each rank is one of a kind."""
    target = DeepSpeedTarget(tp=tp, dp=dp, zero=0, ep=ep)
    placed: Any = SimpleNamespace(target=target, expert_rank=lambda rank: rank % ep)

    places = expert_places(placed)

    pairs = [(rank % ep, rank % tp) for rank in range(dp * tp)]
    assert places == {pair: pairs.index(pair) for pair in pairs}


def test_every_tensor_parallel_rank_finds_the_file_of_its_experts(tmp_path: Path) -> None:
    """Four of them fold two expert-parallel ones, so that two have the same experts."""
    source = read_catalog(FOLDED / "experts_folded_z1")
    layouts = {
        tensor.name: replicated(tensor.layout.full_shape, mesh={"tp": 4})
        for tensor in source.tensors
    }

    export = lay_out(source, read_training(source), DeepSpeedTarget(4, 1, 1, ep=2), layouts)
    write_export(source, export, tmp_path / "out")

    for expert in range(4):
        files = sorted((tmp_path / "out" / "step").glob(f"layer_0_expert_{expert}_*"))
        own = [file_content(file)["folding"] for file in files]
        assert [(said["tp_rank"][1], said["ep_rank"][1]) for said in own] == [
            (tp, expert // 2) for tp in range(4) if tp % 2 == expert // 2
        ]
    expected, found = (gather_all(read_catalog(c)) for c in (source.root, tmp_path / "out"))
    assert {key for key in expected if not key.endswith("/weight")} <= found.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected.keys() & found.keys())


def test_folds_that_no_engine_takes_are_refused(tmp_path: Path) -> None:
    words = "need expert-parallel ones for; choose --ep 2 or more, or --tp 1"

    with pytest.raises(UnsupportedError, match=words):
        api.convert(
            FOLDED / "experts_folded_z1",
            tmp_path / "out",
            to="deepspeed",
            tp=2,
            dp=2,
            zero=1,
            ep=1,
        )


def test_data_parallelism_first_is_not_folded() -> None:
    source = FOLDED / "experts_data_first_z1"

    with pytest.raises(UnsupportedError, match="use_data_before_expert_parallelism"):
        place_experts(
            read_catalog(source),
            read_training(read_catalog(source)),
            DeepSpeedTarget(2, 2, 1, 2),
            {},
        )


def test_a_universal_folder_of_folded_experts_is_for_as_many_ranks(tmp_path: Path) -> None:
    """The engine compares them with its own (seen with DeepSpeed 0.19.8)."""
    report = api.convert(FOLDED / "experts_folded_z1", tmp_path / "out", to="universal")

    (finding,) = (finding for finding in report.findings if finding.kind == "folded")
    assert finding.severity == "warning"
    assert "only an engine with tp=2, dp=2, ep=2 loads the folder" in finding.message
    expected, found = (
        gather_all(read(folder))
        for read, folder in (
            (read_catalog, FOLDED / "experts_folded_z1"),
            (api.open, tmp_path / "out"),
        )
    )
    masters = {key for key in expected if not key.endswith("/weight")}
    assert all(np.array_equal(found[key], expected[key]) for key in masters)


def test_a_model_without_experts_is_not_folded(shared: Path) -> None:
    source = read_catalog(shared / "checkpoints" / "llama_tp2_z1")

    with pytest.raises(UnsupportedError, match="2 expert-parallel ranks are asked for"):
        place_experts(source, read_training(source), DeepSpeedTarget(2, 1, 1, 2), {})
