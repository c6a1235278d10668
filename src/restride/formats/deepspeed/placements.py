"""AutoEP's placement descriptors, both ways: which experts are on which expert-parallel rank.

A descriptor (deepspeed 0.19.8 `checkpoint/autoep_affine.py`, version 1) lists for each rank its
experts in the order of its shard. The affine map beside it is compared by the peer number for
number with the one that it lowers the descriptor to, so `to_expert_map` cuts as the peer does.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from restride.algebra.boxes import Box
from restride.errors import CorruptError, LayoutError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed.maps_out import map_of_boxes, to_affine_map
from restride.layouts.gathered import experts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike

__all__ = [
    "PLACEMENT_VERSION",
    "from_expert_placement",
    "read_placement",
    "to_expert_map",
    "to_expert_placement",
]

PLACEMENT_VERSION: Final = 1
"""Version of the descriptors that is understood."""

_KEYS: Final = frozenset({"version", "num_experts", "ep_size", "ranks"})
_ROW_KEYS: Final = frozenset({"rank", "experts"})


def from_expert_placement(
    stored: Mapping[str, object], shape: Sequence[int], *, mesh: MeshLike | None = None
) -> Layout:
    """Turn a placement descriptor into the layout of one stacked parameter.

    Args:
        stored: ``{"version": 1, "num_experts": ..., "ep_size": ..., "ranks": [...]}``.
        shape: Shape of the stacked parameter; dimension 0 counts the experts.
        mesh: Names of the ranks, by default one axis ``ep``.

    Raises:
        FormatError: The descriptor is not one.
        CorruptError: It contradicts itself, or the shape is of another number of experts.
        UnsupportedError: It is of another version, or says what is not understood.

    Examples:
        >>> ranks = [{"rank": 0, "experts": [0, 2]}, {"rank": 1, "experts": [3, 1]}]
        >>> stored = {"version": 1, "num_experts": 4, "ep_size": 2, "ranks": ranks}
        >>> layout = from_expert_placement(stored, (4, 6))
        >>> layout.shard_shape(1), to_expert_placement(layout) == stored
        ((2, 6), True)
    """
    field = Field(dict(stored), "expert placement")  # type: ignore[arg-type]  # checked as read
    count, placement = read_placement(field)
    if not shape or shape[0] != count:
        raise CorruptError(
            f"is for {count} experts, the stacked parameter has shape {tuple(shape)}",
            where=field.where,
        )
    try:
        return experts(shape, mesh=mesh or {"ep": len(placement)}, placement=placement)
    except LayoutError as error:
        raise CorruptError(error.problem, where=field.where) from None


def read_placement(stored: Field) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Read the number of experts, and the experts of each rank, of a descriptor inside a file.

    Raises:
        FormatError: It is not one.
        CorruptError: Its ranks are not those that it says there are.
        UnsupportedError: It is of another version, or says what is not understood.
    """
    version = stored.at("version").integer()
    if version != PLACEMENT_VERSION:
        raise UnsupportedError(
            f"is an expert placement of version {version}, version {PLACEMENT_VERSION} is "
            "understood",
            where=stored.where,
        )
    _refuse_unknown(stored, _KEYS)
    count = stored.at("num_experts").integer(at_least=1)
    ranks = stored.at("ep_size").integer(at_least=1)
    rows = stored.at("ranks").elements()
    held: dict[int, tuple[int, ...]] = {}
    for row in rows:
        _refuse_unknown(row, _ROW_KEYS)
        held[row.at("rank").integer()] = row.at("experts").integers()
    if len(rows) != ranks or sorted(held) != list(range(ranks)):
        raise CorruptError(
            f"has {len(rows)} entries for ranks {sorted(held)[:8]}, {ranks} ranks are to be placed",
            where=stored.where,
        )
    return count, tuple(held[rank] for rank in range(ranks))


def to_expert_placement(layout: Layout) -> dict[str, object]:
    """Write the placement descriptor of a layout of stacked experts.

    Args:
        layout: Layout in which every rank holds whole experts; dimension 0 counts them.

    Raises:
        CoverageError: The layout is not whole.
        UnsupportedError: A rank holds a part of an expert, or anything that has no affine map.

    Examples:
        >>> from restride.layouts import experts
        >>> to_expert_placement(experts((4, 6), mesh={"ep": 2}))["ranks"][1]
        {'rank': 1, 'experts': [2, 3]}
    """
    table = _table(layout)
    return {
        "version": PLACEMENT_VERSION,
        "num_experts": layout.full_shape[0],
        "ep_size": layout.rank_count,
        "ranks": [{"rank": rank, "experts": list(held)} for rank, held in enumerate(table)],
    }


def to_expert_map(layout: Layout) -> dict[str, object]:
    """Write the affine map of a layout of stacked experts as DeepSpeed lowers its descriptor.

    Runs of neighbouring experts that one rank alone holds are one box; an expert that several ranks
    hold is a box of its own.

    Raises:
        CoverageError: The layout is not whole.
        UnsupportedError: As for `to_expert_placement`.
    """
    table = _table(layout)
    inner = layout.full_shape[1:]
    zeros = (0,) * len(inner)
    holders: dict[int, tuple[int, ...]] = {}
    for rank, held in enumerate(table):
        for expert in held:
            holders[expert] = (*holders.get(expert, ()), rank)
    boxes: list[list[Box]] = []
    for held in table:
        # A new run wherever the next expert is not the neighbour, or is shared.
        starts = [0] if held else []
        for place, (before, expert) in enumerate(pairwise(held), 1):
            shared = len(holders[before]) > 1 or len(holders[expert]) > 1
            if shared or expert != before + 1:
                starts.append(place)
        boxes.append(
            [
                Box(
                    (held[start], *zeros),
                    (start, *zeros),
                    (stop - start, *inner),
                    holders[held[start]],
                    Fraction(1),
                )
                for start, stop in pairwise([*starts, len(held)])
            ]
        )
    return map_of_boxes(layout, boxes)


def _table(layout: Layout) -> list[list[int]]:
    """Experts of each rank in the order of its shard."""
    if not layout.full_shape:
        raise UnsupportedError("a scalar is no stack of experts")
    stored = to_affine_map(layout)
    numel = layout.full_numel // layout.full_shape[0] if layout.full_shape[0] else 0
    ranks = Field(stored, "layout").at("ranks")  # type: ignore[arg-type]  # plain values
    table: list[list[int]] = []
    for rank, entry in ranks.numbered():
        held: list[int] = []
        for box in entry.at("pieces").elements():
            count, *inner = box.at("shape").shape()
            first = box.at("source").elements()[0].integer()
            if tuple(inner) != layout.full_shape[1:] or first % numel or box.get("scale"):
                raise UnsupportedError(
                    f"rank {rank} holds a block of shape {(count, *inner)} of a stack of shape "
                    f"{layout.full_shape}: a placement names whole experts",
                    remedy="write the affine map of the layout instead",
                )
            held.extend(range(first // numel, first // numel + count))
        table.append(held)
    return table


def _refuse_unknown(stored: Field, known: frozenset[str]) -> None:
    for key, _ in list(stored.items()):
        if key not in known:
            raise UnsupportedError(f"has a key {key!r} that is not understood", where=stored.where)
