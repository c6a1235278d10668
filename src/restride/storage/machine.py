"""What this process may use of the machine: cores, memory and open files, as far as limits go."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.errors import ExecutionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

__all__ = [
    "available_nbytes",
    "core_count",
    "free_descriptors",
    "free_nbytes",
    "memory_limit_nbytes",
    "peak_nbytes",
]

_ROOT: Final = Path("/")
# A cgroup of version 1 without a limit states the largest multiple of a page.
_NO_LIMIT_NBYTES: Final = 1 << 60


def core_count(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy: its affinity, and the CPU time of its cgroups.

    Args:
        root: Where ``proc`` and ``sys`` are; tests have their own.

    Examples:
        >>> core_count() >= 1
        True
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            # Half a core of time is a core that rests now and then.
            cores = min(cores, -(-quota // period))
    return max(1, cores)


def memory_limit_nbytes(root: Path = _ROOT) -> int | None:
    """Memory that the cgroups of this process allow, or None where they set no limit.

    Args:
        root: Where ``proc`` and ``sys`` are; tests have their own.
    """
    limits = [
        limit
        for folder in _cgroups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if 0 < (limit := _number(_words(folder / name)[:1])) < _NO_LIMIT_NBYTES
    ]
    return min(limits, default=None)


def available_nbytes(root: Path = _ROOT) -> int:
    """Memory that the system could give, and the cgroups allow; 0 where it does not say.

    Args:
        root: Where ``proc`` and ``sys`` are; tests have their own.
    """
    lines = _lines(root / "proc/meminfo")
    words = next((line.split()[1:2] for line in lines if line.startswith("MemAvailable:")), [])
    available = _number(words) << 10  # it is said in KiB
    return min(available, memory_limit_nbytes(root) or available)


def peak_nbytes() -> int:
    """Most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts in KiB


def free_descriptors() -> int:
    """Files that this process may open beside those that it has open.

    The limit (``ulimit -n``) is taken as it is: raising it is up to who set it, and goes on to all
    that the process starts.

    Examples:
        >>> free_descriptors() > 0
        True
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        opened = len([*Path("/proc/self/fd").iterdir()]) - 1  # that of the listing is closed again
    except OSError:  # there is none left for the listing
        return 0
    return max(0, limit - opened)


def free_nbytes(path: str | PathLike[str]) -> int:
    """Bytes that are free where a path is, or where it would be.

    Raises:
        ExecutionError: The system does not say.
    """
    place = Path(os.path.realpath(path))
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        status = os.statvfs(place)
    except OSError as error:
        raise ExecutionError(f"cannot be looked at ({error.strerror})", where=str(place)) from error
    return status.f_bavail * status.f_frsize


def _quota(folder: Path) -> tuple[int, int]:
    """CPU time of a cgroup, and the time in which it may be used; 0 where there is no limit."""
    words = _words(folder / "cpu.max")
    if words:
        return _number(words[:1]), _number(words[1:2])
    times = (_words(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    quota, period = (_number(found[:1]) for found in times)
    return quota, period


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups of this process that have a controller, from the inside out.

    Inside of a container the path that the kernel states may not be there; the container's own
    cgroup then is the root of what is mounted.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            top = mounts
        elif controller in controllers.split(","):
            top = mounts / controller
        else:
            continue
        folder = top / path.strip().lstrip("/")
        while folder != top and folder.is_relative_to(top):
            yield folder
            folder = folder.parent
        yield top


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path)[:1] for word in line.split()]


def _number(words: list[str]) -> int:
    """The number that a file states; 0 for none, or for ``max``."""
    return int(words[0]) if words and words[0].isascii() and words[0].isdigit() else 0
