"""Read files of fingerprints: those of `restride fingerprint`, and manifests of outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.fingerprints import fingerprints_from_json
from restride.checkpoint.manifest import MANIFEST_NAME
from restride.errors import FormatError, RestrideError
from restride.storage.manifest_files import read_manifest
from restride.storage.paths import as_path
from restride.storage.ranges import RangeFile
from restride.strict_json import LARGEST_LIST_NBYTES

if TYPE_CHECKING:
    from os import PathLike

    from restride.checkpoint.fingerprints import Fingerprints

__all__ = ["no_fingerprints", "read_fingerprints"]

_OF_MANIFESTS: Final = b'"restride-manifest/'
_HEAD_NBYTES: Final = 64
_WHAT_HAS_FINGERPRINTS: Final = (
    "name a file that `restride fingerprint -o` wrote, or an output of a conversion"
)


def read_fingerprints(file: str | PathLike[str]) -> Fingerprints:
    """Read what `restride.comparison.check_against` compares with, before the long work.

    Args:
        file: What `restride fingerprint -o` wrote, or an output of a conversion, or its manifest.

    Raises:
        FormatError: There are no fingerprints in it: a manifest has none of arrays that are cut.
        ExecutionError: It cannot be read.
    """
    path = Path(as_path(file))
    if os.path.lexists(path / MANIFEST_NAME):
        path /= MANIFEST_NAME
    # By what it says, too: a manifest may have been kept under another name.
    if path.name == MANIFEST_NAME or _OF_MANIFESTS in _content(path, _HEAD_NBYTES):
        manifest = read_manifest(path, where=str(path))
        if not manifest.tensors:
            raise FormatError(
                "has no fingerprint, as every array of the output is cut",
                where=str(path),
                remedy="take them of the output with `restride fingerprint`",
            )
        return manifest.tensors
    content = _whole_content(path)
    try:
        return fingerprints_from_json(content, where=str(path))
    except FormatError as error:
        error.remedy = error.remedy or _WHAT_HAS_FINGERPRINTS
        raise


def no_fingerprints(file: Path) -> str:
    """Say that a file is none that `restride fingerprint -o` wrote.

    Returns:
        What follows after "it"; empty where it is one, or holds nothing.
    """
    try:
        content = _whole_content(file)
        if content:
            fingerprints_from_json(content, where=str(file))
    except RestrideError:
        return "is no file of fingerprints that can be read"
    return ""


def _content(file: str | PathLike[str], most_nbytes: int) -> bytes:
    """The first bytes of a file."""
    if Path(file).is_dir():
        raise FormatError(
            f"is a folder without {MANIFEST_NAME}",
            where=str(file),
            remedy=f"{_WHAT_HAS_FINGERPRINTS}; `restride diff` compares two checkpoints",
        )
    try:
        with RangeFile(file) as opened:
            return opened.read(0, min(most_nbytes, opened.nbytes))
    except RestrideError as error:
        error.remedy = error.remedy or _WHAT_HAS_FINGERPRINTS
        raise


def _whole_content(file: str | PathLike[str]) -> bytes:
    content = _content(file, LARGEST_LIST_NBYTES + 1)  # it may be a checkpoint
    if len(content) > LARGEST_LIST_NBYTES:
        raise FormatError(
            f"holds no fingerprints: it is larger than {LARGEST_LIST_NBYTES:,} bytes",
            where=str(file),
            remedy=_WHAT_HAS_FINGERPRINTS,
        )
    return content
