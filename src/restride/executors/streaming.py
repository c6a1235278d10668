"""Carry out a plan in several threads with bounded, reused buffers.

Reads, writes and numpy's copies leave the interpreter lock, so threads overlap them. Steps own
disjoint target bytes, so their order does not matter.
"""

from __future__ import annotations

from itertools import chain
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from restride.executors._copying import StepBuffers, carry_out
from restride.executors.direct import direct_between
from restride.executors.events import ReplicaDrift, StepFinished
from restride.storage.background import Background

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from restride.executors._copying import Reader, Writer
    from restride.executors.direct import Direct
    from restride.executors.events import Observer
    from restride.planning.plan import Plan, Step

__all__ = ["StreamingExecutor"]

# What Python needs between two calls of the kernel has left the core's caches by then, and other
# threads wait for its lock: small steps of one file are done together, up to the bytes of a large
# one. Those of several files would wait for the creation of all of them.
_BATCH_NBYTES: Final = 16 << 20
_MOST_BUNDLES: Final = 8


class StreamingExecutor:
    """Runs as many steps at one time as the plan has workers."""

    def execute(
        self,
        plan: Plan,
        reader: Reader,
        writer: Writer | None,
        observer: Observer,
        *,
        lanes: Iterable[Iterable[Sequence[Step]]] | None = None,
        stop: Event | None = None,
    ) -> int:
        """Run every step, as `SerialExecutor.execute` does.

        Events come one at a time, in the order in which steps finish. After an error no further
        step is started, running ones are waited for, and the error is raised.

        Args:
            plan: What to do.
            reader: Source files, by the numbers of the plan.
            writer: Target files; None compares the replicas and writes nothing.
            observer: Receives an event after each step.
            lanes: Bundles of steps of the plan to run, for each target file; all by default. Each
                worker has a file of its own as long as there are enough.
            stop: When it is set, no further step is started, and the call returns.

        Returns:
            Bytes read.
        """
        run = _Run(plan, observer, plan.lanes() if lanes is None else lanes, stop)
        workers: list[Background] = []
        try:
            # The system may refuse to start a thread: those that run must stop then, too.
            workers.extend(
                Background("restride", run.work, reader, writer) for _ in range(plan.workers)
            )
            for worker in workers:
                worker.wait()
        finally:
            # Also on KeyboardInterrupt: let the workers stop after the step they are in.
            run.stop.set()
            for worker in workers:
                worker.wait()
        for worker in workers:
            worker.require_success()
        return run.read_nbytes


class _Run:
    """What the workers of one run share."""

    def __init__(
        self,
        plan: Plan,
        observer: Observer,
        lanes: Iterable[Iterable[Sequence[Step]]],
        asked: Event | None,
    ) -> None:
        self.plan = plan
        self.observer = observer
        self.stop = Event()
        self.asked = asked or Event()
        self.lanes = iter(lanes)
        # Those that a worker has begun with; the first ones are left to be helped with at the end.
        self.begun: list[Iterator[Sequence[Step]]] = []
        self.steps_lock = Lock()
        self.events_lock = Lock()
        self.done_steps = 0
        self.done_nbytes = 0
        self.read_nbytes = 0

    def work(self, reader: Reader, writer: Writer | None) -> None:
        try:
            self._work(reader, writer)
        except BaseException:
            self.stop.set()  # whatever it was, and if it was before the first step
            raise

    def _work(self, reader: Reader, writer: Writer | None) -> None:
        buffers = StepBuffers(self.plan)
        direct = direct_between(reader, writer, buffers)
        lane: Iterator[Sequence[Step]] = iter(())
        while not self._is_stopped():
            lane, batch = self._next_batch(lane, 1 if direct is None else _MOST_BUNDLES)
            if not batch:
                return
            before = buffers.read_nbytes
            if direct is not None and direct.carry_out(batch):
                done: Iterable[Step] = chain.from_iterable(batch)
            else:
                done = self._one_by_one(batch, reader, writer, buffers, direct)
            for step in done:
                self._finished(step, buffers.read_nbytes - before)
                before = buffers.read_nbytes

    def _one_by_one(
        self,
        batch: Sequence[Sequence[Step]],
        reader: Reader,
        writer: Writer | None,
        buffers: StepBuffers,
        direct: Direct | None,
    ) -> Iterator[Step]:
        """Do what could not be done together; yield each step when it is done."""
        for bundle in batch:
            if self._is_stopped():
                return
            if direct is not None and len(batch) > 1 and direct.carry_out([bundle]):
                yield from bundle
            else:
                yield from carry_out(bundle, reader, writer, buffers, self._on_drift)

    def _is_stopped(self) -> bool:
        return self.stop.is_set() or self.asked.is_set()

    def _next_batch(
        self, lane: Iterator[Sequence[Step]], most: int
    ) -> tuple[Iterator[Sequence[Step]], list[Sequence[Step]]]:
        """The next bundles of a lane, of a fresh one, or of one that another worker is in."""
        with self.steps_lock:
            lane, bundle = self._next(lane)
            batch: list[Sequence[Step]] = []
            nbytes = 0
            while bundle is not None:
                batch.append(bundle)
                nbytes += sum(map(_nbytes, bundle))
                if len(batch) == most or nbytes >= _BATCH_NBYTES:
                    break
                bundle = next(lane, None)
        return lane, batch

    def _next(
        self, lane: Iterator[Sequence[Step]]
    ) -> tuple[Iterator[Sequence[Step]], Sequence[Step] | None]:
        """The next bundle; None at the end."""
        while (bundle := next(lane, None)) is None:
            if lane in self.begun:
                self.begun.remove(lane)
            fresh = next(self.lanes, None)
            if fresh is not None:
                lane = iter(fresh)
                self.begun.append(lane)
            elif self.begun:
                lane = self.begun[0]
            else:
                break
        return lane, bundle

    def _on_drift(self, event: ReplicaDrift) -> None:
        with self.events_lock:
            self.observer.on_drift(event)

    def _finished(self, step: Step, read_nbytes: int) -> None:
        tensor = step.region.tensor
        with self.events_lock:
            self.done_steps += 1
            self.done_nbytes += _nbytes(step)
            self.read_nbytes += read_nbytes
            self.observer.on_step(
                StepFinished(self.done_steps, self.done_nbytes, self.read_nbytes, tensor)
            )


def _nbytes(step: Step) -> int:
    return step.numel * step.region.target_dtype.itemsize_nbytes
