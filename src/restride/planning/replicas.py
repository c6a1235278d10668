"""Which source ranks can fill which part of a target shard.

`compose` states the whole relation, every replica included. A plan needs each target address once,
so the choices must be laid side by side first: a *block* is a set of target addresses together with
every way to fill it. Blocks of one target rank are disjoint, whatever way the replicas were cut.
"""

from __future__ import annotations

from itertools import chain, pairwise, product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from restride.algebra.coverage import sweep
from restride.algebra.walks import Walk, coalesce, join
from restride.errors import PlanError, UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from fractions import Fraction

    from restride.algebra.transfer import Transfer, TransferAxis, Transfers

__all__ = ["Block", "Way", "blocks_of_target"]

# A shard that holds one element thousands of times is no layout anybody trains with.
_MOST_DUPLICATES = 64

_Lattice: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]


class Way(Frozen):
    """One way to fill a block.

    Attributes:
        ranks: Source ranks that hold these elements at the same shard addresses.
        walks: Where they are: walks over (target shard, source shard, full) addresses.
        scale: Exact factor: ``target == source * scale``.
    """

    ranks: Sequence[int]
    walks: tuple[Walk, ...]
    scale: Fraction


class Block(Frozen):
    """Target addresses that have the same choice of sources.

    Attributes:
        numel: How many target addresses.
        ways: At least one way to fill them; together they name every holder.
    """

    numel: int
    ways: tuple[Way, ...]

    @property
    def holders(self) -> tuple[int, ...]:
        """Every source rank that holds the elements, sorted, once each."""
        return tuple(sorted({rank for way in self.ways for rank in way.ranks}))


def blocks_of_target(relation: Transfers, target_rank: int) -> tuple[Block, ...]:
    """Lay the sources of one target shard side by side.

    Returns:
        Disjoint blocks that together hold every target address that the relation reaches.

    Raises:
        UnsupportedError: A source shard holds the same element too many times.

    Cost:
        O(transfers of the rank * source ranks that split them). Never walks elements.
    """
    by_lattice: dict[_Lattice, list[Way]] = {}
    for transfer in relation.at_target(target_rank):
        for way in chain.from_iterable(map(_apart, _ways(transfer))):
            by_lattice.setdefault(_target_lattice(way.walks[0]), []).append(way)
    numel = relation.target.shard_numel(target_rank)
    blocks = [Block(_numel(lattice), tuple(ways)) for lattice, ways in by_lattice.items()]
    if _may_touch(by_lattice):
        blocks = list(_disjoint(by_lattice, numel))
    return tuple(sorted(blocks, key=lambda block: block.ways[0].walks[0].bases))


def _ways(transfer: Transfer) -> Iterator[Way]:
    """Tell apart the axes of one transfer: a choice of rank, a split over ranks, or data."""
    choice: list[TransferAxis] = []
    split: list[TransferAxis] = []
    copies: list[TransferAxis] = []
    elements: list[TransferAxis] = []
    for axis in transfer.axes:
        if axis.source_rank_stride:
            (split if axis.target_shard_stride else choice).append(axis)
        else:
            (elements if axis.target_shard_stride else copies).append(axis)
    if prod(axis.extent for axis in copies) > _MOST_DUPLICATES:
        raise UnsupportedError(
            f"a source shard holds an element {prod(axis.extent for axis in copies)} times, "
            f"more than the {_MOST_DUPLICATES} that are compared"
        )
    digits = coalesce(
        tuple(
            (axis.extent, axis.target_shard_stride, axis.source_shard_stride, axis.full_stride)
            for axis in sorted(elements, key=lambda axis: -axis.target_shard_stride)
        )
    )
    for steps in product(*(range(axis.extent) for axis in [*split, *copies])):
        moved = list(zip(steps, [*split, *copies], strict=True))
        bases = (
            transfer.target_shard_base + sum(i * axis.target_shard_stride for i, axis in moved),
            transfer.source_shard_base + sum(i * axis.source_shard_stride for i, axis in moved),
            transfer.full_base + sum(i * axis.full_stride for i, axis in moved),
        )
        rank = transfer.source_rank_base + sum(i * axis.source_rank_stride for i, axis in moved)
        yield Way(_choices(rank, choice), (Walk(bases, digits),), transfer.scale)


def _apart(way: Way) -> Iterator[Way]:
    """Take a way apart whose walk may stand at one target address twice.

    The relation has two pairs for an element that a source shard holds twice, and nothing keeps
    them from being written as one walk.
    """
    (walk,) = way.walks
    digits = sorted(walk.digits, key=lambda digit: digit[1])
    reach = 0
    for place, (extent, stride, *_) in enumerate(digits):
        if stride <= reach:
            # The loop with the fewest steps of those that reach over each other.
            least = min(digits[: place + 1])
            if least[0] > _MOST_DUPLICATES:
                break
            others = tuple(digit for digit in walk.digits if digit is not least)
            for step in range(least[0]):
                moved = zip(walk.bases, least[1:], strict=True)
                bases = tuple(base + step * stride for base, stride in moved)
                yield from _apart(Way(way.ranks, (Walk(bases, others),), way.scale))
            return
        reach += (extent - 1) * stride
    yield way


def _choices(base: int, axes: list[TransferAxis]) -> Sequence[int]:
    if not axes:
        return (base,)
    if len(axes) == 1:
        extent, stride = axes[0].extent, axes[0].source_rank_stride
        return range(base, base + extent * stride, stride)
    steps = product(
        *(range(0, a.extent * a.source_rank_stride, a.source_rank_stride) for a in axes)
    )
    return tuple(sorted({base + sum(step) for step in steps}))


def _target_lattice(walk: Walk) -> _Lattice:
    digits = sorted(((digit[0], digit[1]) for digit in walk.digits), key=lambda d: -d[1])
    return walk.bases[0], tuple((d[0], d[1]) for d in coalesce(tuple(digits)))


def _numel(lattice: _Lattice) -> int:
    return prod(extent for extent, _ in lattice[1])


def _may_touch(lattices: Iterable[_Lattice]) -> bool:
    """Whether lattices may share an address, or one of them has one twice, cheaply: by bounds."""
    spans = []
    for base, digits in lattices:
        reach = 0
        for extent, stride in reversed(digits):
            if stride <= reach:
                return True
            reach += (extent - 1) * stride
        spans.append((base, base + reach))
    return any(high >= low for (_, high), (low, _) in pairwise(sorted(spans)))


def _disjoint(by_lattice: dict[_Lattice, list[Way]], numel: int) -> Iterator[Block]:
    """Cut overlapping blocks into atoms that have one set of ways each."""
    lattices = list(by_lattice)
    tagged = [(base, digits, tag) for tag, (base, digits) in enumerate(lattices)]
    for atom in sweep(tagged, numel):
        if len(set(atom.tags)) != len(atom.tags):
            raise PlanError(
                f"a source shard holds the element of target shard index {atom.base} more than "
                f"{_MOST_DUPLICATES} times",
                remedy="write the layout with one piece for each copy",
            )
        lattice = Walk((atom.base,), tuple(atom.digits))
        ways = tuple(
            Way(way.ranks, _restricted(lattice, way.walks), way.scale)
            for tag in sorted(atom.tags)
            for way in by_lattice[lattices[tag]]
        )
        yield Block(prod(extent for extent, _ in atom.digits), ways)


def _restricted(lattice: Walk, walks: tuple[Walk, ...]) -> tuple[Walk, ...]:
    return tuple(part for walk in walks for part in join(lattice, walk))
