"""Choose buffers and workers that fit a memory budget, and cut regions into steps to match."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import BudgetError
from restride.planning.plan import BUFFERS_PER_WORKER, Plan
from restride.planning.sharing import families

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.planning.plan import RegionPlan

__all__ = ["LEAST_BUFFERS_NBYTES", "sized"]

# Buffers that stay in the caches (1 to 2 MiB of a core's own on current servers, and its share of
# the common one) are several times faster than large ones. Two of them leave the core's own, and
# twice as many steps would cost more than that; below the smallest, steps cost more than bytes.
_LARGEST_BUFFER_NBYTES: Final = 1 << 20
_SMALLEST_BUFFER_NBYTES: Final = 1 << 12
LEAST_BUFFERS_NBYTES: Final = BUFFERS_PER_WORKER * _SMALLEST_BUFFER_NBYTES
# Differences, means and products are computed in float64, with more arrays at one time than a step
# has buffers; casts between the 16-bit types go by way of float32. Measured, see tests/executors.
_COMPARED_ITEMSIZE: Final = 16
_CAST_ITEMSIZE: Final = 4
# Python objects of a region and of an array, and of what `Pattern.walk_count` counts, in a pattern
# and in a step. Regions take 100 to 130 bytes, walks 290 and 200 of a flat partition: more with
# more loops, and while a pattern is made (tests/planning/test_memory.py).
_REGION_NBYTES: Final = 160
_ARRAY_NBYTES: Final = 96
_WALK_NBYTES: Final = 640
_STEP_WALK_NBYTES: Final = 448
# Of a region whose file a worker writes into, while the steps of all of them are put in order.
_LANE_NBYTES: Final = 112


def sized(regions: list[RegionPlan], budget_nbytes: int, workers: int) -> Plan:
    """Choose buffers and workers that fit the budget, and cut the regions to match.

    Args:
        regions: In target order; the list is changed.
        budget_nbytes: Most memory that plan and buffers may take together.
        workers: Most steps to run at one time; fewer where the budget is small.

    Raises:
        BudgetError: Not even one worker with the smallest buffers fits.
    """
    kept, step = _objects_nbytes(regions, workers)
    left, least = budget_nbytes - kept, LEAST_BUFFERS_NBYTES + step
    if left < least:
        raise BudgetError(needed_nbytes=kept + least, budget_nbytes=budget_nbytes)
    workers = min(workers, left // least)
    buffer = min(_LARGEST_BUFFER_NBYTES, (left // workers - step) // BUFFERS_PER_WORKER)
    buffer -= buffer % _SMALLEST_BUFFER_NBYTES
    sharing = bytearray(len(regions))
    for family in families(regions):
        for number in family if len(family) > 1 else ():
            sharing[number] = True
    known: dict[tuple[object, ...], int] = {}
    for number, region in enumerate(regions):
        shares = bool(sharing[number])
        key = id(region.pattern), region.source_dtype.name, region.target_dtype.name, shares
        numel = known.get(key)
        if numel is None:
            numel = known[key] = _step_numel(region, buffer, shares=shares)
        regions[number] = replace(region, step_numel=numel)
    steps = workers * step
    return Plan(tuple(regions), buffer, workers, kept + steps, steps)


def _objects_nbytes(regions: Sequence[RegionPlan], workers: int) -> tuple[int, int]:
    """Memory that regions take with their patterns, and that a worker takes for a bundle."""
    patterns = {id(region.pattern): region.pattern.walk_count for region in regions}
    bundle = max(
        (
            sum([regions[number].pattern.walk_count for number in family])
            for family in families(regions)
        ),
        default=0,
    )
    arrays = {id(region.array) for region in regions}
    kept = _REGION_NBYTES * len(regions) + _ARRAY_NBYTES * len(arrays)
    kept += _WALK_NBYTES * sum(patterns.values())
    lane = max(Counter(region.target_file for region in regions).values(), default=0)
    kept += _LANE_NBYTES * min(workers * lane, len(regions))
    return kept, _STEP_WALK_NBYTES * bundle


def _step_numel(region: RegionPlan, buffer_nbytes: int, *, shares: bool) -> int:
    pattern = region.pattern
    itemsize = max(region.source_dtype.itemsize_nbytes, region.target_dtype.itemsize_nbytes)
    if region.source_dtype != region.target_dtype:
        itemsize = max(itemsize, _CAST_ITEMSIZE)
    if not pattern.is_moved:
        itemsize = max(itemsize, _COMPARED_ITEMSIZE)
    most = buffer_nbytes // itemsize
    if shares and pattern.row is not None:
        # So that a buffer takes the rows of the source, which have parts of several targets.
        rows = buffer_nbytes // (pattern.row.source_numel * region.source_dtype.itemsize_nbytes)
        most = min(most, max(1, rows) * pattern.row.target_numel)
    # Cut where the outermost loops of the fills turn over, so that a step meets whole rows.
    pitch = max([pitch for pitch in pattern.pitches if pitch <= most], default=1)
    return most - most % pitch
