"""Compare and average the copies of replicated elements, whatever way they are cut."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct, field

from restride.arrays._blocks import Block, chunks, injective_parts, views
from restride.arrays._numpy import NUMPY
from restride.arrays.casts import largest_gap, round_once
from restride.errors import ReplicaError, UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from restride.arrays._blocks import Views
    from restride.arrays._frameworks import Array, Framework

__all__ = ["Drift", "Holding", "average", "find_drift"]

# The result of a comparison takes a byte an element: it should stay in the cache.
_COMPARED_NUMEL: Final = 1 << 18
_EXACT: Final = Fraction(1)
_WITH_A_MEAN: Final = ("float64", "float32", "float16", "bfloat16")


class Holding(Frozen):
    """Elements that one shard holds.

    Attributes:
        rank: Whose shard.
        shard: The shard.
        block: From the shard into the full tensor.
        scale: Exact factor: ``shard == full * scale``.
        is_overruled: Whether another rank was chosen: where that has the element, the copy here may
            be any.
    """

    rank: int
    shard: Array
    block: Block
    scale: Fraction
    is_overruled: bool = False


class Drift(Struct):
    """What differs between copies.

    Attributes:
        full_numel: Number of elements of the full tensor.
        different: For each full element, whether two copies of it differ; empty before the first.
        ranks: Ranks that hold such an element.
        largest: Largest absolute difference from the preferred copy, or None where the dtype has
            none. A number against a NaN counts as infinite.
        first_index: Lowest full element that differs.
        first: The preferred copy of that element, and the rank and value of another.
    """

    full_numel: int
    different: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    ranks: set[int] = field(default_factory=set)
    largest: float | None = None
    first_index: int = -1
    first: tuple[Any, int, Any] = (None, -1, None)
    owner: int = -1

    @property
    def numel(self) -> int:
        """Number of elements that differ."""
        return int(np.count_nonzero(self.different))

    def as_error(self, full_shape: tuple[int, ...]) -> ReplicaError:
        """What `rebuild` raises."""
        ranks = tuple(sorted(self.ranks))
        place = tuple(int(at) for at in np.unravel_index(self.first_index, full_shape))
        value, other_rank, other_value = self.first
        said = f"{value!r} on rank {self.owner} and {other_value!r} on rank {other_rank}"
        if repr(value) == repr(other_value):
            said += " (with different bits)"
        largest = "" if self.largest is None else f", the largest difference is {self.largest!r}"
        holders = (
            f"ranks {', '.join(map(str, ranks))} hold"
            if len(ranks) > 1
            else f"rank {ranks[0]} holds"
        )
        return ReplicaError(
            f"{holders} different copies of {self.numel} of {self.full_numel} elements, the "
            f"first at {place}: {said}{largest}",
            ranks=ranks,
            different_numel=self.numel,
            largest=self.largest,
            first_index=self.first_index,
            remedy="decide with replicas='first', 'mean' or the rank that counts",
        )


def find_drift(
    framework: Framework, holdings: Sequence[Holding], full: Array, *, is_checked: bool
) -> Drift | None:
    """Compare all copies of every element bit for bit.

    Exact copies are compared with the tensor that was put together from them. Scaled copies are
    compared among those of the same scale as they are, and with an exact copy by scaling that: the
    way back would be rounded.

    Args:
        framework: Whose arrays.
        holdings: All of them, preferred ones first. Of those that are overruled only elements
            count that no other holding has.
        full: The tensor put together from the preferred copies.
        is_checked: Whether copies that cannot be compared must be refused.

    Raises:
        UnsupportedError: Elements are held with different scales and nowhere exactly, and
            `is_checked`.
    """
    drift = Drift(_numel(full))
    settled = _settled(holdings, full)
    groups: dict[Fraction, list[Holding]] = {}
    for holding in holdings:
        groups.setdefault(holding.scale, []).append(holding)
    exact = _held(groups.get(_EXACT, ()), full) if len(groups) > 1 else None
    for scale, group in groups.items():
        reference = full
        if scale != 1:
            reference = framework.empty(full, tuple(full.shape))
            for holding in reversed(group):
                _write(framework, holding, reference)
        _compare(framework, group, reference, drift, settled)
        if scale != 1 and exact is not None and exact.any():
            _compare_scaled(framework, group, full, exact, drift, settled)
    if is_checked and exact is not None:
        _require_comparable(groups, full, exact, settled)
    if not drift.ranks:
        return None
    owners = np.full(drift.full_numel, -1, np.int64)
    for holding in reversed(holdings):
        for part in injective_parts(holding.block):
            _target(owners, part)[...] = holding.rank
    drift.owner = int(owners[drift.first_index])
    drift.ranks.update(owners[drift.different].tolist())
    return drift


def average(framework: Framework, holdings: Sequence[Holding], full: Array, drift: Drift) -> None:
    """Replace the elements of `full` that differ by the mean of their copies.

    Raises:
        UnsupportedError: The elements are no floats.
    """
    dtype_name = framework.dtype_name(full)
    if dtype_name not in _WITH_A_MEAN:
        raise UnsupportedError(
            f"copies of {dtype_name} elements differ and have no mean",
            remedy="choose replicas='first'",
        )
    total = np.zeros(drift.full_numel)
    count = np.zeros(drift.full_numel, np.int64)
    exact = _held((holding for holding in holdings if holding.scale == 1), full)
    for holding in holdings:
        for part in injective_parts(holding.block):
            for pair in views(framework, holding.shard, full, part):
                values = framework.values(pair.source)
                counted = np.ones(values.shape, np.bool_)
                if holding.scale != 1:
                    values = values * holding.scale.denominator / holding.scale.numerator
                    counted = ~_place(exact, pair)
                with np.errstate(all="ignore"):
                    np.add(_place(total, pair), values, out=_place(total, pair), where=counted)
                np.add(_place(count, pair), 1, out=_place(count, pair), where=counted)
    with np.errstate(all="ignore"):
        mean = total[drift.different] / count[drift.different]
    words = round_once(mean, _Named(dtype_name))
    framework.put(full, np.flatnonzero(drift.different), words)


def _compare(
    framework: Framework,
    group: Sequence[Holding],
    reference: Array,
    drift: Drift,
    settled: NDArray[np.bool_] | None,
) -> None:
    for number, holding in enumerate(group):
        if number == 0 and len(tuple(injective_parts(holding.block))) == 1:
            continue  # the reference is made of it
        for pair in views(framework, holding.shard, reference, holding.block):
            for chunk in chunks(tuple(pair.source.shape), _COMPARED_NUMEL):
                mine, other = pair.target[chunk], pair.source[chunk]
                where = framework.differing(mine, other)
                if where is not None and holding.is_overruled and settled is not None:
                    where &= ~_place(settled, pair)[chunk]
                if where is not None and where.any():
                    indices = _flat_indices(where, pair, chunk)
                    _record(framework, drift, holding.rank, mine, other, where, indices)


def _compare_scaled(
    framework: Framework,
    group: Sequence[Holding],
    full: Array,
    exact: NDArray[np.bool_],
    drift: Drift,
    settled: NDArray[np.bool_] | None,
) -> None:
    for holding in group:
        for pair in views(framework, holding.shard, full, holding.block):
            expected = framework.scaled(pair.target, holding.scale)
            where = framework.differing(expected, pair.source)
            if where is not None:
                where &= _place(exact, pair)
                if holding.is_overruled and settled is not None:
                    where &= ~_place(settled, pair)
                if where.any():
                    indices = _flat_indices(where, pair, ())
                    _record(framework, drift, holding.rank, expected, pair.source, where, indices)


def _require_comparable(
    groups: dict[Fraction, list[Holding]],
    full: Array,
    exact: NDArray[np.bool_],
    settled: NDArray[np.bool_] | None,
) -> None:
    scales = np.zeros(exact.size, np.int64)
    for scale, group in groups.items():
        if scale != 1:
            scales += _held((h for h in group if not h.is_overruled), full)
            overruled = _held((h for h in group if h.is_overruled), full)
            scales += overruled if settled is None else overruled & ~settled
    alone = (scales > 1) & ~exact
    if alone.any():
        raise UnsupportedError(
            f"{np.count_nonzero(alone)} elements are held with different scales and nowhere "
            "exactly, so their copies cannot be compared bit for bit",
            remedy="decide with replicas='first' or 'mean', or one rank of them",
        )


def _record(
    framework: Framework,
    drift: Drift,
    rank: int,
    mine: Array,
    other: Array,
    where: NDArray[np.bool_],
    indices: NDArray[np.intp],
) -> None:
    if not drift.ranks:
        drift.different = np.zeros(drift.full_numel, np.bool_)
    drift.different[indices] = True
    drift.ranks.add(rank)
    lowest = int(np.argmin(indices))
    if drift.first_index < 0 or indices[lowest] < drift.first_index:
        drift.first_index = int(indices[lowest])
        at = tuple(int(coordinates[lowest]) for coordinates in np.nonzero(where))
        drift.first = (mine[at].item(), rank, other[at].item())
    if framework.is_ordered(mine):
        gap = largest_gap(framework.values(mine)[where], framework.values(other)[where])
        drift.largest = max(drift.largest or 0.0, gap)


def _flat_indices(
    where: NDArray[np.bool_], pair: Views, chunk: tuple[slice, ...]
) -> NDArray[np.intp]:
    base = pair.place.base + sum(
        part.start * stride for part, stride in zip(chunk, pair.place.strides, strict=False)
    )
    indices = np.full(np.count_nonzero(where), base)
    for coordinates, stride in zip(np.nonzero(where), pair.place.strides, strict=True):
        indices += coordinates * stride
    return indices


def _settled(holdings: Sequence[Holding], full: Array) -> NDArray[np.bool_] | None:
    """For each full element, whether a rank that was chosen has it; None where none was."""
    if not any(holding.is_overruled for holding in holdings):
        return None
    return _held((holding for holding in holdings if not holding.is_overruled), full)


def _held(holdings: Iterable[Holding], full: Array) -> NDArray[np.bool_]:
    """For each full element, whether one of the holdings has it."""
    held = np.zeros(_numel(full), np.bool_)
    for holding in holdings:
        for part in injective_parts(holding.block):
            _target(held, part)[...] = True
    return held


def _write(framework: Framework, holding: Holding, reference: Array) -> None:
    for part in reversed(tuple(injective_parts(holding.block))):
        for pair in views(framework, holding.shard, reference, part):
            framework.copy(pair.target, pair.source)


def _target(flat: NDArray[Any], part: Block) -> NDArray[Any]:
    return NUMPY.view(flat, part.target.base, part.extents, part.target.strides)


def _place(flat: NDArray[Any], pair: Views) -> NDArray[Any]:
    return NUMPY.view(flat, pair.place.base, tuple(pair.source.shape), pair.place.strides)


def _numel(full: Array) -> int:
    return int(np.prod(tuple(full.shape), dtype=np.int64))


class _Named(Frozen):
    name: str
