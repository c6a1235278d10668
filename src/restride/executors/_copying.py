"""Carry out one step: read, compare replicas, cast. The only code that touches tensor bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from restride.arrays.memory import allocate, clear, same_bytes
from restride.arrays.rounding import rounded
from restride.arrays.strided import copy_strided
from restride.planning.sharing import is_dense, shared_span, span_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from restride.executors._values import Mean
    from restride.executors.events import ReplicaDrift
    from restride.planning.plan import Copy, Plan, Step, StepFill
    from restride.planning.sharing import Span

__all__ = [
    "Moves",
    "Reader",
    "StepBuffers",
    "Writer",
    "carry_out",
    "fill_step",
    "read_copies",
    "replicas_beside",
]


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
        self.main = allocate(plan.buffer_nbytes)
        self.replica = allocate(plan.buffer_nbytes)
        self.span = allocate(plan.buffer_nbytes)
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

    def read(self, file: int, start_nbytes: int, into: memoryview, /) -> None:
        """Fill an array with the bytes of source file number `file` that start there."""

    def copy(
        self,
        source: memoryview,
        target: memoryview,
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

    def read(self, file: int, start_nbytes: int, into: memoryview, /) -> None:
        self._reader.read_into(file, start_nbytes, into)
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
                writer.write_from(region.target_file, step.target_start_nbytes, filled)
    elif writer is not None:
        main = buffers.main
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
) -> memoryview:
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
        clear(main)
    for fill in step.fills:
        _read(fill.copies[0][1], main, reader, buffers)
    shared = [fill for fill in step.fills if len(fill.copies) > 1]
    if len(shared) == 1 or not _agree(shared, main, reader, buffers):
        for fill in shared:
            _settle(step, fill, main, reader, buffers, on_drift)
    for fill in step.fills:
        if fill.scale != 1:
            from restride.executors._values import scale  # noqa: PLC0415 - imports NumPy

            scale(fill, region.source_dtype, main)
    return rounded(main, region.source_dtype, region.target_dtype)


def _agree(
    fills: Sequence[StepFill], main: memoryview, reader: Reader, buffers: StepBuffers
) -> bool:
    """Whether all replicas of all fills are alike, without a pass over the step for each fill."""
    replica = buffers.replica[: main.nbytes]
    for copies in replicas_beside(fills):
        replica[:] = main
        for some in copies:
            _read(some, replica, reader, buffers)
        if not same_bytes(main, replica):
            return False
    return True


def replicas_beside(fills: Sequence[StepFill]) -> Iterator[list[tuple[Copy, ...]]]:
    """Yield what to read of the second replica of all fills that have one, of the third, and on.

    Read over a copy of the first ones it has to leave that as it was.
    """
    for number in range(1, max((len(fill.copies) for fill in fills), default=1)):
        yield [fill.copies[number][1] for fill in fills if number < len(fill.copies)]


def _settle(
    step: Step,
    fill: StepFill,
    main: memoryview,
    reader: Reader,
    buffers: StepBuffers,
    on_drift: Callable[[ReplicaDrift], None],
) -> None:
    """Compare the replicas of one fill with the one in `main`; average them where asked."""
    region = step.region
    replica = buffers.replica[: main.nbytes]
    mean: Mean | None = None
    for number, (rank, copies) in enumerate(fill.copies[1:], 1):
        # Overlaying the replica on a copy compares exactly its elements, however they are strewn.
        replica[:] = main
        _read(copies, replica, reader, buffers)
        if not same_bytes(main, replica):
            from restride.executors import _values  # noqa: PLC0415 - imports NumPy

            if region.replicas == "mean" and mean is None:
                mean = _values.Mean(region, main, number)
            ranks = fill.copies[0][0], rank
            drift = _values.difference(region, ranks, copies, main, replica)
            if number < fill.agreeing:
                raise _values.refusal(step, drift, main, replica)
            on_drift(drift)
        if mean is not None:
            mean.add(replica)
    if mean is not None:
        mean.store(main)


def read_copies(
    copies: Sequence[Copy], target: memoryview, moves: Moves, buffers: StepBuffers
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


def _read(copies: Sequence[Copy], target: memoryview, reader: Reader, buffers: StepBuffers) -> None:
    read_copies(copies, target, _Now(reader, buffers), buffers)


def _read_block(
    file: int,
    source_start: int,
    target_start: int,
    axes: tuple[tuple[int, int, int], ...],
    run_nbytes: int,
    target: memoryview,
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
