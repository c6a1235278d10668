"""Prove the layouts of a catalog, and say in findings what does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.algebra.coverage import Covered, explain, prove
from restride.checkpoint.catalog import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.algebra.coverage import Verdict
    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, StateEntry

__all__ = ["master_findings", "prove_catalog"]


def prove_catalog(catalog: Catalog) -> Iterator[Finding]:
    """Prove that every tensor and every state is whole, and that every shard lies inside its file.

    Yields:
        One error for each layout that has a hole, a gap or an overlap, with the witness, one for
        each shard that reaches past the end of its file, and those of `master_findings`.

    Cost:
        One proof per different layout; never walks elements.
    """
    yield from master_findings(catalog)
    verdicts: dict[tuple[Layout, str], Verdict] = {}

    def proved(layout: Layout, side: str) -> Verdict:
        key = (layout, side)
        if key not in verdicts:
            verdicts[key] = prove(layout, side="full" if side == "full" else "both")
        return verdicts[key]

    for tensor in catalog.tensors:
        where = f"tensor {tensor.name!r}"
        verdict = proved(tensor.layout, "both")
        if not isinstance(verdict, Covered):
            yield _finding(where, tensor.layout, verdict)
        for state, entry in tensor.states.items():
            # What a file holds between the pieces (alignment, other tensors) is nobody's business.
            verdict = proved(entry.layout, "full")
            if not isinstance(verdict, Covered):
                yield _finding(f"{where}, state {state!r}", entry.layout, verdict)
            yield from _outside(catalog, entry, f"{where}, state {state!r}")


def master_findings(catalog: Catalog) -> Iterator[Finding]:
    """Tell of weights and master copies of which one is no floating-point number.

    Nothing rounds one to the other: each would be written as it is, under the name of a weight.
    """
    for tensor in catalog.tensors:
        master, weight = tensor.states.get("fp32"), tensor.states.get("weight")
        trained = tensor.trained_dtype if weight is None else weight.dtype
        if master is None or trained is None or not tensor.layout.full_numel:
            continue
        if (master.dtype.kind == "float") != (trained.kind == "float"):
            where = f"tensor {tensor.name!r}, state 'fp32'"
            what = f"the master copy is {master.dtype}, the parameter is trained in {trained}"
            yield Finding("error", "master-dtype", f"{where}: {what}", where)


def _finding(where: str, layout: Layout, verdict: Verdict) -> Finding:
    kind = type(verdict).__name__.lower()
    return Finding("error", kind, f"{where}: {explain(verdict, layout)}", where)


def _outside(catalog: Catalog, entry: StateEntry, where: str) -> Iterator[Finding]:
    for rank, (region, reach) in enumerate(zip(entry.regions, _reaches(entry.layout), strict=True)):
        needed = reach * entry.dtype.itemsize_nbytes
        if region is None:
            if needed:
                message = f"{where}: rank {rank} holds elements that no file has"
                yield Finding("error", "missing-shard", message, where)
            continue
        file = catalog.files[region.file]
        if region.start_nbytes + needed > file.nbytes:
            message = (
                f"{where}: the shard of rank {rank} ends at byte {region.start_nbytes + needed} "
                f"of {file.name}, which has {file.nbytes}"
            )
            yield Finding("error", "truncated", message, where)


def _reaches(layout: Layout) -> list[int]:
    """How many elements of each shard are needed: up to the last one that a piece touches."""
    reaches = [0] * layout.rank_count
    for piece in layout.all_pieces:
        stop = piece.shard_range.stop
        for rank in piece.ranks():
            reaches[rank] = max(reaches[rank], stop)
    return reaches
