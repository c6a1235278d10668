"""ZeRO-0 as source and as target: the optimizer inside the model files, and nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from restride.checkpoint.training import ParameterGroup
from restride.checkpoint.values import Constructed
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._loss_scaler import entries_of_scaler, scaler_of_entries
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts.replicated import replicated
from restride.storage.torch_zip import open_torch_zip
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.selection import Export
    from restride.checkpoint.training import Training

_RECORDED = Path(__file__).parents[2] / "data" / "deepspeed"
_WHOLE = (
    "codegen_fused_tp2_z0",
    "recorded/numbered_flat_z0",
    "recorded/numbered_fp32_z0",
    "recorded/numbered_groups_z0",
    "recorded/numbered_momentum_z0",
)
_OTHERS = (
    "codegen_fused_tp2dp2_z1",
    "llama_tied_tp2_z1",
    "llama_tp1dp2_z3",
    "llama_tp2_z1_fp32",
    "llama_tp2_z3",
    "llama_unevenkv_tp2_z1",
    "opt_tp2_z1",
    "recorded/aligned_frozen_z2",
    "recorded/bf16_optimizer_z1",
    "recorded/momentum_z1",
    "recorded/round_robin_z2",
    "recorded/tied_frozen_z1",
)


def _root(name: str, shared: Path) -> Path:
    if name.startswith("recorded/"):
        return _RECORDED / name.removeprefix("recorded/")
    return shared / "checkpoints" / name


def _layouts(catalog: Catalog, tp: int) -> dict[str, Layout]:
    """The tensors' own layouts, or none of them cut."""
    mesh = DeepSpeedTarget(tp, 1, 1).tp_mesh
    return {
        tensor.name: tensor.layout
        if tensor.layout.rank_count == tp
        else replicated(tensor.layout.full_shape, mesh=mesh)
        for tensor in catalog.tensors
    }


def _export(source: Catalog, tp: int, dp: int, zero: int, training: Training | None) -> Export:
    target = DeepSpeedTarget(tp, dp, zero)
    return lay_out(source, training or read_training(source), target, _layouts(source, tp))


def _written(
    source: Catalog,
    out: Path,
    *,
    tp: int,
    dp: int = 1,
    zero: int = 0,
    training: Training | None = None,
) -> Catalog:
    write_export(source, _export(source, tp, dp, zero, training), out)
    return read_catalog(out)


def _require_same(source: Catalog, again: Catalog) -> None:
    expected, found = gather_all(source), gather_all(again)
    for key, array in expected.items():
        if key in found:
            np.testing.assert_array_equal(found[key], array, err_msg=key)
    kept = {key for key in expected if not key.endswith("/weight")}
    assert kept <= found.keys()
    assert {key for key in found if not key.endswith(("/weight", "/step"))} <= expected.keys()


def _optimizer_of(out: Path, tp: int = 0) -> dict[str, object]:
    root = Field(open_torch_zip(out / "step" / f"mp_rank_{tp:02d}_model_states.pt").value, "file")
    return dict(root.at("optimizer").value)


@pytest.mark.interop
@pytest.mark.parametrize("name", _WHOLE)
def test_files_hold_what_the_engine_wrote(name: str, shared: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    root = _root(name, shared)
    source = read_catalog(root)
    dp = 1 if "tp2" in name else 2

    again = _written(source, tmp_path / "out", tp=source.mesh.axis_size("tp"), dp=dp)

    assert again.findings == source.findings
    for file in (root / "step").iterdir():
        expected = torch.load(file, weights_only=False)
        found = torch.load(tmp_path / "out" / "step" / file.name, weights_only=False)
        assert _difference(expected, found, file.name) == ""


def _difference(expected: object, found: object, where: str) -> str:
    """Where two loaded values differ, or nothing; also in their classes."""
    torch = pytest.importorskip("torch")
    if type(expected) is not type(found):
        return f"{where}: {type(expected)}, {type(found)}"
    if isinstance(expected, torch.Tensor):
        is_same = expected.dtype == found.dtype and torch.equal(expected, found)
        return "" if is_same else f"{where}: {expected}, {found}"
    if isinstance(expected, list | tuple):
        expected, found = dict(enumerate(expected)), dict(enumerate(found))
    if not isinstance(expected, dict):
        return "" if expected == found else f"{where}: {expected!r}, {found!r}"
    if expected.keys() != found.keys():
        return f"{where}: {sorted(map(repr, expected.keys() ^ found.keys()))}"
    parts = (_difference(expected[key], found[key], f"{where}[{key!r}]") for key in expected)
    return next(filter(None, parts), "")


@pytest.mark.parametrize("name", _WHOLE)
@pytest.mark.parametrize(("dp", "zero"), [(2, 1), (3, 2), (2, 3)])
def test_zero_0_is_cut_for_every_stage_bit_for_bit(
    name: str, dp: int, zero: int, shared: Path, tmp_path: Path
) -> None:
    source = read_catalog(_root(name, shared))
    if zero == 3 and "recorded" in name:  # an engine of ZeRO-3 has no parameter without elements
        source = replace(source, tensors=tuple(t for t in source.tensors if t.name != "empty"))

    again = _written(source, tmp_path / "out", tp=source.mesh.axis_size("tp"), dp=dp, zero=zero)

    assert again.format == f"deepspeed zero-{zero}"
    _require_same(source, again)
    before, after = read_training(source).groups, read_training(again).groups
    assert [group.names for group in after] == [group.names for group in before]
    assert [group.settings for group in after] == [group.settings for group in before]


@pytest.mark.parametrize("name", _OTHERS)
@pytest.mark.parametrize("is_joined", [False, True], ids=["tp", "tp1"])
def test_every_stage_goes_into_model_files_alone_bit_for_bit(
    name: str, *, is_joined: bool, shared: Path, tmp_path: Path
) -> None:
    source = read_catalog(_root(name, shared))

    again = _written(
        source, tmp_path / "out", tp=1 if is_joined else source.mesh.axis_size("tp"), dp=2
    )

    assert again.format == "deepspeed zero-0"
    assert not [path for path in (tmp_path / "out").rglob("*") if "optim_states" in path.name]
    assert {finding.kind for finding in again.findings} <= {
        *(finding.kind for finding in source.findings),
        "numbered-states",
        "untracked",
    }
    _require_same(source, again)
    before, after = read_training(source), read_training(again)
    assert [group.names for group in after.groups] == [group.names for group in before.groups]
    assert [group.settings for group in after.groups] == [g.settings for g in before.groups]


def test_the_class_of_the_engine_follows_the_configuration(tmp_path: Path) -> None:
    """DeepSpeed's fused Adam gets flat buffers, PyTorch's one master copy for each parameter."""
    source = read_catalog(_RECORDED / "numbered_groups_z0")
    training = read_training(source)
    (rank,) = training.ranks
    config = rank.values["ds_config"]
    assert isinstance(config, dict)

    def resumed_with(**changed: object) -> Training:
        values = {**rank.values, "ds_config": {**config, **changed}}
        return replace(training, ranks=(replace(rank, values=values),))

    fused = resumed_with(optimizer={"type": "AdamW", "params": {}})
    again = _written(source, tmp_path / "fused", tp=1, training=fused)
    assert "fp32_groups_flat" in _optimizer_of(tmp_path / "fused")
    _require_same(source, again)
    # It scales a loss in fp16 only; the other wrapper says of a scale in bf16, too.
    assert "cur_scale" not in _optimizer_of(tmp_path / "fused")
    half = {"fp16": {"enabled": True}, "bf16": {"enabled": False}}
    scaled = resumed_with(optimizer={"type": "AdamW", "params": {}}, **half)
    _written(source, tmp_path / "scaled", tp=1, training=scaled)
    assert _optimizer_of(tmp_path / "scaled")["cur_scale"] == 1.0
    assert "fp32_groups_flat" in _optimizer_of(tmp_path / "scaled")

    _written(source, tmp_path / "lamb", tp=1, training=resumed_with(optimizer={"type": "Lamb"}))
    assert {"fp32_groups", "cur_scale"} <= _optimizer_of(tmp_path / "lamb").keys()

    # A script may make the optimizer itself: then only its settings tell the class.
    own = resumed_with(optimizer=None)
    _written(source, tmp_path / "own", tp=1, training=own)
    assert "fp32_groups" in _optimizer_of(tmp_path / "own")
    settings = {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8}
    groups = tuple(replace(group, settings=settings) for group in own.groups)
    _written(source, tmp_path / "own_fused", tp=1, training=replace(own, groups=groups))
    assert "fp32_groups_flat" in _optimizer_of(tmp_path / "own_fused")


def test_what_an_optimizer_in_fp32_was_given_and_does_not_train_keeps_its_number(
    tmp_path: Path,
) -> None:
    source = read_catalog(_RECORDED / "numbered_fp32_z0")
    training = read_training(source)
    (group,) = training.groups
    assert group.listed == ("empty", *group.names)

    _written(source, tmp_path / "again", tp=1)
    own = _optimizer_of(tmp_path / "again")
    assert own["param_groups"][0]["params"] == list(range(10))
    assert list(own["state"]) == list(range(1, 10))

    told = replace(training, groups=(replace(group, listed=None),))
    (finding,) = _export(source, 1, 1, 0, told).findings
    assert (finding.severity, finding.kind) == ("warning", "numbering")
    assert "1 that are not trained (empty) are left out" in finding.message


def test_the_loss_scale_is_an_object_in_one_form_and_entries_in_the_other() -> None:
    state = {
        "dynamic_loss_scale": True,
        "cur_scale": 4096.0,
        "cur_iter": 7,
        "last_overflow_iter": 3,
        "scale_factor": 2.0,
        "scale_window": 500,
    }
    config = {"fp16": {"enabled": True, "hysteresis": 4, "min_loss_scale": 8}}

    made = scaler_of_entries(Field(state, "file"), Field(config, "file: ds_config"))

    scaler = made["loss_scaler"]
    assert isinstance(scaler, Constructed)
    assert scaler.state["cur_hysteresis"] == scaler.state["delayed_shift"] == 4
    assert scaler.state["min_scale"] == 8
    assert entries_of_scaler(made, 9, "file") == state
    static = scaler_of_entries(Field({"dynamic_loss_scale": False, "cur_scale": 2.0}, "f"), None)
    assert entries_of_scaler(static, 9, "file") == {
        "dynamic_loss_scale": False,
        "cur_scale": 2.0,
        "cur_iter": 9,
    }
    with pytest.raises(FormatError, match="scale_window"):
        scaler_of_entries(Field({**state, "scale_window": None}, "file"), None)


@pytest.mark.interop
def test_the_scaler_is_one_that_the_engine_makes() -> None:
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    torch = pytest.importorskip("torch")
    own = scalers.CreateLossScaler(
        torch.half,
        1.0,
        True,  # noqa: FBT003 - the engine's own
        {
            "init_scale": 4096.0,
            "scale_window": 500,
            "min_scale": 1,
            "delayed_shift": 2,
            "consecutive_hysteresis": False,
        },
    )
    entries = {key: vars(own)[key] for key in ("cur_scale", "cur_iter", "last_overflow_iter")}
    entries |= {key: vars(own)[key] for key in ("scale_factor", "scale_window")}

    made = scaler_of_entries(Field({"dynamic_loss_scale": True, **entries}, "file"), None)

    scaler = made["loss_scaler"]
    assert isinstance(scaler, Constructed)
    assert {**scaler.state, "dtype": torch.half} == vars(own)
    assert getattr(scalers, scaler.constructor.name) is type(own)


def test_numbered_states_without_names_are_not_carried_on(tmp_path: Path) -> None:
    source = read_catalog(_RECORDED / "numbered_fp32_z0")
    _written(source, tmp_path / "run", tp=1)

    def mix(root: dict[str, object]) -> None:
        (group,) = root["optimizer"]["param_groups"]
        group["params"].remove(9)
        root["optimizer"]["param_groups"].append({**group, "params": [9]})

    edit_file(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt", mix)
    mixed = read_catalog(tmp_path / "run")

    with pytest.raises(UnsupportedError, match="nothing tells which is which"):
        read_training(mixed)
    with pytest.raises(CorruptError, match="numbered and cannot be matched"):
        lay_out(mixed, read_training(source), DeepSpeedTarget(1, 1, 1), _layouts(mixed, 1))


def test_steps_that_differ_in_a_group_stay_what_they_are_without_zero(tmp_path: Path) -> None:
    """A flat partition has one step; without ZeRO every parameter has its own."""
    source = read_catalog(_RECORDED / "numbered_groups_z0")
    _written(source, tmp_path / "run", tp=1)

    def set_back(root: dict[str, object]) -> None:
        base = root["optimizer"]["optimizer_state_dict"]["state"]
        base[1]["step"] = 5
        base[0]["step"] = base[2]["step"] = 3

    edit_file(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt", set_back)

    with pytest.raises(UnsupportedError, match=r"state 'step' of .* is 5"):
        read_training(read_catalog(tmp_path / "run"))


def test_the_step_of_a_fused_group_is_that_of_the_last_parameter_it_looked_at(
    tmp_path: Path,
) -> None:
    """DeepSpeed's fused Adam counts in one parameter of a group alone."""
    source = read_catalog(_RECORDED / "numbered_fp32_z0")
    _written(source, tmp_path / "run", tp=1)

    def fuse(root: dict[str, object]) -> None:
        for state in root["optimizer"]["state"].values():
            state["step"] = 0
        state["step"] = 7
        for group in root["optimizer"]["param_groups"]:
            group |= {"bias_correction": True, "step": 0}

    edit_file(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt", fuse)

    (group,) = read_training(read_catalog(tmp_path / "run")).groups
    assert group.numbers == {"step": 7}
    _written(read_catalog(tmp_path / "run"), tmp_path / "again", tp=1)
    states = _optimizer_of(tmp_path / "again")["state"]
    assert {state["step"] for state in states.values()} == {7}


def test_groups_that_do_not_fit_a_flat_buffer_are_refused() -> None:
    source = read_catalog(_RECORDED / "numbered_flat_z0")
    training = read_training(source)
    group = ParameterGroup(("embed.weight", "positions"), {"lr": 0.1}, {})

    with pytest.raises(UnsupportedError, match="float32"):
        _export(source, 1, 1, 0, replace(training, groups=(group,)))
