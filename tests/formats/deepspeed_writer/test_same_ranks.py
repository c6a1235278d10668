"""A real checkpoint converted to the ranks and stage that it has: the same files again."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest

from restride import api
from restride.errors import ReplicaError
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.testing.contents import file_content
from restride.testing.exporting import write_export
from restride.testing.gather import gather

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

_CHECKPOINTS = {
    "bloom_tp2_z1": (2, 1, 1),
    "codegen_fused_tp2_z1": (2, 1, 1),
    "codegen_fused_tp2dp2_z1": (2, 2, 1),
    "codegen_rowcut_tp2_z1": (2, 1, 1),
    "gpt2_tp1dp2_z1": (1, 2, 1),
    "llama_tied_tp2_z1": (2, 1, 1),
    "llama_tp1dp2_z1": (1, 2, 1),
    "llama_tp1dp2_z2": (1, 2, 2),
    "llama_tp2_z1": (2, 1, 1),
    "llama_tp2_z1_fp32": (2, 1, 1),
    "llama_unevenkv_tp2_z1": (2, 1, 1),
    "mixtral_tp2_z1": (2, 1, 1),
    "opt_tp2_z1": (2, 1, 1),
}


def _parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a value that has some."""
    if isinstance(value, dict):
        return {**value, "_metadata": getattr(value, "_metadata", None)}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    is_plain = isinstance(value, Enum) or not hasattr(value, "__dict__")
    return None if is_plain else vars(value)


def _difference(expected: Any, found: Any, where: str) -> str:
    """Where two loaded values differ, or nothing; also in their classes."""
    if type(expected) is not type(found):
        return f"{where}: {type(expected)}, {type(found)}"
    if isinstance(expected, torch.Tensor):
        is_same = expected.dtype == found.dtype and torch.equal(expected, found)
        return "" if is_same else f"{where}: {expected}, {found}"
    parts, others = _parts(expected), _parts(found)
    if parts is None or others is None:
        return "" if expected == found else f"{where}: {expected!r}, {found!r}"
    if parts.keys() != others.keys():
        return f"{where}: {sorted(map(repr, parts.keys() ^ others.keys()))}"
    differences = (_difference(parts[key], others[key], f"{where}[{key!r}]") for key in parts)
    return next(filter(None, differences), "")


def _without_single_parts(root: Any) -> Any:
    """BLOOM's fused weight is said to have one sub-parameter: it is cut like any other."""
    info = root.get("universal_checkpoint_info", {})
    several = {
        pattern for pattern, widths in info.pop("sub_param_shard_widths", {}).items() if widths[1:]
    }
    parts = info.get("parameter_with_sub_params", [])
    parts[:] = [entry for entry in parts if several.intersection(entry["patterns"])]
    return root


@pytest.mark.parametrize("name", _CHECKPOINTS)
def test_files_hold_what_the_engine_wrote(name: str, shared: Path, tmp_path: Path) -> None:
    root = shared / "checkpoints" / name
    source = read_catalog(root)
    layouts = {tensor.name: tensor.layout for tensor in source.tensors}

    export = lay_out(source, read_training(source), DeepSpeedTarget(*_CHECKPOINTS[name]), layouts)
    write_export(source, export, tmp_path / "out")

    assert not export.findings
    files = sorted(path.relative_to(root) for path in (root / "step").iterdir())
    assert sorted(path.name for path in (tmp_path / "out" / "step").iterdir()) == [
        path.name for path in files
    ]
    assert (tmp_path / "out" / "latest").read_bytes() == (root / "latest").read_bytes()
    for file in files:
        expected = torch.load(root / file, weights_only=False)
        found = torch.load(tmp_path / "out" / file, weights_only=False)
        assert not _difference(*map(_without_single_parts, (expected, found)), str(file))


@pytest.mark.parametrize(("name", "zero"), [("llama_tied_tp2_z1", 2), ("gpt2_tp1dp2_z1", 1)])
def test_deepspeeds_own_script_reads_the_master_weights(
    name: str, zero: int, shared: Path, tmp_path: Path
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    source = shared / "checkpoints" / name
    api.convert(source, tmp_path / "out", to="deepspeed", tp=1, dp=3, zero=zero)

    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")

    for tensor in (catalog := api.open(source)).tensors:
        expected = gather(catalog, tensor.states["fp32"]).tobytes()
        for key in (tensor.name, *tensor.aliases):
            assert found.pop(key).numpy().tobytes() == expected, key
    assert not found


def test_copies_that_drifted_stay_what_each_rank_trained(shared: Path, tmp_path: Path) -> None:
    """GPTBigCode's K/V block under AutoTP: on other data-parallel ranks, and back again."""
    source = shared / "checkpoints" / "gptbigcode_tp2_z1"
    there, back = tmp_path / "there", tmp_path / "back"

    report = api.convert(source, there, to="deepspeed", dp=3, zero=2, replicas="own")
    api.convert(there, back, to="deepspeed", dp=1, zero=1, replicas=[("*.c_attn.*", "own")])

    messages = [f.message for f in report.findings if f.kind == "replica-drift"]
    assert messages
    assert all(message.endswith("written is to each rank its own") for message in messages)
    for path in sorted((source / "step").iterdir()):
        found, expected = (file_content(folder / "step" / path.name) for folder in (back, source))
        for content in (found, expected):
            # DeepSpeed's maps have boxes without elements, of what a rank has nothing of.
            content.pop("universal_checkpoint_info", None)
        assert found == expected, path.name
    with pytest.raises(ReplicaError):
        api.convert(source, tmp_path / "whole", to="universal", replicas="own")
