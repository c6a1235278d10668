"""Read files of fingerprints: those of `restride fingerprint`, and manifests of outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.fingerprints import fingerprints_from_json
from restride.checkpoint.manifest import MANIFEST_NAME, manifest_from_json
from restride.errors import ExecutionError, FormatError, RestrideError
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
    path = Path(file)
    if os.path.lexists(path / MANIFEST_NAME):
        path /= MANIFEST_NAME
    content = _content(path)
    # By what it says, too: a manifest may have been kept under another name.
    if path.name == MANIFEST_NAME or _OF_MANIFESTS in content[:_HEAD_NBYTES]:
        kept = manifest_from_json(content, where=str(path)).tensors
        if not kept:
            raise FormatError(
                "has no fingerprint, as every array of the output is cut",
                where=str(path),
                remedy="take them of the output with `restride fingerprint`",
            )
        return kept
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
        content = _content(file)
        if content:
            fingerprints_from_json(content, where=str(file))
    except RestrideError:
        return "is no file of fingerprints that can be read"
    return ""


def _content(file: str | PathLike[str]) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(LARGEST_LIST_NBYTES + 1)  # it may be a checkpoint
    except IsADirectoryError as error:
        raise FormatError(
            f"is a folder without {MANIFEST_NAME}",
            where=str(file),
            remedy=f"{_WHAT_HAS_FINGERPRINTS}; `restride diff` compares two checkpoints",
        ) from error
    except OSError as error:
        raise ExecutionError(
            f"cannot be read ({error.strerror})",
            where=str(file),
            remedy=_WHAT_HAS_FINGERPRINTS,
        ) from error
    if len(content) > LARGEST_LIST_NBYTES:
        raise FormatError(
            f"holds no fingerprints: it is larger than {LARGEST_LIST_NBYTES:,} bytes",
            where=str(file),
            remedy=_WHAT_HAS_FINGERPRINTS,
        )
    return content
