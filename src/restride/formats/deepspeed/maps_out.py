"""Layouts as DeepSpeed's affine maps, format version 1, and whole documents of them.

The peer knows no rank axis, no padding and no loop that is not a dimension. A layout is written as
the boxes of each rank (`restride.algebra.boxes`), each with exactly the ranks that hold
it, and refused with the reason where the peer has no words for it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Final

from restride.algebra.boxes import BoxCutter, BoxWalk, row_major
from restride.algebra.coverage import holders, replication, require_covered
from restride.algebra.intersect import intersect
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._patterns import literal_name, parse_pattern
from restride.formats.deepspeed.maps import MAP_VERSION, exact_scale, read_affine_maps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.boxes import Box
    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import MeshLike

__all__ = ["MOST_BOXES", "from_affine_maps", "map_of_boxes", "to_affine_map", "to_affine_maps"]

MOST_BOXES: Final = 4096
"""Boxes of all ranks that DeepSpeed's own planner takes (`max_pieces_per_map`)."""


def to_affine_map(layout: Layout, *, most_boxes: int = MOST_BOXES) -> dict[str, object]:
    """Write a layout as DeepSpeed's affine map, as it stands in a checkpoint.

    Args:
        layout: A whole layout. Its ranks become the ranks of the map, whatever its mesh names.
        most_boxes: Boxes of all ranks that are allowed.

    Returns:
        ``{"logical_shape": [...], "ranks": {rank: {"shard_shape": [...], "pieces": [...]}}}``, of
        plain integers, lists and floats. Shards with as many dimensions as the tensor are boxes
        with row-major strides; others (flat shards) are runs of elements, which DeepSpeed rebuilds
        and extracts but does not plan with.

    Raises:
        CoverageError: The layout is not whole.
        UnsupportedError: The map has no words for it: padding, units that are no elements, a scale
            that is no float, or more than `most_boxes` boxes.

    Cost:
        O(boxes * ranks * log). Never walks elements.

    Examples:
        >>> from restride.layouts import split
        >>> stored = to_affine_map(split((2, 6), mesh={"tp": 3}, dim=1))
        >>> stored["ranks"][2]["pieces"]
        [{'shape': [2, 2], 'source': [4, [6, 1]], 'dest': [0, [2, 1]], 'locations': [2]}]
    """
    _require_words(layout)
    require_covered(layout)
    boxes: list[Sequence[Box]] = []
    for rank, walks in enumerate(_walks_by_rank(layout)):
        try:
            boxes.append(BoxCutter(*_frame(layout, rank), most_boxes).cut(walks))
        except UnsupportedError as error:
            raise error.located(f"rank {rank}") from None
        if sum(map(len, boxes)) > most_boxes:
            raise UnsupportedError(
                f"the shards of ranks 0 to {rank} of {layout.rank_count} are "
                f"{sum(map(len, boxes))} boxes, {most_boxes} are allowed",
                remedy="raise most_boxes= if nothing but rebuilding and extracting reads the map",
            )
    return map_of_boxes(layout, boxes)


def to_affine_maps(layouts: Mapping[str, Layout]) -> dict[str, object]:
    r"""Write the layouts of many parameters as one document: ``affine_map`` of a checkpoint.

    Args:
        layouts: Layout of each parameter, by name.

    Returns:
        ``{"version": 1, "params": {"^escaped name$": map}}``. Parameters of one layout share one
        map object; copy before changing one.

    Raises:
        CoverageError: As for `to_affine_map`, with the name of the parameter.
        UnsupportedError: As for `to_affine_map`, with the name of the parameter.

    Examples:
        >>> from restride.layouts import replicated
        >>> list(to_affine_maps({"ln_f.bias": replicated((4,), mesh={"tp": 2})})["params"])
        ['^ln_f\\.bias$']
    """
    known: dict[Layout, dict[str, object]] = {}
    params: dict[str, object] = {}
    for name, layout in layouts.items():
        if layout not in known:
            try:
                known[layout] = to_affine_map(layout)
            except RestrideError as error:
                raise error.located(f"parameter {name!r}") from None
        params[f"^{re.escape(name)}$"] = known[layout]
    return {"version": MAP_VERSION, "params": params}


def from_affine_maps(
    stored: Mapping[str, object], mesh: MeshLike | None = None
) -> dict[str, Layout]:
    r"""Read a whole document of affine maps: ``universal_checkpoint_info["affine_map"]``.

    Args:
        stored: ``{"version": 1, "params": {pattern: map}}``, also as it comes back from JSON.
        mesh: Names of the ranks, by default one axis ``tp`` of as many ranks as the maps have.

    Returns:
        A proved layout for each parameter, by name.

    Raises:
        FormatError: The document is not one.
        CorruptError: A map lies (see `from_affine_map`), two maps are for one name, or maps have
            different numbers of ranks.
        UnsupportedError: It is of a version from the future, or a pattern matches more than one
            name.

    Examples:
        >>> from restride.layouts import split
        >>> layouts = {"h.0.up": split((4, 2), mesh={"tp": 2})}
        >>> from_affine_maps(to_affine_maps(layouts)) == layouts
        True
    """
    document = Field(dict(stored), "affine maps")  # type: ignore[arg-type]  # checked as it is read
    ranks = as_mesh(mesh) if mesh is not None else as_mesh({"tp": _rank_count(document)})
    found: dict[str, Layout] = {}
    for pattern, layout in read_affine_maps(document, ranks):
        name = literal_name(pattern)
        if name is None:
            parse_pattern(pattern)  # refuses what is none
            raise UnsupportedError(
                f"the pattern {pattern!r} may match more than one parameter",
                where=document.where,
                remedy="match it with the names of the checkpoint: restride.open does",
            )
        if name in found:
            raise CorruptError(f"has two maps for parameter {name!r}", where=document.where)
        found[name] = layout
    return found


def map_of_boxes(layout: Layout, boxes: Sequence[Sequence[Box]]) -> dict[str, object]:
    """Write boxes of every rank in the stored form."""
    ranks: dict[int, object] = {}
    for rank, of_rank in enumerate(boxes):
        full_shape, shard_shape = _frame(layout, rank)
        full, shard = row_major(full_shape), row_major(shard_shape)
        ranks[rank] = {
            "shard_shape": list(layout.shard_shape(rank)),
            "pieces": [_stored_box(box, full, shard) for box in of_rank],
        }
    return {"logical_shape": list(layout.full_shape), "ranks": ranks}


def _stored_box(
    box: Box, full_strides: Sequence[int], shard_strides: Sequence[int]
) -> dict[str, object]:
    stored: dict[str, object] = {
        "shape": list(box.extents),
        "source": [_flat(box.full_start, full_strides), list(full_strides)],
        "dest": [_flat(box.shard_start, shard_strides), list(shard_strides)],
        "locations": list(box.ranks),
    }
    if box.scale != 1:
        stored["scale"] = float(box.scale)
    return stored


def _flat(start: Sequence[int], strides: Sequence[int]) -> int:
    return sum(at * stride for at, stride in zip(start, strides, strict=True))


def _rank_count(document: Field) -> int:
    first = next(document.at("params").items(), None)
    return max(1, len(list(first[1].at("ranks").numbered()))) if first else 1


def _require_words(layout: Layout) -> None:
    """Refuse what the format cannot say."""
    if layout.padding:
        count = sum(padding.as_piece().numel for padding in layout.padding)
        raise UnsupportedError(
            f"the shards have {count} padded addresses, and in an affine map every shard address "
            "holds an element",
            remedy="write the layout of the shards without their padding",
        )
    if layout.unit_bits is not None:
        raise UnsupportedError(
            f"units of {layout.unit_bits} bits are counted, and an affine map counts elements",
            remedy="describe the tensor in whole elements of its stored dtype",
        )
    for scale in {piece.scale for piece in layout.all_pieces}:
        if not _is_float(scale):
            raise UnsupportedError(
                f"the scale {scale} is no floating-point number, and an affine map stores one: "
                "DeepSpeed would multiply by the nearest, which changes values",
                remedy="use a number of ranks that is a power of two, or fold the scale into the "
                "values and store the layout without it",
            )


def _is_float(scale: Fraction) -> bool:
    """Whether a float says this very factor, and is read back as it."""
    try:
        nearest = float(scale)
    except OverflowError:
        return False
    return Fraction(nearest) == scale == exact_scale(nearest)


def _frame(layout: Layout, rank: int) -> tuple[Shape, Shape]:
    """Shapes in which boxes of a rank are cut: flat ones where dimensions do not correspond."""
    shard = layout.shard_shape(rank)
    if len(shard) == len(layout.full_shape):
        return layout.full_shape, shard
    return (layout.full_numel,), (prod(shard),)


def _walks_by_rank(layout: Layout) -> Iterator[list[BoxWalk]]:
    """Walks of every rank, each over elements that the same ranks hold."""
    if not replication(layout):
        for rank in range(layout.rank_count):
            yield [_walk(piece, (rank,)) for piece in layout.pieces(rank)]
        return
    held = holders(layout)
    regions = [
        (
            region.ranks,
            Piece(
                tuple(Axis(extent, full, 0, 1) for extent, full in region.axes), region.full_base
            ),
        )
        for region in held
    ]
    for rank in range(layout.rank_count):
        pieces = layout.pieces(rank)
        if len(held) == 1:
            yield [_walk(piece, held[0].ranks) for piece in pieces]
            continue
        yield [
            walk
            for piece in pieces
            for ranks, region in regions
            if rank in ranks
            for walk in _common(piece, region, ranks)
        ]


def _walk(piece: Piece, ranks: tuple[int, ...]) -> BoxWalk:
    steps = tuple((axis.extent, axis.full_stride, axis.shard_stride) for axis in piece.axes)
    return BoxWalk(steps, piece.full_base, piece.shard_base, ranks, piece.scale)


def _common(piece: Piece, region: Piece, ranks: tuple[int, ...]) -> Iterator[BoxWalk]:
    """The part of a piece of one rank that lies in a region of equal holders."""
    for transfer in intersect(region, piece):
        steps = tuple((a.extent, a.full_stride, a.source_shard_stride) for a in transfer.axes)
        yield BoxWalk(steps, transfer.full_base, transfer.source_shard_base, ranks, piece.scale)
