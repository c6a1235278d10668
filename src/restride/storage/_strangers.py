"""What of a folder restride did not write: it is not restride's to delete."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from stat import S_ISREG
from typing import TYPE_CHECKING, Final

from restride.checkpoint.manifest import MANIFEST_NAME
from restride.checkpoint.manifest_reading import sizes_of
from restride.errors import FormatError, UnsupportedError
from restride.frozen import Frozen
from restride.storage.manifest_files import read_manifest
from restride.storage.output_files import translated
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["say_strangers"]

# A wrong path may be the folder of all checkpoints of a team.
_MOST_COUNTED: Final = 1000
# The manifest is the last file that is written, but not all file systems have one clock, and some
# keep only even seconds.
_TOLERANCE_NS: Final = 2 * 10**9


def say_strangers(folder: Path) -> str:
    """Say what of a folder restride did not write, by its manifest; empty where it wrote all of it.

    A file that it wrote is not its own any more when it has another size, or was written to after
    the manifest. No file is read but the manifest. What is missing is nobody's.

    Raises:
        ExecutionError: The system cannot look.

    Cost:
        A look at each entry, until a thousand of others are met.
    """
    with translated("cannot be looked at", folder):
        wrote = _wrote(folder)
        strangers = _strangers(folder, wrote)
        first = next(strangers, None)
        if first is None:
            return ""
        count = sum(1 for _ in islice(strangers, _MOST_COUNTED))
    least = "at least " if count == _MOST_COUNTED else ""
    others = f", and {least}{counted(count, 'other')}" if count else ""
    doubt = f" ({wrote.doubt})" if wrote.doubt else ""
    return f"holds {first}{others}{doubt}"


class _Wrote(Frozen):
    """What restride wrote into a folder.

    Attributes:
        nbytes: Size of each file by its name.
        latest_ns: Time after which it wrote none of them.
        doubt: Why the manifest that is there says nothing of all this.
    """

    nbytes: Mapping[str, int]
    latest_ns: int = 0
    doubt: str = ""


def _wrote(folder: Path) -> _Wrote:
    path = folder / MANIFEST_NAME
    status = None
    with suppress(FileNotFoundError):
        status = os.lstat(path)
    if status is None or not S_ISREG(status.st_mode):
        return _Wrote({})
    try:
        nbytes = sizes_of(read_manifest(path, where=MANIFEST_NAME))
    except (FormatError, UnsupportedError) as error:
        return _Wrote({}, doubt=str(error))
    latest_ns = status.st_mtime_ns + _TOLERANCE_NS
    return _Wrote({**nbytes, MANIFEST_NAME: status.st_size}, latest_ns)


def _strangers(folder: Path, wrote: _Wrote) -> Iterator[str]:
    """What restride did not write, or somebody has changed since."""
    for name, status in _entries(folder):
        if name not in wrote.nbytes or not S_ISREG(status.st_mode):
            known = "of which nothing says that restride wrote it"
            yield f"{name}, {known if wrote.doubt else 'which restride did not write'}"
        elif status.st_size != wrote.nbytes[name] or status.st_mtime_ns > wrote.latest_ns:
            yield f"{name}, which was changed since restride wrote it"


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All that is below a folder by its path in it, but for folders that hold something."""
    left = [""]
    while left:
        below = left.pop()
        with os.scandir(folder / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        if below and not entries:
            yield below, os.lstat(folder / below)
        inner = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(f"{below}{entry.name}/")
            else:
                yield f"{below}{entry.name}", entry.stat(follow_symlinks=False)
        left += reversed(inner)
