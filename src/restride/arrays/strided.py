"""Copy a nest of loops over runs of bytes, by the compiled kernel where it is there."""

from __future__ import annotations

from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, NamedTuple

from restride.arrays import _kernel
from restride.arrays.memory import address_of
from restride.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Prepared", "copy_at", "copy_strided", "prepared"]


def copy_strided(
    source: ReadableBuffer,
    target: WriteableBuffer,
    loops: Sequence[tuple[int, int, int]],
    run_nbytes: int,
    *,
    source_start: int = 0,
    target_start: int = 0,
) -> None:
    """Copy a run of bytes for every step of all loops.

    Args:
        source: Contiguous bytes.
        target: Contiguous bytes, none of them those of `source`.
        loops: Extent, stride in the source and stride in the target, in bytes and of any sign;
            outermost first. No two steps may write the same byte.
        run_nbytes: Bytes that are neighbours on both sides.
        source_start: Where the first run is read.
        target_start: Where it is written.

    Raises:
        LayoutError: A run is not inside `source` or not inside `target`, or `target` is read-only.

    Cost:
        One pass over the bytes. With the kernel a third to a half of the speed of memcpy for runs
        below 64 bytes and for transpositions, more for longer runs; without it runs below 64 bytes
        take twice as long, those of no even width four times, transpositions up to forty times.
        The interpreter is free meanwhile.

    Examples:
        >>> target = bytearray(6)
        >>> copy_strided(b"abcdef", target, [(2, 1, 3), (3, 2, 1)], 1)
        >>> target
        bytearray(b'acebdf')
    """
    found = prepared(source, target, loops, run_nbytes, source_start, target_start)
    if found is None:
        return
    if not found.is_for_kernel or not _copy_fast(found, run_nbytes):
        from restride.arrays._without_kernel import copy_slowly  # noqa: PLC0415 - imports NumPy

        copy_slowly((source, source_start), (target, target_start), found.steps, run_nbytes)


class Prepared(NamedTuple):
    """A copy that is known to stay inside its memory.

    Attributes:
        source: Address of the first run that is read.
        target: Address where it is written.
        steps: Loops of more than one turn.
        is_for_kernel: Whether it has no order: no byte is written that is read, or written twice.
    """

    source: int
    target: int
    steps: Sequence[tuple[int, int, int]]
    is_for_kernel: bool


def prepared(
    source: ReadableBuffer,
    target: WriteableBuffer,
    loops: Sequence[tuple[int, int, int]],
    run_nbytes: int,
    source_start: int,
    target_start: int,
) -> Prepared | None:
    """Check a copy, as `copy_strided` is asked for it; None where it has nothing to do.

    Raises:
        LayoutError: As for `copy_strided`.
    """
    steps = [loop for loop in loops if loop[0] != 1]
    if run_nbytes < 0 or (steps and min(steps)[0] < 0):
        raise LayoutError(f"runs of {run_nbytes} bytes in loops {loops} cannot be counted")
    if not run_nbytes or (steps and not min(steps)[0]):
        return None
    spans = _spans(steps, run_nbytes)
    low, high, start, stop = spans
    _require_inside("source", source, source_start + low, source_start + high)
    _require_inside("target", target, target_start + start, target_start + stop)
    addresses = address_of(source) + source_start, address_of(target) + target_start
    return _prepared(*addresses, steps, run_nbytes, spans)


def copy_at(
    source_address: int,
    target_address: int,
    loops: Sequence[tuple[int, int, int]],
    run_nbytes: int,
) -> bool:
    """Copy between two places in memory, if the kernel can.

    Args:
        source_address: Where the first run is read. The caller has made sure that all runs are in
            memory of his own.
        target_address: Where it is written.
        loops: Extent, stride in the source and stride in the target, as in `copy_strided`.
        run_nbytes: Bytes of a run.

    Returns:
        Whether it was done. Not so if there is no kernel, if there is nothing to copy, if memory is
        written that is read, or if it is not plain that no byte is written twice: there the order
        of steps may matter, and the kernel has one of its own.
    """
    steps = [loop for loop in loops if loop[0] != 1]
    if _kernel.KERNEL is None or run_nbytes < 1 or (steps and min(steps)[0] < 1):
        return False
    spans = _spans(steps, run_nbytes)
    found = _prepared(source_address, target_address, steps, run_nbytes, spans)
    return found.is_for_kernel and _copy_fast(found, run_nbytes)


def _prepared(
    source: int,
    target: int,
    steps: Sequence[tuple[int, int, int]],
    run_nbytes: int,
    spans: tuple[int, int, int, int],
) -> Prepared:
    low, high, start, stop = spans
    are_apart = source + high <= target + start or target + stop <= source + low
    is_free = are_apart and _writes_each_byte_once(steps, run_nbytes)
    return Prepared(source, target, steps, is_free)


def _copy_fast(copy: Prepared, run_nbytes: int) -> bool:
    kernel = _kernel.KERNEL
    if kernel is None:
        return False
    steps = copy.steps
    packed = pack(f"{3 * len(steps)}q", *chain.from_iterable(steps))
    return kernel.copy(copy.target, copy.source, len(steps), packed, run_nbytes)


def _spans(steps: Sequence[tuple[int, int, int]], run_nbytes: int) -> tuple[int, int, int, int]:
    """First byte of all runs and the one behind the last, in the source and in the target."""
    low = start = 0
    high = stop = run_nbytes
    for extent, source, target in steps:
        if source < 0:
            low += (extent - 1) * source
        else:
            high += (extent - 1) * source
        if target < 0:
            start += (extent - 1) * target
        else:
            stop += (extent - 1) * target
    return low, high, start, stop


def _require_inside(name: str, memory: ReadableBuffer, low: int, high: int) -> None:
    view = memoryview(memory)
    if low < 0 or high > view.nbytes or not view.c_contiguous:
        raise LayoutError(
            f"a copy of bytes {low} to {high} leaves a {name} of {view.nbytes} contiguous bytes"
        )
    if name == "target" and view.readonly:
        raise LayoutError("the target of a copy is memory that must not be written")


def _writes_each_byte_once(steps: Sequence[tuple[int, int, int]], run_nbytes: int) -> bool:
    """Whether each loop of the target steps over all that the shorter ones write.

    Sufficient, not necessary: loops can mesh without it.
    """
    reach = run_nbytes
    for stride, extent in sorted((abs(target), extent) for extent, _, target in steps):
        if stride < reach:
            return False
        reach += (extent - 1) * stride
    return True
