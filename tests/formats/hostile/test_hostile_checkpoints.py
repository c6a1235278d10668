"""Hostile files inside of a checkpoint: an error that names the file, and nothing left behind."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from restride.api import convert
from restride.api import open as open_checkpoint
from restride.errors import RestrideError
from restride.testing.hostile import Hostile, callers, hostile_pickles
from restride.testing.hostile_safetensors import hostile_safetensors
from restride.testing.hostile_torch import hostile_torch_files, valid_torch_file
from restride.testing.opcodes import dictionary, stream, text
from restride.testing.torch_files import torch_file

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "mp_rank_00_model_states.pt"


def deepspeed_checkpoint(root: Path, content: bytes) -> Path:
    """A DeepSpeed checkpoint whose model file is `content`."""
    (root / "step").mkdir(parents=True)
    (root / "latest").write_text("step")
    (root / "step" / MODEL).write_bytes(content)
    return root


def refused(root: Path, out: Path) -> RestrideError:
    """Try to open and to convert; both must fail alike, and leave nothing."""
    before = sorted(root.parent.rglob("*"))
    with pytest.raises(RestrideError):
        open_checkpoint(root)
    with pytest.raises(RestrideError) as caught:
        convert(root, out, states="all")
    assert sorted(root.parent.rglob("*")) == before
    return caught.value


CASES = (
    *hostile_torch_files(),
    *(
        Hostile(f"pickle_{case.name}", torch_file(case.content), case.says)
        for case in hostile_pickles()
        if len(case.content) < 10_000
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_model_file_is_refused(tmp_path: Path, case: Hostile) -> None:
    root = deepspeed_checkpoint(tmp_path / "checkpoint", case.content)

    error = refused(root, tmp_path / "out")

    assert case.says in str(error)
    assert str(error).count(MODEL) == 1


def test_a_model_file_that_would_call_something_calls_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for label, pickle in callers(f"touch {canary}").items():
        body = pickle[2:-1] if pickle.startswith(b"\x80") else pickle[:-1]
        for key in ("module", "param_shapes", "optimizer"):
            content = torch_file(stream(dictionary((text(key), body)), protocol=4))
            root = deepspeed_checkpoint(tmp_path / label / key, content)

            refused(root, tmp_path / "out")

            assert not canary.exists()


def test_a_hostile_optimizer_file_beside_a_right_model_file_is_refused(
    tmp_path: Path, shared: Path
) -> None:
    source = shared / "checkpoints" / "codegen_fused_tp2_z1"
    root = tmp_path / "checkpoint"
    shutil.copytree(source, root, ignore=shutil.ignore_patterns("*.safetensors"))
    name = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    right = (root / "step" / name).read_bytes()
    assert open_checkpoint(root).tensors
    for content in (valid_torch_file(), b"", right[:-1], right[: len(right) // 2], right[1:]):
        (root / "step" / name).write_bytes(content)

        error = refused(root, tmp_path / "out")

        assert name in str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_state_of_a_universal_folder_is_refused(tmp_path: Path, case: Hostile) -> None:
    root = tmp_path / "checkpoint"
    state = root / "step_universal" / "zero" / "weight" / "fp32.pt"
    state.parent.mkdir(parents=True)
    (root / "latest_universal").write_text("step_universal")
    state.write_bytes(case.content)

    error = refused(root, tmp_path / "out")

    assert case.says in str(error)
    assert str(error).count("weight/fp32.pt") == 1


@pytest.mark.parametrize("case", hostile_safetensors(), ids=lambda case: case.name)
def test_a_hostile_safetensors_file_is_refused(tmp_path: Path, case: Hostile) -> None:
    root = tmp_path / "checkpoint"
    root.mkdir()
    (root / "model.safetensors").write_bytes(case.content)

    error = refused(root, tmp_path / "out")

    assert case.says in str(error)
    assert str(error).count("model.safetensors") == 1
