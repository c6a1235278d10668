"""Open, check and convert checkpoints: the seam for the command line, notebooks and viewers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.checking import CheckReport, check
from restride.conversion import ConvertReport, PartExecutor, convert
from restride.exports import Wanted
from restride.formats._registry import open_catalog
from restride.projecting import ConvertProjection, dry_run

if TYPE_CHECKING:
    from os import PathLike

    from restride.checkpoint.catalog import Catalog

__all__ = [
    "CheckReport",
    "ConvertProjection",
    "ConvertReport",
    "PartExecutor",
    "Wanted",
    "check",
    "convert",
    "dry_run",
    "open",
]


def open(path: str | PathLike[str]) -> Catalog:  # noqa: A001 - reads as restride.open
    """Find out what is in a checkpoint, without loading a tensor.

    Args:
        path: A DeepSpeed checkpoint (its folder, or one of its tags), a universal folder, a
            safetensors file or a folder of them.

    Returns:
        Tensors, states, layouts, and where their bytes are.

    Raises:
        FormatError: It is no checkpoint that is known, or one that is damaged.
        UnsupportedError: It is one that this version cannot read.
        ExecutionError: A file cannot be read.

    Cost:
        Reads headers only; time grows with the number of tensors, not with their size.
    """
    return open_catalog(path)
