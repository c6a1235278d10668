"""Carry out a plan in one thread, one step after the other: the reference executor."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from restride.executors._copying import StepBuffers, carry_out
from restride.executors.events import StepFinished

if TYPE_CHECKING:
    from restride.executors._copying import Reader, Writer
    from restride.executors.events import Observer
    from restride.planning.plan import Plan

__all__ = ["SerialExecutor"]


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
        for bundle in chain.from_iterable(plan.lanes()):
            for step in carry_out(bundle, reader, writer, buffers, observer.on_drift):
                region = step.region
                done_steps += 1
                done_nbytes += step.numel * region.target_dtype.itemsize_nbytes
                observer.on_step(
                    StepFinished(done_steps, done_nbytes, buffers.read_nbytes, region.tensor)
                )
        return buffers.read_nbytes
