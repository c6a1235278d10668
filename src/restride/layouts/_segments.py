"""Find the segments of a cut: which runs of rows were cut or held whole, each on its own."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from restride.layouts._runs import RowCut

__all__ = ["read_segments"]

# More parameters than this are fused by nobody; a table of blocks has as many runs as it likes.
_MOST_SEGMENTS: Final = 16


def read_segments(cut: RowCut) -> list[tuple[int, tuple[int, ...] | None]] | None:
    """Find the segments that give a cut, as `restride.layouts.segmented` takes them.

    The first rank that holds anything begins every segment that is cut, and the last one ends it;
    a segment that is whole on every rank is in the rows that all of them have in common.

    Returns:
        (rows, widths of each rank, or None where all hold it whole) of every segment, or None where
        there is no such description.
    """
    holders = [rank for rank, runs in enumerate(cut.runs) if runs]
    if not holders:
        return None
    bounds = {0, cut.rows}
    bounds |= {first for first, _ in cut.runs[holders[0]]}
    bounds |= {first + count for first, count in cut.runs[holders[-1]]}
    bounds |= {bound for run in _common(cut) for bound in run}
    if len(bounds) > _MOST_SEGMENTS + 1:
        return None
    ordered = sorted(bounds)
    segments: list[tuple[int, tuple[int, ...] | None]] = []
    for start, stop in pairwise(ordered):
        rows = stop - start
        widths = tuple(cut.held(rank, start, stop) for rank in range(len(cut.runs)))
        if all(width == rows for width in widths):
            segments.append((rows, None))
        elif sum(widths) == rows:
            segments.append((rows, widths))
        else:
            return None
    return segments if any(widths is not None for _, widths in segments) else None


def _common(cut: RowCut) -> list[tuple[int, int]]:
    """Runs of rows (start, stop) that every rank holds."""
    common = [(0, cut.rows)]
    for runs in cut.runs:
        held = [(first, first + count) for first, count in runs]
        common = [
            (max(start, first), min(stop, last))
            for start, stop in common
            for first, last in held
            if max(start, first) < min(stop, last)
        ]
    return common
