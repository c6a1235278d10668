"""Carry out steps in calls of the kernel that take no interpreter lock: from file to file."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from restride.arrays import _kernel
from restride.arrays.program import Program
from restride.executors._copying import read_copies, replicas_beside
from restride.executors.journaled import JournaledWriter
from restride.executors.sources import CatalogReader
from restride.planning.sharing import shared_span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.executors._copying import Reader, StepBuffers, Writer
    from restride.executors.blocks import BlockPart
    from restride.planning.plan import Step
    from restride.storage.ranges import Lease

__all__ = ["Direct", "direct_between"]

# Programs are run in between where they get longer, as runs of a few bytes would have them.
_MOST_MOVES: Final = 512


class _CannotError(Exception):
    """The steps have to be carried out one by one."""


def direct_between(reader: Reader, writer: Writer | None, buffers: StepBuffers) -> Direct | None:
    """What carries out steps between files; None without a kernel, or where there are none."""
    if _kernel.KERNEL is None:
        return None
    if not isinstance(reader, CatalogReader) or not isinstance(writer, JournaledWriter):
        return None
    return Direct(reader, writer, buffers)


class Direct:
    """Carries out steps that only move bytes.

    Args:
        reader: Source files.
        writer: Target files.
        buffers: Memory of the worker.
    """

    def __init__(
        self, reader: CatalogReader, writer: JournaledWriter, buffers: StepBuffers
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._buffers = buffers

    def carry_out(self, batch: Sequence[Sequence[Step]]) -> bool:
        """Read and write some bundles of steps.

        Returns:
            Whether it was done. If not, some scale or cast, replicas differ, or something went
            wrong: then nothing is counted, and who carries them out one by one finds out what it
            is.
        """
        if not all(map(_only_moves, chain.from_iterable(batch))):
            return False
        run = _Run(self._reader, self._writer, self._buffers)
        try:
            run.carry_out(batch)
        except _CannotError:
            return False
        finally:
            run.close()
        self._buffers.read_nbytes += run.read_nbytes
        return True


def _only_moves(step: Step) -> bool:
    region = step.region
    return bool(
        region.streamed_numel
        or (
            step.is_filled
            and region.source_dtype == region.target_dtype
            and all(fill.scale == 1 for fill in step.fills)
        )
    )


class _Run:
    """The files of some steps, and what is noted of them. Implements `Moves`."""

    def __init__(
        self, reader: CatalogReader, writer: JournaledWriter, buffers: StepBuffers
    ) -> None:
        self.read_nbytes = 0
        self._reader = reader
        self._writer = writer
        self._buffers = buffers
        # Of an `ExitStack` each of the hundreds of steps of a second would take a tenth.
        self._leases: list[Lease] = []
        self._sources: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._program = Program()
        self._moves = 0
        self._noted: list[tuple[int, list[BlockPart]]] = []
        self._digests: list[int] = []

    def carry_out(self, batch: Iterable[Sequence[Step]]) -> None:
        """Do all of it, and count it.

        Raises:
            _CannotError: It was not done.
        """
        buffers = self._buffers
        for bundle in batch:
            buffers.hold(shared_span(bundle, buffers.span.nbytes), self)
            for step in bundle:
                if step.region.streamed_numel:
                    self._stream(step)
                else:
                    self._fill(step)
        self._run()
        digests = iter(self._digests)
        for file, parts in self._noted:
            self._writer.count(file, parts, [next(digests) for _ in parts])

    def close(self) -> None:
        """Let the files go."""
        for lease in self._leases:
            lease.give_back()

    def read(self, file: int, start_nbytes: int, into: memoryview, /) -> None:
        """See `Moves.read`."""
        self._count_move()
        self._program.read(self._source(file), start_nbytes, into)
        self.read_nbytes += into.nbytes

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
        """See `Moves.copy`."""
        self._count_move()
        starts = {"source_start": source_start, "target_start": target_start}
        if not self._program.copy(source, target, loops, run_nbytes, **starts):
            raise _CannotError

    def _count_move(self) -> None:
        if self._moves == _MOST_MOVES:
            self._run()
        self._moves += 1

    def _stream(self, step: Step) -> None:
        file = step.region.target_file
        target = self._target(file)
        for fill in step.fills:
            for copy in fill.copies[0][1]:
                source = self._source(copy.file)
                start = step.target_start_nbytes + copy.target_start_nbytes
                parts = self._writer.parts(file, start, copy.run_nbytes)
                for part in parts:
                    self._count_move()
                    skew = part.start - parts[0].start
                    places = (source, copy.source_start_nbytes + skew), (target, start + skew)
                    self._program.move(*places, part.nbytes, self._buffers.main, part.start)
                self._noted.append((file, parts))
                self.read_nbytes += copy.run_nbytes

    def _fill(self, step: Step) -> None:
        """Read a step, and all of its replicas beside it: what differs is for others to look at."""
        buffers = self._buffers
        main = buffers.main[: step.numel * step.region.source_dtype.itemsize_nbytes]
        for fill in step.fills:
            read_copies(fill.copies[0][1], main, self, buffers)
        for copies in replicas_beside(step.fills):
            replica = buffers.replica[: main.nbytes]
            self.copy(main, replica, (), main.nbytes)
            for some in copies:
                read_copies(some, replica, self, buffers)
            self._count_move()
            self._program.require_same(main, replica)
        self._write(step, main)

    def _write(self, step: Step, content: memoryview) -> None:
        file, start = step.region.target_file, step.target_start_nbytes
        parts = self._writer.parts(file, start, content.nbytes)
        for part in parts:
            self._count_move()
            skew = part.start - parts[0].start
            some = content[skew : skew + part.nbytes]
            self._program.write(self._target(file), start + skew, some, part.start)
        self._noted.append((file, parts))

    def _run(self) -> None:
        self._moves = 0
        digests = self._program.run()
        if digests is None:
            raise _CannotError
        self._digests += digests

    def _source(self, file: int) -> int:
        if file not in self._sources:
            self._sources[file] = self._held(self._reader.hold(file))
        return self._sources[file]

    def _target(self, file: int) -> int:
        if file not in self._targets:
            self._targets[file] = self._held(self._writer.hold(file))
        return self._targets[file]

    def _held(self, lease: Lease | None) -> int:
        if lease is None:
            raise _CannotError
        self._leases.append(lease)
        return lease.file.descriptor
