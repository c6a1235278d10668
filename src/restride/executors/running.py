"""Run a plan over the files of a catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.executors.sources import CatalogReader
from restride.executors.streaming import StreamingExecutor
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.executors._copying import Writer
    from restride.executors.events import Observer
    from restride.planning.plan import Plan

__all__ = ["run_plan"]


def run_plan(catalog: Catalog, plan: Plan, writer: Writer | None, observer: Observer) -> int:
    """Execute a plan, and make sure that no source file changed meanwhile.

    Args:
        catalog: What the plan reads.
        plan: What to do.
        writer: Target files; None compares the replicas and writes nothing.
        observer: Receives steps and drift. Beginning and end are for who knows what else there is.

    Returns:
        Bytes that were read.

    Raises:
        ExecutionError: A file cannot be read or written, or changed since it was opened.
        ReplicaError: Replicas differ and the plan says to check.
    """
    with FilePool() as pool:
        reader = CatalogReader(catalog, pool)
        read_nbytes = StreamingExecutor().execute(plan, reader, writer, observer)
    reader.require_unchanged()
    return read_nbytes
