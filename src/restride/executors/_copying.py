"""Carry out one step: read, compare replicas, cast. The only code that touches tensor bytes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from restride.arrays.casts import cast, largest_gap, round_once, to_comparable
from restride.arrays.scaling import scaled_once
from restride.arrays.strided import copy_strided
from restride.errors import ReplicaError, UnsupportedError
from restride.executors.events import ReplicaDrift
from restride.planning.sharing import is_dense, shared_span, span_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from restride.checkpoint.dtypes import DType
    from restride.planning.plan import Copy, Plan, RegionPlan, Step, StepFill
    from restride.planning.sharing import Span

__all__ = ["Moves", "Reader", "StepBuffers", "Writer", "carry_out", "fill_step", "read_copies"]

_LARGEST_WORD_NBYTES: Final = 8


class Reader(Protocol):
    """Positioned reads from the source files."""

    def read_into(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Fill `buffer` with the bytes of source file number `file` that start there."""


class Writer(Protocol):
    """Positioned writes into the target files."""

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Write `buffer` into target file number `file`, starting at that byte."""


class StepBuffers:
    """The memory of one worker, allocated once and reused: first touch costs ten times a reuse."""

    def __init__(self, plan: Plan) -> None:
        self.main: NDArray[np.uint8] = np.empty(plan.buffer_nbytes, np.uint8)
        self.replica: NDArray[np.uint8] = np.empty(plan.buffer_nbytes, np.uint8)
        self.span: NDArray[np.uint8] = np.empty(plan.buffer_nbytes, np.uint8)
        # What the span buffer has of a file, where all that is read now is in it.
        self.held: Span | None = None
        self.read_nbytes = 0

    def hold(self, span: Span | None, moves: Moves) -> None:
        """Read a span for several steps, or forget the last one."""
        self.held = None
        if span is not None:
            moves.read(
                *(span.file, span.start_nbytes),
                self.span[: span.stop_nbytes - span.start_nbytes],
            )
            self.held = span


class Moves(Protocol):
    """How what a step reads gets into its buffer: now, or noted in a program."""

    def read(self, file: int, start_nbytes: int, into: NDArray[np.uint8], /) -> None:
        """Fill an array with the bytes of source file number `file` that start there."""

    def copy(
        self,
        source: NDArray[np.uint8],
        target: NDArray[np.uint8],
        loops: Sequence[tuple[int, int, int]],
        run_nbytes: int,
        *,
        source_start: int = 0,
        target_start: int = 0,
    ) -> None:
        """Copy runs of bytes, as `copy_strided` does."""


class _Now:
    """Reads and copies at once."""

    copy = staticmethod(copy_strided)

    def __init__(self, reader: Reader, buffers: StepBuffers) -> None:
        self._reader = reader
        self._buffers = buffers

    def read(self, file: int, start_nbytes: int, into: NDArray[np.uint8], /) -> None:
        self._reader.read_into(file, start_nbytes, into.data)
        self._buffers.read_nbytes += into.nbytes


def carry_out(
    bundle: Sequence[Step],
    reader: Reader,
    writer: Writer | None,
    buffers: StepBuffers,
    on_drift: Callable[[ReplicaDrift], None],
) -> Iterator[Step]:
    """Read and write one step after the other; yield each when it is done.

    Args:
        bundle: The steps. What they share is read once.
        reader: Where the bytes come from.
        writer: Where they go; None compares replicas, and reads nothing that has none.
        buffers: Memory of the worker.
        on_drift: Receives differences between replicas where the policy lets the run go on.

    Raises:
        ReplicaError: Replicas differ that must agree.
        ExecutionError: Reading or writing failed.
    """
    if writer is not None:
        buffers.hold(shared_span(bundle, buffers.span.nbytes), _Now(reader, buffers))
    for step in bundle:
        _carry_out(step, reader, writer, buffers, on_drift)
        yield step
    buffers.held = None


def _carry_out(
    step: Step,
    reader: Reader,
    writer: Writer | None,
    buffers: StepBuffers,
    on_drift: Callable[[ReplicaDrift], None],
) -> None:
    """One step, in chunks where it needs nothing else."""
    region = step.region
    if not region.streamed_numel:
        if step.fills or writer is not None:
            filled = fill_step(step, reader, buffers, on_drift)
            if writer is not None:
                writer.write_from(region.target_file, step.target_start_nbytes, filled.data)
    elif writer is not None:
        main = buffers.main.data
        for chunk in step.chunks(main.nbytes):
            content = main[: chunk.nbytes]
            reader.read_into(chunk.file, chunk.source_start_nbytes, content)
            buffers.read_nbytes += chunk.nbytes
            writer.write_from(region.target_file, chunk.target_start_nbytes, content)


def fill_step(
    step: Step,
    reader: Reader,
    buffers: StepBuffers,
    on_drift: Callable[[ReplicaDrift], None],
) -> NDArray[np.uint8]:
    """Read one step into a buffer, compare its replicas, and cast it.

    Args:
        step: What to fill.
        reader: Where the bytes come from.
        buffers: Memory of the worker; the result may be a view of it.
        on_drift: Receives differences between replicas where the policy lets the run go on.

    Returns:
        The bytes to write, in the target dtype.

    Raises:
        ReplicaError: Replicas differ that must agree.
        ExecutionError: Reading failed.
    """
    region = step.region
    main = buffers.main[: step.numel * region.source_dtype.itemsize_nbytes]
    if not step.is_filled:
        main[:] = 0
    for fill in step.fills:
        _read(fill.copies[0][1], main, reader, buffers)
    shared = [fill for fill in step.fills if len(fill.copies) > 1]
    if len(shared) == 1 or not _agree(shared, main, reader, buffers):
        for fill in shared:
            _settle(step, fill, main, reader, buffers, on_drift)
    for fill in step.fills:
        if fill.scale != 1:
            _scale(fill, region.source_dtype, main)
    if region.source_dtype == region.target_dtype:
        return main
    return cast(main, region.source_dtype, region.target_dtype)


def _scale(fill: StepFill, dtype: DType, main: NDArray[np.uint8]) -> None:
    """Multiply the elements of one fill by its factor, wherever they stand in the buffer."""
    itemsize = dtype.itemsize_nbytes
    words = _words(dtype, main)
    for copy in fill.copies[0][1]:
        run = copy.run_nbytes // itemsize
        shape = (*(axis[0] for axis in copy.axes), run)
        first = np.int64(copy.target_start_nbytes // itemsize)
        places = np.full(shape, first)
        for number, stride in enumerate([*(axis[2] // itemsize for axis in copy.axes), 1]):
            ramp = np.arange(shape[number], dtype=np.int64) * stride
            places += ramp.reshape(-1, *[1] * (len(shape) - number - 1))
        flat = places.reshape(-1)
        words[flat] = _words(dtype, scaled_once(words[flat], dtype, fill.scale))


def _agree(
    fills: Sequence[StepFill], main: NDArray[np.uint8], reader: Reader, buffers: StepBuffers
) -> bool:
    """Whether all replicas of all fills are alike, without a pass over the step for each fill."""
    replica = buffers.replica[: main.nbytes]
    for number in range(1, max((len(fill.copies) for fill in fills), default=1)):
        replica[:] = main
        for fill in fills:
            if number < len(fill.copies):
                _read(fill.copies[number][1], replica, reader, buffers)
        if not _same(main, replica):
            return False
    return True


def _settle(
    step: Step,
    fill: StepFill,
    main: NDArray[np.uint8],
    reader: Reader,
    buffers: StepBuffers,
    on_drift: Callable[[ReplicaDrift], None],
) -> None:
    """Compare the replicas of one fill with the one in `main`; average them where asked."""
    region = step.region
    replica = buffers.replica[: main.nbytes]
    mean: _Mean | None = None
    for number, (rank, copies) in enumerate(fill.copies[1:], 1):
        # Overlaying the replica on a copy compares exactly its elements, however they are strewn.
        replica[:] = main
        _read(copies, replica, reader, buffers)
        if not _same(main, replica):
            if region.replicas == "mean" and mean is None:
                mean = _Mean(region, main, number)
            drift = _difference(region, (fill.copies[0][0], rank), copies, main, replica)
            if number < fill.agreeing:
                raise _refusal(step, drift, main, replica)
            on_drift(drift)
        if mean is not None:
            mean.add(replica)
    if mean is not None:
        mean.store(main)


class _Mean:
    """Sum of replicas in float64. Elements on which all of them agree keep their bits."""

    def __init__(self, region: RegionPlan, first: NDArray[np.uint8], count: int) -> None:
        """Start with so many replicas that are all like the first."""
        if region.source_dtype.kind != "float":
            raise UnsupportedError(
                f"a mean of {region.source_dtype} replicas has no meaning",
                where=f"tensor {region.tensor!r}, state {region.state!r}",
                remedy="choose the first one",
            )
        self.dtype = region.source_dtype
        with np.errstate(invalid="ignore", over="ignore"):
            self.total = to_comparable(first, self.dtype) * count
        self.first = _words(self.dtype, first)
        self.disagree = np.zeros(self.total.shape, np.bool_)
        self.count = count

    def add(self, replica: NDArray[np.uint8]) -> None:
        # The sum of an infinity and its negative is no number, and nothing to warn of.
        with np.errstate(invalid="ignore", over="ignore"):
            self.total += to_comparable(replica, self.dtype)
        self.disagree |= _words(self.dtype, replica) != self.first
        self.count += 1

    def store(self, main: NDArray[np.uint8]) -> None:
        fresh = round_once(self.total[self.disagree] / self.count, self.dtype)
        _words(self.dtype, main)[self.disagree] = _words(self.dtype, fresh)


def _words(dtype: DType, buffer: NDArray[np.uint8]) -> NDArray[np.generic]:
    """The elements of a buffer as bit patterns."""
    if dtype.itemsize_nbytes > _LARGEST_WORD_NBYTES:
        return buffer.view(f"V{dtype.itemsize_nbytes}")
    return buffer.view(f"u{dtype.itemsize_nbytes}")


def _same(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Compare bit for bit: equal NaNs are equal, +0.0 and -0.0 are not."""
    wide = a.nbytes - a.nbytes % _LARGEST_WORD_NBYTES
    return bool(
        np.array_equal(a[:wide].view(np.uint64), b[:wide].view(np.uint64))
        and np.array_equal(a[wide:], b[wide:])
    )


def _difference(
    region: RegionPlan,
    ranks: tuple[int, int],
    copies: tuple[Copy, ...],
    a: NDArray[np.uint8],
    b: NDArray[np.uint8],
) -> ReplicaDrift:
    dtype = region.source_dtype
    where = _words(dtype, a) != _words(dtype, b)
    largest: float | None = None
    if dtype.kind != "complex":
        largest = largest_gap(to_comparable(a, dtype)[where], to_comparable(b, dtype)[where])
    payload = sum(copy.run_nbytes * prod(axis[0] for axis in copy.axes) for copy in copies)
    return ReplicaDrift(
        tensor=region.tensor,
        state=region.state,
        ranks=ranks,
        numel=payload // dtype.itemsize_nbytes,
        different_numel=int(np.count_nonzero(where)),
        largest=largest,
    )


def _refusal(
    step: Step, drift: ReplicaDrift, main: NDArray[np.uint8], replica: NDArray[np.uint8]
) -> ReplicaError:
    dtype = step.region.source_dtype
    index = int(np.flatnonzero(_words(dtype, main) != _words(dtype, replica))[0])
    values = ""
    if dtype.kind != "complex":
        itemsize = dtype.itemsize_nbytes
        at = slice(index * itemsize, (index + 1) * itemsize)
        first, second = (float(to_comparable(buffer[at], dtype)[0]) for buffer in (main, replica))
        values = f" ({first:.9g} and {second:.9g})"
    first, second = drift.ranks
    holders = f"ranks {first} and {second} hold" if first != second else f"rank {first} holds"
    full_index = step.region.full_index(step.start + index)
    shape = step.region.target_layout.full_shape
    place = f"element {full_index}{_at(full_index, shape)}"
    return ReplicaError(
        f"{holders} different copies of the same elements, the first at {place}{values}",
        ranks=drift.ranks,
        different_numel=drift.different_numel,
        largest=drift.largest,
        first_index=full_index,
        where=f"tensor {drift.tensor!r}, state {drift.state!r}",
        remedy="see the whole table with `restride check`, then decide: --replicas first or mean, "
        "or the rank whose copy counts, as tp=1, or own, for each rank of --to deepspeed its own",
    )


def _at(index: int | None, shape: tuple[int, ...]) -> str:
    """The same element by its place in the tensor, where that says more than the flat index."""
    if index is None or len(shape) < 2:  # noqa: PLR2004 - a vector has one coordinate
        return ""
    coordinates = []
    for extent in reversed(shape):
        index, at = divmod(index, extent)
        coordinates.append(str(at))
    return f" ([{', '.join(reversed(coordinates))}] of the tensor)"


def read_copies(
    copies: Sequence[Copy], target: NDArray[np.uint8], moves: Moves, buffers: StepBuffers
) -> None:
    """Read what some copies say into the buffer of a step.

    Args:
        copies: What to read, none of it where another one stands.
        target: The buffer.
        moves: How.
        buffers: Memory of the worker; the span is used.
    """
    for copy in copies:
        _read_block(
            copy.file,
            copy.source_start_nbytes,
            copy.target_start_nbytes,
            copy.axes,
            copy.run_nbytes,
            target,
            moves,
            buffers,
        )


def _read(
    copies: Sequence[Copy], target: NDArray[np.uint8], reader: Reader, buffers: StepBuffers
) -> None:
    read_copies(copies, target, _Now(reader, buffers), buffers)


def _read_block(
    file: int,
    source_start: int,
    target_start: int,
    axes: tuple[tuple[int, int, int], ...],
    run_nbytes: int,
    target: NDArray[np.uint8],
    moves: Moves,
    buffers: StepBuffers,
) -> None:
    """Read one strided block: straight, through the span buffer, or in parts."""
    if buffers.held is not None:
        held_start = source_start - buffers.held.start_nbytes
        moves.copy(
            *(buffers.span, target, axes, run_nbytes),
            source_start=held_start,
            target_start=target_start,
        )
        return
    if not axes:
        moves.read(file, source_start, target[target_start : target_start + run_nbytes])
        return
    loops = [axis[:2] for axis in axes]
    span = span_nbytes(loops, run_nbytes)
    is_one = is_dense(loops, run_nbytes)
    if is_one and span <= buffers.span.nbytes:
        scratch = buffers.span[:span]
        moves.read(file, source_start, scratch)
        moves.copy(scratch, target, axes, run_nbytes, target_start=target_start)
        return
    extent, source_stride, target_stride = axes[0]
    inner = axes[1:]
    inner_span = span_nbytes(loops[1:], run_nbytes)
    count = 1
    if is_one and inner_span <= buffers.span.nbytes:
        count = max(1, (buffers.span.nbytes - inner_span) // source_stride + 1)
    for first in range(0, extent, count):
        part = min(count, extent - first)
        outer = ((part, source_stride, target_stride),) if part > 1 else ()
        _read_block(
            file,
            source_start + first * source_stride,
            target_start + first * target_stride,
            (*outer, *inner),
            run_nbytes,
            target,
            moves,
            buffers,
        )
