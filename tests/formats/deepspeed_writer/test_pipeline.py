"""Pipelines in sharded form: layers, stages and tied modules, without the engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from restride import api
from restride.errors import CorruptError, ReplicaError, UnsupportedError
from restride.formats.opening import Told, open_catalog, open_training
from restride.storage.torch_zip import open_torch_zip
from restride.testing.contents import file_content, tree
from restride.testing.gather import gather_all
from restride.testing.pipeline_files import StageRun, pipelines, write_pipeline
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun
from restride.testing.zero_runs import distinct

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed_pipeline"
TIED = "tied_modules.embed.weight"
# The second stage uses the embedding of layer 0 through a function, in layer 5.
HEAD = {"embed": [0, 5]}
STATES = ("weight", "fp32", "exp_avg")


def converted(source: Path, out: Path, **options: Any) -> Path:
    api.convert(source, out, to="deepspeed", **options)
    return out


def shapes_of(folder: Path) -> list[list[list[str]]]:
    """Names of each parameter group of each model-parallel rank, in the order of its buffer."""
    files = sorted((folder / "step").glob("mp_rank_*"))
    roots: list[Any] = [open_torch_zip(file).value for file in files]
    return [[[*group] for group in root["param_shapes"]] for root in roots]


def require_same_states(source: Path, out: Path, *, besides: str = "") -> None:
    expected, found = (gather_all(api.open(path)) for path in (source, out))
    assert expected.keys() == found.keys()
    for key, array in expected.items():
        if not besides or not key.endswith(besides):
            assert np.array_equal(found[key], array), key


def whole(shape: tuple[int, ...], first: int, group: int = 0) -> Parameter:
    states = {state: distinct(shape, first + 100 * n) for n, state in enumerate(STATES)}
    return Parameter(shape, states, group=group)


def stage(parameters: Mapping[str, Parameter], layers: Mapping[int, str]) -> StageRun:
    return StageRun(ZeroRun(1, 1, dict(parameters)), layers)


def blocks(*numbers: int, extra: Mapping[str, Parameter] | None = None) -> StageRun:
    """A stage of plain layers, each with one weight."""
    named = {f"{n}.weight": whole((n + 2, 3), 1000 * (n + 1)) for n in numbers}
    return stage({**(extra or {}), **named}, {n: f"{n}." for n in numbers})


@pytest.fixture
def copied(tmp_path):
    def copy(name: str) -> Path:
        shutil.copytree(RECORDED / name, tmp_path / name)
        return tmp_path / name

    return copy


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied_z1", {}),
        ("tensor_z1", {}),
        ("shared_z1", {}),
        ("uneven_z1", {"replicas": "own"}),
        ("fp32_z0", {"pp_tied": {}}),
        ("fp32_tied_z0", {"pp_tied": HEAD}),
        ("fp32_tensor_z0", {"pp_tied": {}}),
        ("fp16_z0", {"pp_tied": {}}),
        ("fp16_flat_z0", {"pp_tied": HEAD}),
    ],
)
def test_for_the_same_ranks_every_file_holds_what_the_engine_wrote(name, options, tmp_path):
    """The copies of a tied layer that drifted stay what each stage trained, too."""
    out = converted(RECORDED / name, tmp_path / "out", **options)

    files = sorted(file.name for file in (RECORDED / name / "step").iterdir())
    assert sorted(file.name for file in (out / "step").iterdir()) == files
    for file in files:
        ours, theirs = (file_content(path / "step" / file) for path in (out, RECORDED / name))
        if file.startswith("mp_rank"):
            for content in (ours, theirs):
                content.pop("universal_checkpoint_info", None)  # categories became maps
        assert ours == theirs, file
    assert (out / "latest").read_text() == "step"


@given(pipelines())
@settings(max_examples=12)
def test_every_state_is_read_back_bit_for_bit_from_other_ranks_of_one_and_of_all_stages(stages):
    with TemporaryDirectory() as folder:
        source = Path(folder) / "run"
        if stages[0].run.writer == "elastic":
            return
        write_pipeline(source, stages)
        dp = stages[0].run.dp % 3 + 1

        for pp in {1, len(stages)}:
            out = converted(source, Path(folder) / f"out{pp}", pp=pp, dp=dp, zero=1)

            mesh = api.open(out).mesh
            assert dict(mesh.axes) == {
                **({"pp": pp} if pp > 1 else {}),
                "dp": dp,
                "tp": stages[0].run.tp,
            }
            require_same_states(source, out)


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"pp": 1}, [[TIED, "1.up.weight", "1.down.weight", "3.up.weight", "3.down.weight"]]),
        (
            {"pp_layers": [0, 3, 4], "pp_tied": HEAD},
            [
                [TIED, "1.up.weight", "1.down.weight"],
                ["3.up.weight", "3.down.weight"],
                [TIED],
            ],
        ),
        (
            {"pp_layers": "0,3", "pp_tied": HEAD},
            [
                [TIED, "1.up.weight", "1.down.weight"],
                [TIED, "3.up.weight", "3.down.weight"],
            ],
        ),
    ],
    ids=["one", "head", "same"],
)
def test_a_stage_has_its_layers_and_the_tied_modules_that_they_use(options, groups, tmp_path):
    out = converted(RECORDED / "tied_z1", tmp_path / "out", dp=1, **options)

    assert [own[0] for own in shapes_of(out)] == groups
    require_same_states(RECORDED / "tied_z1", out)


def test_a_round_trip_over_stages_and_ranks_ends_with_the_same_files(tmp_path):
    first = converted(RECORDED / "tied_z1", tmp_path / "first")
    one = converted(first, tmp_path / "one", pp=1, dp=3)
    three = converted(one, tmp_path / "three", pp_layers=[0, 2, 4], pp_tied=HEAD, dp=2)
    back = converted(three, tmp_path / "back", pp_layers=[0, 3], pp_tied=HEAD, dp=2)

    assert tree(back).keys() == tree(first).keys()
    for file in sorted((first / "step").iterdir()):
        assert file_content(back / "step" / file.name) == file_content(file), file.name


def test_tensor_parallel_ranks_of_a_pipeline_are_joined_with_its_stages(tmp_path):
    out = converted(RECORDED / "tensor_z1", tmp_path / "out", tp=1, pp=1, dp=2)

    assert [file.name for file in sorted((out / "step").glob("layer_*"))] == [
        f"layer_{number:02d}-model_states.pt" for number in range(4)
    ]
    assert str(api.open(out).mesh) == "dp=2,tp=1"
    require_same_states(RECORDED / "tensor_z1", out)


def test_files_that_name_the_only_rank_go_on_to_name_it(copied, tmp_path):
    folder = copied("shared_z1")
    for file in (folder / "step").glob("layer_*"):
        file.rename(file.with_name(file.name.replace("-model_", "-model_00-model_")))

    out = converted(folder, tmp_path / "out", dp=1)

    assert (out / "step" / "layer_00-model_00-model_states.pt").is_file()


def test_what_a_layer_has_besides_tensors_is_carried(copied, tmp_path):
    """And so is a layer that has nothing: an engine looks for its file."""
    folder = copied("tied_z1")

    def more(root: Any) -> None:
        root["inner._extra_state"] = {"seen": 7}

    edit_file(folder / "step" / "layer_03-model_states.pt", more)
    shutil.copy(
        folder / "step" / "layer_04-model_states.pt", folder / "step" / "layer_02-model_states.pt"
    )
    edit_file(folder / "step" / "layer_02-model_states.pt", lambda root: root.clear())

    out = converted(folder, tmp_path / "out", pp_layers=[0, 4], pp_tied=HEAD)

    layer: Any = open_torch_zip(out / "step" / "layer_03-model_states.pt").value
    assert layer["inner._extra_state"] == {"seen": 7}
    assert open_torch_zip(out / "step" / "layer_02-model_states.pt").value == {}


def test_the_cut_is_told_as_the_log_of_the_engine_has_it(tmp_path):
    report = api.convert(
        *(RECORDED / "tied_z1", tmp_path / "out"),
        to="deepspeed",
        pp=3,
        pp_layers="parameters:6",
        pp_tied=HEAD,
    )

    (note,) = (finding for finding in report.findings if finding.kind == "stages")
    assert note.severity == "note"
    assert note.details == {"starts": [0, 3, 4]}
    assert "(partition_method 'parameters' of 6 layers)" in note.message
    assert "stage=0 layers=3" in note.message


def test_stages_that_stay_are_told(tmp_path):
    report = api.convert(RECORDED / "tied_z1", tmp_path / "out", to="deepspeed", dp=1)

    (note,) = (finding for finding in report.findings if finding.kind == "stages")
    assert "the 2 stages keep the layers that they have (0 to 1; 3 to 4)" in note.message


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 1, "zero": 0},
        {"pp_layers": [0, 3, 4], "zero": 0},
        {"pp_layers": [0, 3, 4], "zero": 1, "dp": 2},
        {"zero": 1, "dp": 3},
    ],
)
def test_states_without_zero_go_to_other_stages_and_stages_of_zero(options, tmp_path):
    """What is written without ZeRO is read with the same ties, and what is with it without any."""
    source = RECORDED / "fp32_tied_z0"
    expected = gather_all(open_catalog(source, told=Told(pp_tied={"embed": (0, 5)})))

    out = converted(source, tmp_path / "out", pp_tied=HEAD, **options)

    found = gather_all(open_catalog(out, told=Told(pp_tied={"embed": (0, 5)})))
    # Weights that are trained in fp32 are their own master copies.
    assert found.keys() - expected.keys() <= {key for key in found if key.endswith("/fp32")}
    assert len(expected) == 77
    assert all(np.array_equal(found[key], array) for key, array in expected.items())
    back = converted(out, tmp_path / "back", pp_layers=[0, 3], dp=1, zero=0, pp_tied=HEAD)
    for file in sorted((source / "step").iterdir()):
        ours, theirs = (file_content(path / "step" / file.name) for path in (back, source))
        assert ours == theirs, file.name


def test_names_that_an_optimizer_without_zero_was_given_say_which_layers_are_tied(copied, tmp_path):
    folder = copied("fp32_tied_z0")
    catalog = open_catalog(folder, told=Told(pp_tied={"embed": (0, 5)}))
    expected = gather_all(catalog)
    groups = open_training(catalog).pipeline.stages
    for mp, own in enumerate(groups):

        def name(root: Any, own: Any = own) -> None:
            for stored, group in zip(root["optimizer"]["param_groups"], own.groups, strict=True):
                stored["param_names"] = [*group.names]

        edit_file(folder / "step" / f"mp_rank_{mp:02d}_model_states.pt", name)

    named = api.open(folder)

    assert named.tied is None
    assert {finding.severity for finding in named.findings} <= {"note"}
    found = gather_all(named)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[key], array) for key, array in expected.items())
    require_same_states(folder, converted(folder, tmp_path / "one", pp=1, zero=1))


def test_numbers_are_left_alone_until_it_is_told_which_layers_are_tied(tmp_path):
    source = RECORDED / "fp32_tied_z0"

    findings = api.open(source).findings

    assert "unmatched-states" in {finding.kind for finding in findings}
    assert "nothing says which layers are tied: say --pp-tied none" in findings[0].message
    with pytest.raises(CorruptError, match="as --pp-tied embed=0,5"):
        converted(source, tmp_path / "out")
    api.convert(source, tmp_path / "weights")  # which have names
    assert converted(source, tmp_path / "out", pp_tied=HEAD).is_dir()


@pytest.mark.parametrize("name", ["fp32_tensor_z0", "fp32_z0"])
def test_a_block_that_is_frozen_in_part_may_hide_a_tied_norm(name):
    """Its first shape is that of the last layer, which its stage might use through a function."""
    findings = api.open(RECORDED / name).findings

    assert [finding.kind for finding in findings] == ["unmatched-states"]


def test_a_numbering_that_is_proved_does_not_tell_how_tied_modules_are_called(copied, tmp_path):
    """The embedding may be tied to a function of its own stage: an engine calls it otherwise."""
    source = copied("fp32_z0")

    def with_buffers(root: Any) -> None:  # which say that the norm is not tied
        root["buffer_names"].append("2.positions")

    edit_file(source / "step" / "mp_rank_01_model_states.pt", with_buffers)
    assert {finding.kind for finding in api.open(source).findings} == {"numbered-states"}
    for number, options in enumerate(({"to": "universal"}, {"to": "deepspeed", "pp": 1})):
        with pytest.raises(UnsupportedError, match="say --pp-tied none if none is"):
            api.convert(source, tmp_path / f"refused{number}", **options)
        api.convert(source, tmp_path / f"out{number}", pp_tied={}, **options)
    require_same_states(source, converted(source, tmp_path / "one", zero=1, dp=2), besides="/fp32")


@pytest.mark.parametrize(
    ("tied", "words"),
    [
        (
            {"embed": [0]},
            ["number 2 parameters of shape (11, 6), and the layers have 1", "embed=0"],
        ),
        ({"embed": [3, 5]}, ["layer 3 is said to use 'embed'", "buffers under its own name"]),
        ({"embed": [4, 5]}, ["no run of layers fits", "--pp-tied embed=4,5"]),
        ({"embed": [7]}, ["no layer that is said to use 'embed' has a file"]),
        ({"a": [0, 5], "b": [5]}, ["layer 5 is said to use both 'a' and 'b'"]),
        ({}, ["no run of layers fits", "--pp-tied none"]),
    ],
)
def test_ties_that_are_told_and_are_not_so_are_refused(tied, words, tmp_path):
    refused(RECORDED / "fp32_tied_z0", tmp_path / "out", *words, pp_tied=tied)


def test_a_checkpoint_with_names_takes_no_ties_where_they_change_nothing(tmp_path):
    for to in ("safetensors", "universal"):
        with pytest.raises(UnsupportedError, match="takes no --pp-tied"):
            api.convert(RECORDED / "tied_z1", tmp_path / "out", to=to, pp_tied=HEAD)


@pytest.mark.parametrize(
    ("name", "ties", "options"),
    [
        ("fp16_z0", {}, {"pp": 1, "zero": 0}),
        ("fp16_z0", {}, {"pp_layers": [0, 1, 3], "zero": 1, "dp": 2}),
        ("fp16_flat_z0", HEAD, {"pp_layers": [0, 3, 4], "zero": 0}),
        ("fp16_flat_z0", HEAD, {"pp": 1, "tp": 1, "zero": 0}),
        ("fp16_flat_z0", HEAD, {"zero": 1, "dp": 2}),
    ],
)
def test_states_in_fp16_without_zero_go_to_other_stages_and_stages_of_zero(
    name, ties, options, tmp_path
):
    """Which layers are frozen is told by what master weights round to."""
    told = {key: tuple(numbers) for key, numbers in ties.items()}
    expected = gather_all(open_catalog(RECORDED / name, told=Told(pp_tied=told)))

    out = converted(RECORDED / name, tmp_path / "out", pp_tied=ties, **options)

    found = gather_all(open_catalog(out, told=Told(pp_tied=None if options["zero"] else told)))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], array) for key, array in expected.items())
    assert len([key for key in found if key.endswith("/exp_avg_sq")]) >= 14


def test_flat_groups_of_weights_that_are_not_theirs_are_left_out_with_the_place(copied):
    """They were averaged before saving, or are of another save."""
    folder = copied("fp16_flat_z0")
    layer = folder / "step" / "layer_03-model_01-model_states.pt"
    edit_file(layer, lambda root: root.update({"up.bias": Array("float16", (4,), bytes(8))}))

    catalog = open_catalog(folder, told=Told(pp_tied={"embed": (0, 5)}))

    assert [finding.kind for finding in catalog.findings] == ["unmatched-states"]
    assert "step/mp_rank_03_model_states.pt: optimizer['fp32_groups_flat'][1] has" in str(
        catalog.findings[0].message
    )
    assert "rounds to no weight of a layer" in catalog.findings[0].message
    assert {state for tensor in catalog.tensors for state in tensor.states} == {"weight"}


def test_flat_groups_are_found_where_the_optimizer_was_told_the_names(copied):
    """Frozen parameters are among them: a wrapper takes them out of the group alone."""
    folder = copied("fp16_flat_z0")
    catalog = open_catalog(folder, told=Told(pp_tied={"embed": (0, 5)}))
    expected = gather_all(catalog)
    stages = open_training(catalog).pipeline.stages
    for mp in range(4):
        own = stages[mp // 2]

        def name(root: Any, own: Any = own) -> None:
            entries = root["optimizer"]["optimizer_state_dict"]["param_groups"]
            for stored, group in zip(entries, own.groups, strict=True):
                frozen = (
                    [n for n in own.names if n.endswith("scale")] if stored is entries[1] else []
                )
                stored["param_names"] = [*group.names, *frozen]

        edit_file(folder / "step" / f"mp_rank_{mp:02d}_model_states.pt", name)

    found = gather_all(api.open(folder))

    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def refused(source: Path, out: Path, *words: str, **options: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        converted(source, out, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not out.exists()
    assert not out.with_name(f"{out.name}.partial").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 2}, ["ZeRO-2 does not go with pipelines", "choose --zero 1"]),
        ({"zero": 3}, ["ZeRO-3 does not go with pipelines"]),
        ({"zero": 0}, ["bf16 does not load its optimizer", "choose --zero 1"]),
        ({"ep": 2}, ["no experts for ep=2"]),
        ({"pp": 3}, ["uses the tied module 'embed'", "--pp-tied embed=0,5"]),
        ({"pp_layers": [0, 3]}, ["may be layer 5", "--pp-tied embed=0,5"]),
        ({"pp_layers": [0, 3], "pp": 3}, ["2 first layers are given for 3 stages"]),
        ({"pp_layers": [1, 3]}, ["'1,3' are no first layers"]),
        ({"pp_layers": [0, 3, 3]}, ["'0,3,3' are no first layers"]),
        ({"pp_layers": "type:block"}, ["no cut into stages", "no classes of layers", "0,3,6"]),
        ({"pp_layers": "uniform:"}, ["no cut into stages"]),
        ({"pp_layers": "uniform:99999999"}, ["no pipeline has 99999999 layers"]),
        ({"pp_layers": "uniform:3", "pp_tied": HEAD}, ["at least 6 layers, 3 are said"]),
        ({"pp": 4, "pp_layers": "uniform", "pp_tied": HEAD}, ["'uniform' has other stages for 6"]),
        (
            {"pp_layers": [0, 3, 5], "pp_tied": HEAD},
            ["stage 2 would train 1 of 2 parameter groups", "waits for ever", "--pp-layers 0,3,6"],
        ),
        ({"pp_layers": [0, 2, 3], "pp_tied": HEAD}, ["stage 1 of 3 would have no parameter"]),
        ({"pp": 9, "pp_tied": HEAD}, ["'parameters' has other stages for 6 layers than for 15"]),
        ({"pp": 9, "pp_layers": "uniform:9", "pp_tied": HEAD}, ["would have no parameter"]),
        ({"pp_tied": {"head": [0]}}, ["no stage has a tied module 'head'", "here are embed"]),
        ({"pp_tied": {"embed": [5]}}, ["layer 0 has a file with that module"]),
        ({"pp_tied": {"embed": [0, 1, 5]}}, ["layer 1 has a file, which is not of that"]),
        ({"pp_tied": {"embed": [0]}}, ["stage 1 of the source has that module, and none"]),
        ({"pp_tied": {"embed": []}}, ["are no layers that are tied"]),
        ({"pp": 1 << 15, "dp": 4}, ["a run has no 32768 * 1 * 4 ranks"]),
    ],
)
def test_what_cannot_be_written_is_refused_with_what_works(options, words, tmp_path):
    refused(RECORDED / "tied_z1", tmp_path / "out", *words, **options)


def test_a_model_without_stages_is_not_cut_into_any(tmp_path):
    source = RECORDED.parent / "deepspeed" / "tied_frozen_z1"

    for options in ({"pp": 2}, {"pp_layers": [0]}, {"pp_tied": {"embed": [0]}}):
        refused(source, tmp_path / "out", "is of no pipeline", **options)
    assert converted(source, tmp_path / "out", pp=1).is_dir()


def test_a_universal_folder_has_no_buffers_of_a_pipeline(tmp_path):
    for name in ("shared_z1", "tied_z1"):
        api.convert(RECORDED / name, tmp_path / name, to="universal")
        refused(
            tmp_path / name,
            tmp_path / "out",
            "of its layers",
            "it fits pipelines of any stages",
            dp=1,
            tp=1,
            zero=1,
        )


def test_a_universal_folder_of_a_pipeline_without_buffers_is_cut_into_stages_again(tmp_path):
    """Layer 2 may be a module without parameters, whose file an engine would look for."""
    table = {TIED: whole((11, 3), 70_000)}
    first = blocks(1, extra=table)
    stages = [StageRun(first.run, {0: "tied_modules.embed.", 1: "1."}), blocks(3, 4, extra=table)]
    write_pipeline(tmp_path / "run", stages)
    api.convert(tmp_path / "run", tmp_path / "universal", to="universal")
    options = {"dp": 1, "tp": 1, "zero": 1}

    refused(
        *(tmp_path / "universal", tmp_path / "out"),
        *("without the files of its layers", "as --pp-tied embed=0,5"),
        **options,
    )
    told = api.convert(
        tmp_path / "universal", tmp_path / "same", to="deepspeed", pp_tied=HEAD, **options
    )
    assert "described-layers" in {finding.kind for finding in told.findings}
    assert shapes_of(tmp_path / "same") == shapes_of(tmp_path / "run")
    # The weights are its master copies, which those of this oracle are not.
    require_same_states(tmp_path / "run", tmp_path / "same", besides="/weight")
    assert open_torch_zip(tmp_path / "same" / "step" / "layer_02-model_states.pt").value == {}

    again, direct = (
        converted(
            *(tmp_path / source, tmp_path / f"{source}-3"),
            pp_layers=[0, 3, 4],
            pp_tied=HEAD,
            **options,
        )
        for source in ("universal", "run")
    )
    assert (
        shapes_of(again)
        == shapes_of(direct)
        == [
            [[TIED, "1.weight"]],
            [["3.weight"]],
            [[TIED, "4.weight"]],
        ]
    )
    require_same_states(direct, again, besides="/weight")
    (tmp_path / "wrong").mkdir()
    refused(
        *(tmp_path / "universal", tmp_path / "wrong" / "out", "layer 3 has a file, which is not"),
        pp_tied={"embed": [0, 3]},
        **options,
    )


def test_copies_that_drifted_are_refused_until_one_is_chosen(tmp_path):
    with pytest.raises(ReplicaError, match=r"tied_modules\.embed\.weight"):
        converted(RECORDED / "uneven_z1", tmp_path / "out")

    out = converted(RECORDED / "uneven_z1", tmp_path / "out", replicas="pp=1", pp=1, dp=1)
    chosen = tmp_path / "chosen"
    api.convert(RECORDED / "uneven_z1", chosen, states="all", replicas="pp=1")
    found, expected = (gather_all(api.open(path)) for path in (out, chosen))
    assert np.array_equal(found[f"{TIED}/exp_avg"], expected[f"{TIED}/exp_avg"])


def test_layers_of_uniform_stages_need_no_count_where_no_count_changes_them(tmp_path):
    """Two layers of two: whatever comes behind them, the second stage would begin later."""
    write_pipeline(tmp_path / "run", [blocks(0, 1, 2), blocks(3)])

    refused(
        *(tmp_path / "run", tmp_path / "out", "nothing says how many functions"),
        pp_layers="uniform",
    )
    out = converted(tmp_path / "run", tmp_path / "out", pp_layers="uniform:5")
    assert shapes_of(out) == [[["0.weight", "1.weight", "2.weight"]], [["3.weight"]]]


def test_stages_are_balanced_by_what_the_layers_train(tmp_path):
    write_pipeline(tmp_path / "run", [blocks(0, 1, 2, 3, 5, 6)])

    out = converted(tmp_path / "run", tmp_path / "out", pp=2)

    # 6, 9, 12, 15, nothing, 21, 24 elements
    assert shapes_of(out) == [[[f"{n}.weight" for n in (0, 1, 2, 3)]], [["5.weight", "6.weight"]]]


def test_weights_that_are_frozen_may_or_may_not_count(tmp_path):
    """A module counts when it is made, and a script may freeze what it has then."""
    write_pipeline(tmp_path / "run", [blocks(0, 1, 2, 3)])
    frozen = Array("float32", (50,), bytes(200))
    edit_file(tmp_path / "run" / "step" / "layer_00-model_states.pt", lambda r: r.update(x=frozen))

    refused(tmp_path / "run", tmp_path / "out", "some weights are frozen, and the stages", pp=2)
    out = converted(tmp_path / "run", tmp_path / "out", pp=2, pp_layers="uniform:4")
    assert shapes_of(out) == [[["0.weight", "1.weight"]], [["2.weight", "3.weight"]]]
    layer: Any = open_torch_zip(out / "step" / "layer_00-model_states.pt").value
    assert [*layer] == ["weight", "x"]


def test_ranks_with_shards_of_different_sizes_would_not_agree_on_the_stages(tmp_path):
    cuts = {0: (5, 1), 1: (1, 1), 2: (1, 5)}
    named = {
        f"{n}.weight": replace(whole((sum(widths), 3), 1000 * (n + 1)), cut=(0, widths))
        for n, widths in cuts.items()
    }
    run = StageRun(ZeroRun(1, 2, named), {n: f"{n}." for n in cuts})
    write_pipeline(tmp_path / "run", [run])

    refused(tmp_path / "run", tmp_path / "out", "would each balance the stages otherwise", pp=2)
    out = converted(tmp_path / "run", tmp_path / "out", pp_layers=[0, 1])
    require_same_states(tmp_path / "run", out)


def test_parameters_in_another_order_than_that_of_the_module_stay_where_they_are(tmp_path):
    """A script may sort them. On the same stages their order is known, and on others it is not."""
    named = {f"{n}.weight": whole((n + 2, 3), 1000 * (n + 1)) for n in (1, 0)}
    write_pipeline(tmp_path / "run", [stage(named, {0: "0.", 1: "1."}), blocks(2)])

    refused(tmp_path / "run", tmp_path / "out", "not the order of the module", pp=1)
    out = converted(tmp_path / "run", tmp_path / "out", dp=2)
    assert shapes_of(out) == [[["1.weight", "0.weight"]], [["2.weight"]]]


def test_tied_modules_come_in_the_order_of_their_first_use_on_each_stage(tmp_path):
    a, b = (f"tied_modules.{key}.weight" for key in "ab")
    tables = {a: whole((5, 3), 50_000), b: whole((7, 3), 60_000)}
    first = stage(
        {**tables, "2.weight": whole((4, 3), 2000)},
        {0: "tied_modules.a.", 1: "tied_modules.b.", 2: "2."},
    )
    write_pipeline(tmp_path / "run", [first, blocks(3, extra={b: tables[b]})])

    told = {"a": [0, 6], "b": [1, 5]}
    refused(
        *(tmp_path / "run", tmp_path / "out", "layer 6 is on no stage of the source"),
        pp_layers=[0, 3],
        pp_tied=told,
    )
    for number, told in enumerate([{}, {"a": [0], "b": [1, 5]}]):
        out = converted(
            *(tmp_path / "run", tmp_path / f"out{number}"), pp_layers=[0, 1, 3], pp_tied=told
        )
        assert shapes_of(out) == [[[a]], [[b, "2.weight"]], [[b, "3.weight"]]]
    one = converted(tmp_path / "run", tmp_path / "one", pp=1)
    assert shapes_of(one) == [[[a, b, "2.weight", "3.weight"]]]


def grouped(*numbers: int, groups: Mapping[int, int] | None = None) -> StageRun:
    """A stage of layers with one weight, of BF16_Optimizer: of ZeRO, it would wait for ever."""
    named = {
        f"{n}.weight": whole((n + 2, 3), 1000 * (n + 1), (groups or {}).get(n, 0)) for n in numbers
    }
    run = ZeroRun(1, 1, named, writer="bf16_optimizer")
    return StageRun(run, {n: f"{n}." for n in numbers})


def set_groups(folder: Path, rates: Mapping[int, list[float]]) -> None:
    """Give the groups of each stage learning rates of their own."""
    for mp, rate in rates.items():
        (file,) = (folder / "step").glob(f"*_mp_rank_{mp:02d}_optim_states.pt")

        def change(root: Any, rate: list[float] = rate) -> None:
            groups = root["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
            for group, number in zip(groups, rate, strict=True):
                group["lr"] = number

        edit_file(file, change)


def test_groups_of_stages_are_told_by_their_settings_where_the_engine_left_some_out(tmp_path):
    both = grouped(0, 1, groups={1: 1})
    write_pipeline(tmp_path / "run", [both, grouped(2), grouped(3)])
    set_groups(tmp_path / "run", {0: [0.5, 0.25], 1: [0.25], 2: [0.5]})

    one = converted(tmp_path / "run", tmp_path / "one", pp=1)

    assert shapes_of(one) == [[["0.weight", "3.weight"], ["1.weight", "2.weight"]]]
    require_same_states(tmp_path / "run", one)
    same = converted(tmp_path / "run", tmp_path / "same", dp=2)
    assert shapes_of(same) == shapes_of(tmp_path / "run")
    # A group that is empty on a stage is not there, and its number is that of the next one.
    two = converted(one, tmp_path / "two", pp_layers=[0, 3])
    assert shapes_of(two) == [[["0.weight"], ["1.weight", "2.weight"]], [["3.weight"]]]
    (file,) = (two / "step").glob("*_mp_rank_01_optim_states.pt")
    root: Any = open_torch_zip(file).value
    state = root["optimizer_state_dict"]["base_optimizer_state"]
    assert [(group["lr"], group["params"]) for group in state["param_groups"]] == [(0.5, [0])]
    assert [*state["state"]] == [0]
    require_same_states(tmp_path / "run", two)
    report = api.convert(tmp_path / "run", tmp_path / "universal", to="universal")
    (told,) = (finding for finding in report.findings if finding.kind == "stage-groups")
    assert told.details == {"stages": [1, 2]}
    assert "--to deepspeed writes each stage its own" in told.message


def test_groups_whose_order_no_stage_says_are_not_put_together(tmp_path):
    write_pipeline(tmp_path / "run", [grouped(0), grouped(1)])
    set_groups(tmp_path / "run", {0: [0.5], 1: [0.25]})

    refused(tmp_path / "run", tmp_path / "out", "in which order an optimizer", pp=1)
    assert converted(tmp_path / "run", tmp_path / "out", dp=2).is_dir()


def test_groups_with_the_same_settings_are_not_told_apart(tmp_path):
    write_pipeline(tmp_path / "run", [grouped(0, 1, groups={1: 1}), grouped(2)])

    refused(tmp_path / "run", tmp_path / "out", "have the same settings", pp=1)


def test_steps_that_differ_between_stages_are_refused(tmp_path):
    write_pipeline(tmp_path / "run", [blocks(0), blocks(1)])
    (file,) = (tmp_path / "run" / "step").glob("*_mp_rank_01_optim_states.pt")

    def later(root: Any) -> None:
        own = root["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        own["step"] = Array("float32", (), np.float32(3).tobytes())

    edit_file(file, later)

    with pytest.raises((UnsupportedError, CorruptError), match="step"):
        converted(tmp_path / "run", tmp_path / "out", pp=1)


def set_muon(folder: Path) -> None:
    """Say that Muon trains all groups: it has them by size."""
    for file in (folder / "step").glob("*optim_states.pt"):

        def change(root: Any) -> None:
            base = root["optimizer_state_dict"]["base_optimizer_state"]
            for group in base["param_groups"]:
                group["use_muon"] = True

        edit_file(file, change)


def by_muon(*named: tuple[int, tuple[int, int]]) -> StageRun:
    parameters = {f"{n}.weight": whole(shape, 1000 * (n + 1)) for n, shape in named}
    return stage(parameters, {n: f"{n}." for n, _ in named})


def test_muon_sorts_what_every_stage_has(tmp_path):
    """Of one shape, parameters have the order of the module, whatever stage they were on."""
    first = by_muon((1, (8, 3)), (0, (6, 3)))
    second = by_muon((3, (9, 3)), (2, (6, 3)), (4, (6, 3)))
    write_pipeline(tmp_path / "run", [first, second])
    set_muon(tmp_path / "run")

    one = converted(tmp_path / "run", tmp_path / "one", pp=1)
    two = converted(one, tmp_path / "two", pp_layers=[0, 2])

    assert shapes_of(one) == [[[f"{n}.weight" for n in (3, 1, 0, 2, 4)]]]
    assert shapes_of(two) == shapes_of(tmp_path / "run")
    for out in (one, two):
        require_same_states(tmp_path / "run", out)


def test_an_order_that_muon_never_made_stays_on_its_stages(tmp_path):
    write_pipeline(tmp_path / "run", [by_muon((0, (6, 3)), (1, (8, 3))), by_muon((2, (6, 3)))])
    set_muon(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'format = "restride-rules/1"\nrest = "whole"\n'
        '[[rules]]\nmatch = "*.weight"\nlayout = "column"\n'
    )

    same = converted(tmp_path / "run", tmp_path / "same", dp=3)
    assert shapes_of(same) == shapes_of(tmp_path / "run")
    refused(tmp_path / "run", tmp_path / "out", "given in another order", tp=2, rules=rules)


def test_ranks_whose_shards_muon_would_sort_otherwise_are_refused(tmp_path):
    write_pipeline(tmp_path / "run", [by_muon((1, (5, 3)), (0, (4, 3)))])
    set_muon(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'format = "restride-rules/1"\nrest = "whole"\n'
        '[[rules]]\nmatch = "*.weight"\nlayout = "column"\n'
    )

    refused(
        *(tmp_path / "run", tmp_path / "out", "they would have different orders"),
        tp=2,
        rules=rules,
    )
