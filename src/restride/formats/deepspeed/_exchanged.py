"""Files that are under the name of another rank: what ``torch.save`` calls them inside tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.storage.torch_zip import TorchFiles

__all__ = ["OTHER_RANK", "files_of_other_ranks", "saved_elsewhere"]

OTHER_RANK: Final = "other-rank"

_NUMBER: Final = re.compile(r"\d+")
# How the precision is spelled has changed between versions, and users follow it.
_PRECISION: Final = re.compile(r"^(bf16|fp16)_")
_SUFFIX: Final = ".pt"
_OPTIMIZER: Final = "optim_states.pt"


def files_of_other_ranks(opened: TorchFiles, *, is_partitioned: bool) -> Iterator[Finding]:
    """Tell of files that were saved under the name of another rank, layer or expert.

    Nothing else in most of them says which rank wrote them, and the shards of all ranks have the
    same shapes: exchanged, they make a sound checkpoint of another model. A file that was saved
    into a buffer is called ``archive`` inside, and says nothing.

    Args:
        opened: The files of the checkpoint.
        is_partitioned: Whether the weights are in the optimizer files, as under ZeRO-3.
    """
    for path, inside in opened.saved_as().items():
        name, saved = Path(path).name, f"{inside}{_SUFFIX}"
        if _skeleton(name) == _skeleton(saved) and _numbers(name) != _numbers(saved):
            is_of_optimizer = name.endswith(_OPTIMIZER) and not is_partitioned
            yield Finding(
                "error",
                OTHER_RANK,
                saved_elsewhere(name, saved),
                name,
                {"saved_as": saved, **({"part": "optimizer"} if is_of_optimizer else {})},
            )


def saved_elsewhere(name: str, saved: str) -> str:
    """What it means that a file has the name of another one inside."""
    return (
        f"{name} was saved as {saved}: it was renamed, exchanged with that file, or that was "
        "copied over it"
    )


def _skeleton(name: str) -> str:
    return _NUMBER.sub("#", _PRECISION.sub("", name))


def _numbers(name: str) -> list[str]:
    return [digits.lstrip("0") for digits in _NUMBER.findall(_PRECISION.sub("", name))]
