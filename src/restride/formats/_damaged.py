"""Which files of a checkpoint are damaged beside the first one: a full disk cuts off several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import FormatError, RestrideError
from restride.storage.ranges import RangeFile
from restride.storage.zip_directory import read_zip_directory
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["tell_of_others"]

_ZIP: Final = ".pt"
_SAFETENSORS: Final = ".safetensors"
_MOST_NAMED: Final = 5
_PARAMETERS: Final = "zero"  # of a universal folder, in which each parameter has a folder


def tell_of_others(error: FormatError) -> None:
    """Name all files that are damaged in an error of one of them, and what to do.

    An error of anything else than a file that is cut off, empty or overwritten stays as it is.

    Cost:
        Opens every file of the folder, and reads its directory.
    """
    first = Path(error.where.partition(": ")[0])
    if not first.is_file() or not _is_damaged(first):
        return
    others = [path for path in _beside(first) if path != first and _is_damaged(path)]
    if others:
        shown = ", ".join(str(path.relative_to(_top(first))) for path in others[:_MOST_NAMED])
        more = ", ..." if others[_MOST_NAMED:] else ""
        error.problem += (
            f"; {counted(len(others), 'other file')} {which(len(others), 'is', 'are')} damaged as "
            f"well: {shown}{more}"
        )
    what = which(len(others) + 1, "it", "them")
    error.remedy = error.remedy or f"copy {what} again, or take an earlier save"


def _top(path: Path) -> Path:
    folder = path.parent
    return folder.parent if folder.parent.name == _PARAMETERS else folder


def _beside(path: Path) -> Iterator[Path]:
    top = _top(path)
    return iter(sorted(top.rglob(f"*{path.suffix}") if top != path.parent else top.iterdir()))


def _is_damaged(path: Path) -> bool:
    """Whether a file is cut off, or is not what its name says."""
    try:
        if path.suffix == _ZIP:
            with RangeFile(path) as file:
                read_zip_directory(file)
        elif path.suffix == _SAFETENSORS:
            from restride.formats.safetensors.header import read_header  # noqa: PLC0415 - rare

            with RangeFile(path) as file:
                read_header(file)
    except FormatError:
        return True
    except RestrideError:
        return False
    return False
