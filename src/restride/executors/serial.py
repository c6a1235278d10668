"""Carry out a plan in one thread, one step after the other: the reference executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from restride.executors._copying import Reader, StepBuffers, fill_step
from restride.executors.events import StepFinished

if TYPE_CHECKING:
    from restride.executors.events import Observer
    from restride.planning.plan import Plan

__all__ = ["SerialExecutor", "Writer"]


class Writer(Protocol):
    """Positioned writes into the target files."""

    def write_from(self, file: int, start_nbytes: int, buffer: memoryview, /) -> None:
        """Write `buffer` into target file number `file`, starting at that byte."""


class SerialExecutor:
    """Runs the steps in order. Simple, and the oracle for all others."""

    def execute(self, plan: Plan, reader: Reader, writer: Writer | None, observer: Observer) -> int:
        """Run every step.

        Args:
            plan: What to do.
            reader: Source files, by the numbers of the plan.
            writer: Target files; None compares the replicas and writes nothing.
            observer: Receives an event after each step.

        Returns:
            Bytes read.

        Raises:
            ReplicaError: Replicas differ and the policy is to check.
            ExecutionError: Reading or writing failed.
        """
        buffers = StepBuffers(plan)
        done_steps = done_nbytes = 0
        for region in plan.regions:
            for step in region.steps():
                if step.fills or writer is not None:
                    filled = fill_step(step, reader, buffers, observer.on_drift)
                    if writer is not None:
                        writer.write_from(region.target_file, step.target_start_nbytes, filled.data)
                done_steps += 1
                done_nbytes += step.numel * region.target_dtype.itemsize_nbytes
                observer.on_step(
                    StepFinished(done_steps, done_nbytes, buffers.read_nbytes, region.tensor)
                )
        return buffers.read_nbytes
