"""The format of a path is told by the names in it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from restride.errors import ExecutionError, FormatError, UnsupportedError
from restride.formats.opening import detect_format, open_catalog
from restride.testing.hostile_safetensors import valid_safetensors

if TYPE_CHECKING:
    from pathlib import Path


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("names", "opened", "expected"),
    [
        (["a.safetensors"], "a.safetensors", "safetensors"),
        (["a.safetensors.index.json"], "a.safetensors.index.json", "safetensors"),
        (["model.safetensors", "config.json"], "", "safetensors"),
        (["a.safetensors.index.json"], "", "safetensors"),
        (["latest", "step/mp_rank_00_model_states.pt", "x.safetensors"], "", "deepspeed"),
        (["step/mp_rank_00_model_states.pt"], "step", "deepspeed"),
        (["step/zero_pp_rank_0_mp_rank_00_model_states.pt"], "step", "deepspeed"),
        (["step/mp_rank_00_model_states.pt"], "", "deepspeed"),
        (["step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "step", "deepspeed"),
        (["step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "", "deepspeed"),
        (["latest_universal", "step/mp_rank_00_model_states.pt"], "", "universal"),
        (["step/mp_rank_00_model_states.pt", "step/zero/optimizer_state.pt"], "step", "universal"),
        (["latest", "latest_universal", "step/mp_rank_00_model_states.pt"], "", "deepspeed"),
        (["old/mp_rank_00_model_states.pt", "x.safetensors"], "", "safetensors"),
    ],
)
def test_a_format_is_told_by_names(
    tmp_path: Path, names: list[str], opened: str, expected: str
) -> None:
    for name in names:
        touch(tmp_path / name)

    assert detect_format(tmp_path / opened) == expected


@pytest.mark.parametrize(
    ("names", "opened", "says"),
    [
        ([], "", r"of no known format \(it holds nothing\); looked for: a DeepSpeed checkpoint"),
        (["a.txt", "b.bin"], "", r"it holds a\.txt, b\.bin\); looked for"),
        ([f"{i}.bin" for i in range(9)], "", r"4\.bin, \.\.\.\)"),
        (["a.bin"], "a.bin", "is a file of no known format; looked for"),
        (
            ["step/a_model_states.pt"],
            "step/a_model_states.pt",
            "is a part of a checkpoint; name its folder, '.*step'",
        ),
        (["latest", "s/a_model_states.pt"], "latest", "is a part of .*; name its folder, '.*'"),
        (["o/restride.json"], "o/restride.json", "is a part of .*; name its folder, '.*o'"),
        (["f.json"], "f.json", "is a file of .*; name a checkpoint; .*--against`"),
        (["u/zero/optimizer_state.pt"], "u/zero", "part of a universal folder; name .*u'"),
        (["run/1/latest", "run/2/latest", "run/log/x"], "run", r"it has 2 checkpoints: name one"),
        (["deep/run/1/latest"], "", "looked for: a DeepSpeed checkpoint"),
        (
            ["o.partial/journal", "o.partial/files/latest"],
            "o.partial",
            "is the unfinished output of a conversion; .* --resume",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_what_was_looked_for(
    tmp_path: Path, names: list[str], opened: str, says: str
) -> None:
    for name in names:
        touch(tmp_path / name)

    with pytest.raises(FormatError, match=says):
        detect_format(tmp_path / opened)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["d/.metadata", "d/__0_0.distcp"], "d: is a checkpoint of PyTorch's DCP, which is not"),
        (["d/latest_checkpointed_iteration.txt"], "d: is a checkpoint of Megatron-LM, which is no"),
        (["d/pytorch_model-00001-of-00002.bin"], "d: is a model as torch.save writes it, which is"),
    ],
)
def test_a_format_that_is_not_read_is_called_by_its_name(
    tmp_path: Path, names: list[str], says: str
) -> None:
    for name in names:
        touch(tmp_path / name)

    with pytest.raises(UnsupportedError, match=f"{says}.*; save it as safetensors"):
        detect_format(tmp_path / "d")
    touch(tmp_path / "d/checkpoint-5/latest")
    with pytest.raises(FormatError, match="it has 1 checkpoint: name one"):
        detect_format(tmp_path / "d")


def test_of_a_folder_of_several_steps_the_newest_is_named(tmp_path: Path) -> None:
    for age, name in enumerate(["checkpoint-1000", "checkpoint-999", "checkpoint-9"]):
        touch(tmp_path / name / "latest")
        os.utime(tmp_path / name, (0, 9 - age))

    with pytest.raises(FormatError, match=r"it has 3 checkpoints: .* as '.*checkpoint-1000'"):
        detect_format(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="absent: no such file or folder"):
        open_catalog(tmp_path / "absent")


def test_what_may_not_be_looked_at_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    place = tmp_path / "a" / "b"
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        with pytest.raises(ExecutionError, match=r"a/b: cannot be looked at \(Permission denied"):
            detect_format(place)


def test_only_the_reader_that_is_needed_is_imported(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(valid_safetensors())
    code = (
        "import sys\n"
        "from restride.formats.opening import open_catalog\n"
        "assert len(open_catalog(sys.argv[1]).tensors) == 2\n"
        "wrong = {'pickle', 'numpy', 'torch', 'safetensors', 'restride.formats.deepspeed'}\n"
        "assert wrong.isdisjoint(sys.modules), wrong & set(sys.modules)\n"
    )

    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.safetensors")],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        (["step9"], r"1 DeepSpeed checkpoint beside them \(step9\) is not.* name .*step9'"),
        (["a", "b"], r"2 DeepSpeed checkpoints beside them \(a, b\) are not.* name .*a'"),
    ],
)
def test_a_deepspeed_checkpoint_beside_safetensors_that_is_not_read_is_told_of(
    tmp_path: Path, tags: list[str], says: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(valid_safetensors())
    for tag in tags:
        touch(tmp_path / tag / "mp_rank_00_model_states.pt")
    (tmp_path / "logs").mkdir()

    (finding,) = open_catalog(tmp_path).findings

    assert (finding.severity, finding.kind) == ("warning", "ignored-files")
    assert re.search(says, finding.message)
    assert finding.details == {"folders": tags}


def test_links_that_lead_in_a_circle_or_nowhere_are_no_files_of_another_format(
    tmp_path: Path,
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "lost").symlink_to("nothing")

    with pytest.raises(ExecutionError, match="circle: cannot be looked at"):
        detect_format(tmp_path / "circle")
    with pytest.raises(ExecutionError, match="lost: no such file or folder"):
        detect_format(tmp_path / "lost")
