"""DeepSpeed's affine maps as layouts.

A map (deepspeed 0.19.8 `checkpoint/affine.py`, format version 1) lists, for every rank, boxes: a
shape with an offset and strides in the full tensor, and an offset and strides in the shard, and
the ranks that hold the same box. We read it as a claim. Every number is checked, the walks of all
ranks are folded into joint pieces, the result is proved to cover both sides, and the ranks that a
box says it is held by must be exactly those that list it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import chain
from math import gcd, isfinite, prod
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra.canonical import canonicalize
from restride.algebra.coverage import Covered, explain, prove, sweep
from restride.algebra.fold import fold
from restride.algebra.layout import Layout
from restride.algebra.mesh import as_mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import CorruptError, LayoutError, UnsupportedError
from restride.formats.deepspeed._fields import Field, shown
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.algebra.mesh import Mesh, MeshLike
    from restride.checkpoint.values import Value

__all__ = [
    "MAP_VERSION",
    "exact_scale",
    "from_affine_map",
    "from_affine_map_field",
    "read_affine_maps",
    "require_map_version",
]

MAP_VERSION: Final = 1
"""Version of the stored maps that is understood."""

_Ints: TypeAlias = tuple[int, ...]
_MAP_KEYS: Final = frozenset({"logical_shape", "ranks"})
_RANK_KEYS: Final = frozenset({"shard_shape", "pieces"})
_BOX_KEYS: Final = frozenset({"shape", "source", "dest", "locations", "scale"})

# Blocks of all shards that are folded together; a table with more of them follows no arithmetic.
_MOST_BLOCKS: Final = 1 << 14
# Different maps of a checkpoint that others are compared with.
_MOST_KNOWN: Final = 64
_PLAIN: Final = frozenset({bool, int, float, str, type(None)})


class _Box(Frozen):
    """One box of one rank, as stored."""

    shape: _Ints
    full_base: int
    full_strides: _Ints
    shard_base: int
    shard_strides: _Ints
    locations: frozenset[int]
    scale: Fraction


class _Map(Frozen):
    """A stored map, typed but not yet believed."""

    full_shape: _Ints
    shard_shapes: tuple[_Ints, ...]
    boxes: tuple[tuple[_Box, ...], ...]


def from_affine_map(stored: Mapping[str, object], mesh: MeshLike | None = None) -> Layout:
    """Turn one stored affine map into a proved layout.

    Args:
        stored: The map of one parameter: ``{"logical_shape": ..., "ranks": {...}}``, as DeepSpeed
            stores it or as it comes back from JSON (where ranks are text).
        mesh: Names of the ranks, by default one axis ``tp``.

    Returns:
        A layout in canonical form. Boxes of all ranks are folded together: CodeGen's eleven boxes
        on each of two ranks are one piece.

    Raises:
        FormatError: The map is not one.
        CorruptError: Boxes leave the tensor or the shard, leave elements out, write a shard address
            twice, or name other holders than there are.
        UnsupportedError: The map says something that this version does not know.

    Cost:
        O(boxes * ranks * log). Never walks elements.

    Examples:
        Two rows of three elements, one on each of two ranks:

        >>> def rank(number):
        ...     box = {"shape": [1, 3], "source": [3 * number, [3, 1]], "dest": [0, [3, 1]],
        ...            "locations": [number]}
        ...     return {"shard_shape": [1, 3], "pieces": [box]}
        >>> layout = from_affine_map({"logical_shape": [2, 3], "ranks": {0: rank(0), 1: rank(1)}})
        >>> [(a.extent, a.full_stride, a.rank_stride) for a in layout.all_pieces[0].axes]
        [(2, 3, 1), (3, 1, 0)]
    """
    value: object = stored  # What comes back from JSON may be anything.
    value = dict(value) if isinstance(value, Mapping) else value
    return from_affine_map_field(
        Field(value, "affine map"),  # type: ignore[arg-type]  # checked as it is read
        None if mesh is None else as_mesh(mesh),
    )


def from_affine_map_field(stored: Field, mesh: Mesh | None = None) -> Layout:
    """Do the same for a map inside a file, so that errors say where it is."""
    parsed = _read_map(stored)
    return _lower(parsed, mesh or as_mesh({"tp": len(parsed.boxes)}), stored.where)


def read_affine_maps(stored: Field, mesh: Mesh) -> Iterator[tuple[str, Layout]]:
    """Yield (parameter pattern, layout) of the maps of a checkpoint.

    Args:
        stored: ``{"version": 1, "params": {pattern: map}}``.
        mesh: Names of the ranks.

    Raises:
        FormatError: As for `from_affine_map`.
        CorruptError: As for `from_affine_map`.
        UnsupportedError: As for `from_affine_map`, or the maps have a version from the future.
    """
    require_map_version(stored)
    # Layers repeat: a model has some ten different maps, not thousands.
    known: list[tuple[Value, str, Layout]] = []
    for pattern, entry in stored.at("params").items():
        layout = _alike(entry.value, known)
        if layout is None:
            layout = _lower(_read_map(entry), mesh, entry.where)
            if len(known) < _MOST_KNOWN and _is_plain(entry.value):
                known.append((entry.value, repr(entry.value), layout))
        yield pattern, layout


def _alike(value: Value, known: Sequence[tuple[Value, str, Layout]]) -> Layout | None:
    """What a map means that is spelled as one that was read, down to the types.

    Equality would take True for 1. But only what is equal to a sound map is spelled out: a text
    that some other value refers to again and again may be gigabytes.
    """
    for sound, spelled, layout in known:
        if value == sound and repr(value) == spelled:
            return layout
    return None


def _is_plain(value: Value) -> bool:
    """Whether all of a sound map was read. An object may hold more than what was read of it."""
    if isinstance(value, dict):
        return all(map(_is_plain, chain(value, value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def require_map_version(stored: Field) -> None:
    """Refuse maps of a version from the future.

    Raises:
        UnsupportedError: They are.
    """
    version = stored.get("version")
    number = MAP_VERSION if version is None else version.integer()
    if number > MAP_VERSION:
        raise UnsupportedError(
            f"affine maps of format version {number} are stored, "
            f"version {MAP_VERSION} is understood",
            where=stored.where,
            remedy="read the checkpoint with a newer version of restride",
        )


def _read_map(stored: Field) -> _Map:
    _refuse_unknown(stored, _MAP_KEYS)
    ranks = dict(stored.at("ranks").numbered())
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise CorruptError(
            f"maps of ranks {sorted(ranks)} are given, ranks have to count from 0",
            where=f"{stored.where}['ranks']",
        )
    shapes: list[_Ints] = []
    boxes: list[tuple[_Box, ...]] = []
    for _, entry in sorted(ranks.items()):
        _refuse_unknown(entry, _RANK_KEYS)
        shapes.append(entry.at("shard_shape").shape())
        boxes.append(tuple(_read_box(box) for box in entry.at("pieces").elements()))
    return _Map(stored.at("logical_shape").shape(), tuple(shapes), tuple(boxes))


def _read_box(stored: Field) -> _Box:
    _refuse_unknown(stored, _BOX_KEYS)
    shape = stored.at("shape").shape()
    full_base, full_strides = _read_walk(stored.at("source"), len(shape))
    shard_base, shard_strides = _read_walk(stored.at("dest"), len(shape))
    locations = stored.at("locations").integers()
    if not locations:
        raise CorruptError("names no rank", where=f"{stored.where}['locations']")
    scale = stored.get("scale")
    return _Box(
        shape,
        full_base,
        full_strides,
        shard_base,
        shard_strides,
        frozenset(locations),
        Fraction(1) if scale is None else _read_scale(scale),
    )


def _read_walk(stored: Field, ndim: int) -> tuple[int, _Ints]:
    parts = stored.elements()
    if len(parts) != 2:  # noqa: PLR2004
        raise stored.wrong("an offset and a list of strides")
    strides = parts[1].integers()
    if len(strides) != ndim:
        raise CorruptError(
            f"has {len(strides)} strides for {ndim} dimensions", where=parts[1].where
        )
    return parts[0].integer(), strides


def _read_scale(stored: Field) -> Fraction:
    value = stored.value
    try:
        is_finite = type(value) in {int, float} and isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer that no float can be
        is_finite = False
    if not is_finite or not value:
        raise CorruptError(
            f"a scale is a finite number other than 0, found {shown(value)}", where=stored.where
        )
    return exact_scale(value)  # type: ignore[arg-type]  # an int or a finite float


def exact_scale(value: float) -> Fraction:
    """Recover the exact factor from the finite, non-zero float that was stored.

    The factors that layers use are whole numbers and their reciprocals; 1/3 is stored as the
    nearest float, and that float means 1/3.

    Examples:
        >>> exact_scale(1 / 3), exact_scale(0.75)
        (Fraction(1, 3), Fraction(3, 4))
    """
    exact = Fraction(value)
    simple = Fraction(1, round(1 / exact)) if abs(exact) <= 1 else exact
    return simple if float(simple) == float(exact) else exact


def _lower(parsed: _Map, mesh: Mesh, where: str) -> Layout:
    """Fold the boxes of all ranks, prove the result, and check who says he holds what."""
    if mesh.size != len(parsed.boxes):
        raise CorruptError(
            f"maps of {len(parsed.boxes)} ranks are given, the checkpoint has {mesh.size}",
            where=f"{where}['ranks']",
        )
    try:
        boxes = [
            (_as_piece(box, rank), box)
            for rank, listed in enumerate(parsed.boxes)
            for box in listed
            if prod(box.shape)
        ]
        pieces = [piece for piece, _ in boxes]
        plain = Layout.of(mesh, parsed.full_shape, parsed.shard_shapes, pieces)
    except LayoutError as error:
        raise CorruptError(error.problem, where=where) from error
    verdict = prove(plain)
    if not isinstance(verdict, Covered):
        raise CorruptError(explain(verdict, plain), where=where)
    _check_holders(boxes, plain.full_numel, where)
    return _folded(plain)


def _as_piece(box: _Box, rank: int) -> Piece:
    """One box of one rank, with neighbouring dimensions merged where both sides allow it."""
    steps: list[tuple[int, int, int]] = []
    for extent, full, shard in zip(box.shape, box.full_strides, box.shard_strides, strict=True):
        if extent == 1:
            continue
        if steps and steps[-1][1:] == (extent * full, extent * shard):
            steps[-1] = (steps[-1][0] * extent, full, shard)
        else:
            steps.append((extent, full, shard))
    axes = tuple(Axis(extent, full, 0, shard) for extent, full, shard in steps)
    return Piece(axes, box.full_base, rank, box.shard_base, box.scale)


def _check_holders(boxes: Sequence[tuple[Piece, _Box]], numel: int, where: str) -> None:
    """Refuse a box that names other ranks than those that hold its elements."""
    walks = (
        (
            piece.full_base,
            [(axis.extent, axis.full_stride) for axis in piece.axes if axis.full_stride],
            (piece.rank_base, box.locations),
        )
        for piece, box in boxes
    )
    for region in sweep(walks, numel):
        actual = frozenset(rank for rank, _ in region.tags)
        for rank, claimed in region.tags:
            if claimed != actual:
                raise CorruptError(
                    f"element {region.base} is held by ranks {sorted(actual)}, "
                    f"a box of rank {rank} says by {sorted(claimed)}",
                    where=where,
                )


def _folded(plain: Layout) -> Layout:
    """Bring the concrete boxes of all ranks into as few joint pieces as they have loops in common.

    Boxes that a writer merged where two blocks happened to touch hide the regularity of the rest
    (CodeGen at TP 2: eleven boxes instead of twelve equal ones). Contiguous boxes are cut again at
    the greatest common divisor of all their bounds.
    """
    canonical = canonicalize(plain)
    unit = 0
    for piece in plain.all_pieces:
        if len(piece.axes) > 1 or piece.scale != 1:
            return canonical
        if any(axis.full_stride != 1 or axis.shard_stride != 1 for axis in piece.axes):
            return canonical
        unit = gcd(unit, piece.numel, piece.full_base, piece.shard_base)
    total = sum(plain.shard_numel(rank) for rank in range(plain.rank_count))
    if not unit or total // unit > _MOST_BLOCKS:
        return canonical
    blocks = [[0] * (plain.shard_numel(rank) // unit) for rank in range(plain.rank_count)]
    for piece in plain.all_pieces:
        for step in range(piece.numel // unit):
            blocks[piece.rank_base][piece.shard_base // unit + step] = piece.full_base + step * unit
    folded = fold(
        blocks,
        mesh=plain.mesh,
        full_shape=plain.full_shape,
        shard_shapes=[plain.shard_shape(rank) for rank in range(plain.rank_count)],
        inner=[(unit, 1)] if unit > 1 else [],
    )
    return min(canonical, folded, key=lambda layout: len(layout.all_pieces))


def _refuse_unknown(stored: Field, known: frozenset[str]) -> None:
    for key, _ in list(stored.items()):
        if key not in known:
            raise UnsupportedError(f"has a key {key!r} that is not understood", where=stored.where)
