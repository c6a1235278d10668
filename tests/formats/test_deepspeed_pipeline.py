"""Pipelines: every stage is a run of its own, and tied layers are replicas."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from safetensors import safe_open

import restride
from restride import api
from restride.algebra.coverage import Covered, prove
from restride.arrays.extract import extract
from restride.comparison import check_against
from restride.errors import CorruptError, FormatError, ReplicaError, UnsupportedError
from restride.formats.deepspeed import read_catalog
from restride.formats.opening import Told, open_catalog
from restride.testing.gather import gather_all
from restride.testing.pipeline_files import StageRun, pipelines, write_pipeline
from restride.testing.saved_values import Array, edit_file
from restride.testing.zero_files import Parameter, ZeroRun
from restride.testing.zero_runs import distinct

from .test_deepspeed_lies import STRANGE, place_of_refusal, places, replaced

RECORDED = Path(__file__).parents[1] / "data" / "deepspeed_pipeline"
# On three data-parallel ranks, the copies of the tied layer drifted: see below.
DRIFTED, TIED = "uneven_z1", "tied_modules.embed.weight"
NAMES = sorted(path.name for path in RECORDED.iterdir() if path.name != DRIFTED)
STATES = ("weight", "fp32", "exp_avg")
# Without ZeRO, nothing but a user tells which layers are tied.
TOLD = {
    "fp16_flat_z0": {"embed": (0, 5)},
    "fp16_z0": {},
    "fp32_tied_z0": {"embed": (0, 5)},
    "fp32_tensor_z0": {},
    "fp32_z0": {},
}


def whole(shape, first: int) -> Parameter:
    states = {state: distinct(shape, first + 100 * n) for n, state in enumerate(STATES)}
    return Parameter(shape, states)


@pytest.fixture
def copied(tmp_path):
    """Copy a recorded checkpoint, to be damaged."""

    def copy(name: str) -> Path:
        shutil.copytree(RECORDED / name, tmp_path / name)
        return tmp_path / name

    return copy


def refused(folder: Path, *words: str, error: type[Exception] = CorruptError) -> None:
    with pytest.raises(error) as caught:
        read_catalog(folder)
    message = str(caught.value)
    assert type(caught.value) is error, message
    for word in words:
        assert word in message, message


@given(pipelines())
@settings(max_examples=40)
def test_every_state_of_every_stage_is_found_element_by_element(stages):
    """`gather_all` compares the replicas of what is tied."""
    with TemporaryDirectory() as folder:
        write_pipeline(Path(folder) / "run", stages)

        catalog = read_catalog(Path(folder) / "run")
        found = gather_all(catalog)

        expected = {
            f"{name}/{state}": array
            for stage in stages
            for name, parameter in stage.run.parameters.items()
            for state, array in parameter.states.items()
        }
        assert {key for key in found if not key.endswith("/step")} == expected.keys()
        for key, array in expected.items():
            assert np.array_equal(found[key].view(np.float32)[..., 0], array), key
        for tensor in catalog.tensors:
            assert isinstance(prove(tensor.layout), Covered)
            for entry in tensor.states.values():
                assert isinstance(prove(entry.layout, side="full"), Covered)
        assert {finding.kind for finding in catalog.findings} <= {"slice-mapping-order"}


@pytest.mark.parametrize("dp", [1, 3])
def test_files_of_the_bf16_optimizer_say_the_shapes_where_the_models_do_not(tmp_path, dp):
    """A parameter may begin in one partition and end in the next one."""
    runs = [
        ZeroRun(dp, 1, {f"{first + n}.weight": whole((n, 5), 1000 * n) for n in (1, 2, 3)})
        for first in (0, 10)
    ]
    stages = [
        StageRun(
            ZeroRun(
                dp,
                1,
                run.parameters | {"tied_modules.table.weight": whole((4, 7), 9000)},
                writer="bf16_optimizer",
            ),
            {int(name.partition(".")[0]): name.partition(".")[0] + "." for name in run.parameters}
            | ({} if number else {0: "tied_modules.table."}),
        )
        for number, run in enumerate(runs)
    ]
    write_pipeline(tmp_path / "run", stages, has_shapes=False)

    found = gather_all(read_catalog(tmp_path / "run"))

    for stage in stages:
        for name, parameter in stage.run.parameters.items():
            for state in STATES:
                array = found[f"{name}/{state}"].view(np.float32)[..., 0]
                assert np.array_equal(array, parameter.states[state]), (name, state)


@pytest.mark.parametrize("name", NAMES)
def test_every_shard_is_that_which_the_engine_gathered_on_its_stage(name):
    path = RECORDED / name
    catalog = open_catalog(path, told=Told(pp_tied=TOLD.get(name)))
    assert "unmatched-states" not in {finding.kind for finding in catalog.findings}
    states, layouts = gather_all(catalog), {t.name: t.layout for t in catalog.tensors}
    seen = set()
    for file in sorted(path.glob("reference_*.safetensors")):
        tp = int(file.stem.rpartition("_tp")[2])
        with safe_open(file, "numpy") as reference:
            for key in reference.keys():  # noqa: SIM118 - no dict
                if key.endswith("/step"):
                    continue
                expected = reference.get_tensor(key)
                tensor = key.rpartition("/")[0]
                array = states[key].view(np.float32)[..., 0]
                shard = extract(layouts[tensor], array, tp)
                assert np.array_equal(shard.reshape(expected.shape), expected), key
                seen.add(key)

    optimized = {key for key in states if not key.endswith(("/weight", "/step"))}
    assert optimized == seen


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("fp32")])
def test_weights_of_the_layer_files_are_the_rounded_master_weights(name):
    states = gather_all(open_catalog(RECORDED / name, told=Told(pp_tied=TOLD.get(name))))
    masters = {key: array for key, array in states.items() if key.endswith("/fp32")}
    assert len(masters) >= 7
    for key, master in masters.items():
        weight = states[key.replace("/fp32", "/weight")].view(np.uint16)[..., 0]
        assert np.array_equal(weight, rounded(master, is_bf16=not name.startswith("fp16"))), key


def rounded(master: np.ndarray, *, is_bf16: bool) -> np.ndarray:
    if not is_bf16:
        return master.view(np.float32)[..., 0].astype(np.float16).view(np.uint16)
    bits = master.view(np.uint32)[..., 0].astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_a_catalog_of_a_pipeline_names_its_stages_and_each_tensor_its_own_ranks():
    catalog = read_catalog(RECORDED / "tied_z1")
    entries = {tensor.name: tensor for tensor in catalog.tensors}

    assert catalog.format == "deepspeed zero-1"
    assert str(catalog.mesh) == "pp=2,dp=2,tp=1"
    assert str(entries["3.up.weight"].states["fp32"].layout.mesh) == "dp=2,tp=1"
    tied = entries["tied_modules.embed.weight"]
    assert str(tied.states["fp32"].layout.mesh) == "pp=2,dp=2,tp=1"
    assert str(tied.layout.mesh) == "tp=1"
    # The last stage has no layer of its own for it, only the parameter.
    region, nothing = tied.states["weight"].regions
    assert nothing is None
    assert catalog.files[region.file].name == "step/layer_00-model_states.pt"
    assert [t.name for t in catalog.tensors if t.is_frozen] == ["1.scale", "3.scale"]
    assert [t.name for t in catalog.tensors if t.kind == "buffer"] == ["1.positions", "3.positions"]


def test_parameter_groups_of_all_stages_are_one():
    values = read_catalog(RECORDED / "tied_z1").values

    (first, second) = values["optimizer"]["param_groups"]
    assert (first["lr"], second["lr"]) == (0.01, 0.02)
    assert first["params"] == [
        "tied_modules.embed.weight",
        *(f"{layer}.{kind}.weight" for layer in (1, 3) for kind in ("up", "down")),
    ]
    assert values["other_files"] == {}
    assert values["model"]["epoch"] == 3


def test_layers_that_are_tied_on_every_stage_are_stored_by_every_stage():
    catalog = read_catalog(RECORDED / "bf16_z0")
    tied = next(t for t in catalog.tensors if t.name == "tied_modules.block.up.weight")

    assert catalog.format == "deepspeed zero-0"
    weight = tied.states["weight"]
    assert str(weight.layout.mesh) == "pp=3,tp=1"
    assert [catalog.files[region.file].name for region in weight.regions] == [
        f"step/layer_{number:02d}-model_states.pt" for number in (0, 2, 4)
    ]


def test_layers_of_one_stage_that_are_tied_are_copies_by_layer():
    catalog = read_catalog(RECORDED / "shared_z1")
    tied = next(t for t in catalog.tensors if t.name == "tied_modules.block.up.weight")

    assert str(catalog.mesh) == "dp=2,tp=1"
    assert str(tied.states["weight"].layout.mesh) == "layer=2,tp=1"
    assert str(tied.states["fp32"].layout.mesh) == "dp=2,tp=1"


def test_a_copy_of_a_tied_layer_that_differs_is_found_and_not_converted(copied, tmp_path):
    folder = copied("bf16_z0")
    edit_file(
        folder / "step" / "layer_02-model_states.pt",
        lambda layer: layer.update({"down.bias": Array("bfloat16", (6,), bytes(12))}),
    )

    report = api.check(folder)

    drift = [finding for finding in report.findings if finding.kind == "replica-drift"]
    assert [finding.where for finding in drift] == [
        "tensor 'tied_modules.block.down.bias', state 'weight'"
    ]
    with pytest.raises(ReplicaError, match=r"block\.down\.bias"):
        api.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_that_drifted_are_each_what_their_stage_held():
    """The stages add up gradients of bf16 in orders of their own, and go apart in the last bits."""
    catalog = read_catalog(RECORDED / DRIFTED)
    (tied,) = (tensor for tensor in catalog.tensors if tensor.name == TIED)
    held = {}
    for stage in range(2):
        file = RECORDED / DRIFTED / f"reference_pp{stage}_tp0.safetensors"
        with safe_open(file, "numpy") as reference:
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                entry = tied.states[state]
                found = held[stage, state] = copy_of_stage(catalog, entry, stage)
                assert np.array_equal(found, reference.get_tensor(f"{TIED}/{state}").ravel())

    assert str(tied.states["fp32"].layout.mesh) == "pp=2,dp=3,tp=1"
    assert not np.array_equal(held[0, "exp_avg"], held[1, "exp_avg"])


def copy_of_stage(catalog, entry, stage: int) -> np.ndarray:
    """One copy of an array that is cut into runs of its elements."""
    full = np.full(entry.layout.full_numel, np.nan, np.float32)
    for rank in range(stage * 3, stage * 3 + 3):
        for piece in entry.layout.pieces(rank):
            region = entry.regions[rank]
            content = Path(catalog.root, catalog.files[region.file].name).read_bytes()
            shard = np.frombuffer(content[region.start_nbytes :][: 4 * piece.numel], np.float32)
            full[piece.full_base : piece.full_base + piece.numel] = shard
    return full


def test_copies_that_drifted_are_refused_until_one_is_chosen(tmp_path):
    with pytest.raises(ReplicaError, match=r"tied_modules\.embed\.weight"):
        api.convert(RECORDED / DRIFTED, tmp_path / "out", states="all")
    catalog = read_catalog(RECORDED / DRIFTED)
    (tied,) = (tensor for tensor in catalog.tensors if tensor.name == TIED)

    for stage in range(2):
        out = tmp_path / str(stage)
        api.convert(RECORDED / DRIFTED, out, states="all", replicas=f"pp={stage}")

        found = gather_all(api.open(out))[f"{TIED}/exp_avg"].view(np.float32)[..., 0]
        assert np.array_equal(found.ravel(), copy_of_stage(catalog, tied.states["exp_avg"], stage))


@pytest.mark.parametrize("name", NAMES)
def test_all_states_convert_and_stay_what_they_are(name, tmp_path):
    api.convert(RECORDED / name, tmp_path / "out", states="all", pp_tied=TOLD.get(name))

    source = gather_all(open_catalog(RECORDED / name, told=Told(pp_tied=TOLD.get(name))))
    written = gather_all(api.open(tmp_path / "out"))
    assert source.keys() == written.keys()
    for key, array in source.items():
        assert np.array_equal(array, written[key]), key


@pytest.mark.parametrize("name", TOLD)
def test_every_command_that_only_looks_is_told_of_ties_as_well(name, tmp_path):
    source, out, told = RECORDED / name, tmp_path / "out", TOLD[name]
    api.convert(source, out, states="all", pp_tied=told)

    assert api.check(source, pp_tied=told).verdict == "ok"
    assert restride.diff(source, out, pp_tied=told).verdict == "same"
    assert restride.diff(out, source, pp_tied=told).verdict == "same"
    assert restride.fingerprint(source, pp_tied=told) == restride.fingerprint(out)
    assert check_against(source, out, pp_tied=told) == ()


@pytest.mark.parametrize("look", [api.open, api.check, restride.fingerprint])
def test_ties_that_matter_to_nothing_are_refused(look):
    with pytest.raises(UnsupportedError, match="leave --pp-tied out"):
        look(RECORDED / "tied_z1", pp_tied={"embed": [0, 5]})


def test_without_that_the_states_are_left_out_with_one_reason_for_all_stages(tmp_path):
    source, out = RECORDED / "fp32_tied_z0", tmp_path / "out"
    api.convert(source, out, states="all", pp_tied=TOLD["fp32_tied_z0"])
    findings = api.open(source).findings

    assert api.check(source).verdict != "ok"
    assert restride.diff(source, out).verdict == "different"

    assert [finding.kind for finding in findings if finding.severity == "error"] == [
        "unmatched-states"
    ]


def test_a_universal_folder_has_the_stages_and_says_that_buffers_are_lost(tmp_path):
    report = api.convert(RECORDED / "tied_z1", tmp_path / "out", to="universal")

    lost = [finding for finding in report.findings if finding.kind == "not-carried"]
    assert [finding.details["names"] for finding in lost] == [["1.positions", "3.positions"]]
    source, read = (api.open(path) for path in (RECORDED / "tied_z1", tmp_path / "out"))
    assert str(read.mesh) == "pp=2,tp=1"
    assert {t.name for t in read.tensors} == {t.name for t in source.tensors if t.kind != "buffer"}
    groups = [catalog.values["optimizer"]["param_groups"] for catalog in (source, read)]
    assert [set(group["params"]) for group in groups[0]] == [
        set(group["params"]) for group in groups[1]
    ]


@pytest.mark.parametrize("name", ["bf16_z0", "tied_z1"])
def test_a_universal_folder_of_a_pipeline_converts_further(name, tmp_path):
    api.convert(RECORDED / name, tmp_path / "one", to="universal")

    for to in ("universal", "safetensors"):
        api.convert(
            tmp_path / "one", tmp_path / to, to=to, states="all" if to == "safetensors" else None
        )

    one, two, three = (
        gather_all(api.open(tmp_path / path)) for path in ("one", "universal", "safetensors")
    )
    assert one.keys() == two.keys()
    for key, array in one.items():
        assert np.array_equal(array, two[key]), key
        assert np.array_equal(array, three[key if key in three else key.removesuffix("/fp32")])


def test_a_universal_folder_of_one_stage_is_still_that_of_a_pipeline(tmp_path):
    api.convert(RECORDED / "shared_z1", tmp_path / "universal", to="universal")

    assert str(api.open(tmp_path / "universal").mesh) == "pp=1,tp=1"


@pytest.mark.parametrize("key", ["mp_world_size", "dp_world_size"])
def test_a_number_of_ranks_that_nobody_has_is_refused_at_once(copied, key):
    folder = copied("tied_z1")
    for file in (folder / "step").glob("mp_rank_*"):
        edit_file(file, lambda root: root.update({key: 1 << 60}))

    refused(folder, f"{key} is {1 << 60}", "no run has more than")


def test_an_engine_of_zero_3_has_no_stages(tmp_path):
    with pytest.raises(UnsupportedError, match="2 pipeline stages"):
        api.convert(RECORDED / "tied_z1", tmp_path / "out", to="universal", stage=3)


def test_old_files_say_the_stages_by_their_layers(copied):
    """Before `checkpoint_parallel_dimensions`, the layer files told the tensor-parallel ranks."""
    folder = copied("tensor_z1")
    for file in (folder / "step").glob("mp_rank_*"):
        edit_file(file, lambda root: root.pop("checkpoint_parallel_dimensions") and root)

    assert str(read_catalog(folder).mesh) == "pp=2,dp=1,tp=2"
    assert len(gather_all(read_catalog(folder))) == 77


def test_a_missing_layer_file(copied):
    folder = copied("tied_z1")
    (folder / "step" / "layer_03-model_states.pt").unlink()
    refused(folder, "parameters that step/mp_rank_01_model_states.pt names are in no layer", "_03-")

    folder = copied("tensor_z1")
    (folder / "step" / "layer_02-model_01-model_states.pt").unlink()
    refused(folder, "layer 2 has files of tp ranks [0] of 2: layer_02-model_01-model_states.pt is")


def test_a_missing_tied_layer(copied):
    folder = copied("tied_z1")
    (folder / "step" / "layer_00-model_states.pt").unlink()

    refused(folder, "the first is 'tied_modules.embed.weight'", "that has the tied module")


def test_a_missing_model_file_of_a_stage(copied):
    folder = copied("bf16_z0")
    (folder / "step" / "mp_rank_01_model_states.pt").unlink()

    refused(folder, "1 of 3 model files is missing: mp_rank_01_model_states.pt")


def test_a_missing_optimizer_file_of_a_stage_is_said_and_its_states_are_left_out(copied):
    folder = copied("tied_z1")
    (folder / "step" / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()

    catalog = read_catalog(folder)

    missing = [finding for finding in catalog.findings if finding.kind == "missing-file"]
    assert ["of stage 1 is missing (dp 1 tp 0)" in finding.message for finding in missing] == [True]
    held = {tensor.name for tensor in catalog.tensors if "fp32" in tensor.states}
    assert "1.down.weight" in held
    assert "3.down.weight" not in held


def test_ranks_that_make_no_stages(copied):
    folder = copied("tied_z1")
    for file in (folder / "step").glob("mp_rank_*"):
        edit_file(file, lambda root: root.update(checkpoint_parallel_dimensions={"pp_degree": 3}))
    refused(folder, "2 model-parallel ranks are no 3 pipeline stages")

    edit_file(file, lambda root: root.update(checkpoint_parallel_dimensions={"pp_degree": 2}))
    refused(folder, "pp_degree is", "in step/mp_rank_0")


def test_stages_with_weights_in_their_model_files_are_refused(copied):
    """The names in them may be those of a stage: its first layer is layer 0."""
    folder = copied("fp32_z0")
    for file in (folder / "step").glob("layer_*"):
        file.unlink()
    refused(folder, "no layer_*-model_states.pt with the weights of a pipeline", error=FormatError)

    for file in (folder / "step").glob("mp_rank_*"):
        edit_file(file, lambda root: root.update(module={"x": Array("float32", (1,), bytes(4))}))
    refused(folder, "two stages may give different layers the same", error=UnsupportedError)


def test_layer_files_beside_a_whole_module_are_of_two_saves(copied):
    folder = copied("shared_z1")
    module = {"x": Array("float32", (1,), bytes(4))}
    edit_file(folder / "step" / "mp_rank_00_model_states.pt", lambda r: r.update(module=module))

    refused(folder, "has layer_00-model_states.pt, and the weights are in step/mp_rank_00")


def test_a_layer_that_may_be_either_of_two_tied_modules_is_refused(tmp_path):
    parameters = {
        "tied_modules.a.weight": whole((2, 3), 0),
        "tied_modules.b.weight": whole((2, 3), 1000),
        "1.weight": whole((3,), 2000),
    }
    layers = {0: "tied_modules.a.", 1: "1.", 2: "tied_modules.b."}
    write_pipeline(tmp_path / "run", [StageRun(ZeroRun(1, 1, parameters), layers)])

    refused(
        tmp_path / "run",
        "layer 0 has the names and shapes of the tied modules tied_modules.a and tied_modules.b",
        error=UnsupportedError,
    )


def test_two_files_of_one_layer(copied):
    folder = copied("tied_z1") / "step"
    shutil.copy(folder / "layer_03-model_states.pt", folder / "layer_003-model_states.pt")

    refused(folder, "has two files of layer 3, tp rank 0")


def test_a_layer_that_two_stages_name(copied):
    folder = copied("tied_z1")
    name = "1.down.weight"

    def named_twice(root):
        groups = root["param_shapes"]
        groups[0][name] = (6, 8)

    edit_file(folder / "step" / "mp_rank_01_model_states.pt", named_twice)

    refused(folder, "layer 1 is on stages [0, 1]")


def test_names_that_a_script_made_up_are_no_names_of_layers(copied):
    folder = copied("fp32_z0")
    before = gather_all(read_catalog(folder, tied={}))

    def named(root: Any) -> None:
        for group in root["optimizer"]["param_groups"]:
            group["param_names"] = [f"mine.{number}" for number in group["params"]]

    for mp in range(2):
        edit_file(folder / "step" / f"mp_rank_{mp:02d}_model_states.pt", named)
    after = gather_all(read_catalog(folder, tied={}))

    assert "1.up.weight/exp_avg" in after
    assert {key: own.tobytes() for key, own in after.items()} == {
        key: own.tobytes() for key, own in before.items()
    }


def test_layers_of_a_tensor_parallel_rank_that_is_not_there_are_stale(copied):
    folder = copied("tied_z1")
    step = folder / "step"
    shutil.copy(step / "layer_03-model_states.pt", step / "layer_03-model_01-model_states.pt")

    findings = read_catalog(folder).findings

    stale = [finding.where for finding in findings if finding.kind == "stale-file"]
    assert stale == ["step/layer_03-model_01-model_states.pt"]


@pytest.mark.parametrize("name", ["tied_z1", "bf16_z0"])
def test_a_layer_file_that_a_run_with_more_layers_left_there_is_told_of(copied, name):
    step = copied(name) / "step"
    before = read_catalog(step).findings
    shutil.copy(step / "layer_01-model_states.pt", step / "layer_09-model_states.pt")

    found = [finding for finding in read_catalog(step).findings if finding not in before]

    (told,) = [finding for finding in found if finding.kind == "stale-file"]
    assert told.severity == "warning"
    assert told.message.startswith("layer_09-model_states.pt is of a layer behind the last one")


def test_tied_layers_that_contradict_each_other(copied):
    folder = copied("bf16_z0")
    edit_file(
        folder / "step" / "layer_02-model_states.pt",
        lambda layer: layer.update({"positions": Array("float32", (3,), bytes(12))}),
    )

    refused(folder, "is float32 of shape (3,) in one place and int64 of shape (3,) in another")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("tied_z1", "mp_rank_01_model_states.pt"),
        ("tied_z1", "layer_00-model_states.pt"),
        ("tied_z1", "layer_03-model_states.pt"),
        ("fp32_z0", "mp_rank_00_model_states.pt"),
        ("fp32_tensor_z0", "mp_rank_03_model_states.pt"),
        ("fp32_tensor_z0", "layer_01-model_01-model_states.pt"),
    ],
)
def test_no_value_of_a_wrong_type_breaks_the_reader_of_stages(copied, source, name):
    """Each place of a file in turn holds a strange value: refused with the place, or carried."""
    folder = copied(source)
    file = folder / "step" / name
    original = file.read_bytes()
    seen: list[tuple[object, ...]] = []
    edit_file(file, lambda root: seen.extend(places(root)))

    for number, path in enumerate(seen[:: 1 + len(seen) // 60]):
        strange = STRANGE[number % len(STRANGE)]
        file.write_bytes(original)
        edit_file(file, lambda root, p=path, s=strange: replaced(root, p, s))
        assert place_of_refusal(folder) != ""
