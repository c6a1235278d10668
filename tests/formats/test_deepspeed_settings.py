"""Switches of a configuration, in every spelling that DeepSpeed takes for on."""

from __future__ import annotations

import pytest

from restride import api
from restride.formats.deepspeed import read_catalog
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._settings import (
    is_bf16,
    is_enabled,
    is_offloaded,
    is_round_robin,
    uses_bf16_optimizer,
)
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

ON = [True, 1, 1.0, "1", "on", "t", "true", "True", "y", "YES"]
OFF = [False, 0, None, "", "false", "off", "no", "auto", 2, [], {}]


@pytest.mark.parametrize("value", ON)
def test_a_switch_is_on_where_deepspeed_takes_it_for_on(value):
    zero = {"round_robin_gradients": value}
    config = Field({"bf16": {"enabled": value}, "zero_optimization": zero}, "ds_config")

    assert is_enabled(Field(value, "switch"))
    assert is_bf16(config)
    assert is_round_robin(config)


@pytest.mark.parametrize("value", OFF)
def test_anything_else_is_off(value):
    assert not is_enabled(Field(value, "switch"))


@pytest.mark.interop
def test_the_spellings_are_those_of_deepspeed():
    precision = pytest.importorskip("deepspeed.runtime.precision_config")

    for value in ON:
        assert precision.get_bfloat16_config({"bf16": {"enabled": value}}).enabled
    for value in ("off", 0, "false", "no"):
        assert not precision.get_bfloat16_config({"bf16": {"enabled": value}}).enabled


OFFLOADS = [
    ({"cpu_offload": True}, "cpu"),
    ({"cpu_offload": "true"}, "cpu"),
    ({"cpu_offload": False}, None),
    ({"offload_optimizer": {"device": "cpu"}}, "cpu"),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/"}}, "nvme"),
    ({"offload_optimizer": {"device": "none"}}, "none"),
    ({"offload_optimizer": {}}, "none"),
    ({"offload_optimizer": None}, None),
    ({}, None),
]


@pytest.mark.parametrize(("zero", "device"), OFFLOADS)
def test_what_is_offloaded_decides_which_class_the_optimizer_has(zero, device):
    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1, **zero},
    }

    assert is_offloaded(Field(config, "ds_config")) == (device in {"cpu", "nvme"})
    # deepspeed 0.19.8 `runtime/engine.py`, `_do_optimizer_sanity_check`
    assert uses_bf16_optimizer(Field(config, "ds_config"), 1) == (device != "cpu")


@pytest.mark.interop
@pytest.mark.parametrize(("zero", "device"), OFFLOADS)
def test_what_is_offloaded_is_told_as_deepspeed_tells_it(zero, device):
    kind = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig

    offload = kind(stage=1, **zero).offload_optimizer

    assert (offload.device if offload else None) == device


@pytest.mark.parametrize("value", ["true", 1])
def test_files_have_the_names_under_which_such_an_engine_looks_for_them(tmp_path, value):
    """Where it does not find its optimizer files, it goes on without a word and without them."""
    arrays = {state: distinct((4,), 7) for state in ("weight", "fp32", "exp_avg")}
    write_zero_run(tmp_path / "run", ZeroRun(1, 1, {"w": Parameter((4,), arrays)}))
    config = {"bf16": {"enabled": value}, "zero_optimization": {"stage": 1}}
    for path in sorted((tmp_path / "run" / "step").iterdir()):
        edit_file(path, lambda root: root.update(ds_config=config))
        if path.name.startswith("zero"):
            path.rename(path.with_name(f"bf16_{path.name}"))

    report = api.convert(tmp_path / "run", tmp_path / "out", to="deepspeed", dp=2)

    assert sorted(report.files) == [
        "latest",
        "step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "step/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "step/mp_rank_00_model_states.pt",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [("llama_tp1dp2_z3", "nothing else has the weights"), ("llama_tp1dp2_z2", "the weights have")],
)
@pytest.mark.parametrize(("setting", "is_told"), [({"topk_ratio": 0.1}, True), (None, False)])
def test_master_copies_of_zenflow_may_lack_steps(
    shared, tmp_path, copied, name, words, setting, is_told
):
    """Seen with deepspeed 0.19.8 at ZeRO-1 and 2, where weights and master copies differ."""
    step = copied(shared / "checkpoints" / name, tmp_path / name) / "step"
    for file in step.glob("*model_states.pt"):
        edit_file(file, lambda root: root["ds_config"]["zero_optimization"].update(zenflow=setting))

    found = [(f.severity, f.message) for f in read_catalog(step).findings if f.kind == "zenflow"]

    assert [severity for severity, _ in found] == ["warning"] * is_told
    assert all(words in message for _, message in found)
