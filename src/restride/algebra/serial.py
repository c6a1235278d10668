"""The map file ``restride/1``: layouts as JSON, once each, and the tensors that have them.

    {"format": "restride/1", "mesh": {"tp": 8},
     "layouts": {"L0": {"full": [8192, 8192], "shards": [[8, [8192, 1024]]],
       "pieces": [{"axes": [[8, 1024, 1, 0], [8192, 8192, 0, 1024], [1024, 1, 0, 1]],
                   "base": [0, 0, 0]}]}},
     "tensors": {"model.layers.0.self_attn.o_proj.weight": "L0"}}

An axis is ``[extent, full stride, rank stride, shard stride]``, a base ``[full, rank, shard]``, a
run of shards ``[number of ranks, shape]``. What has its usual value is left out: the ``scale`` of a
piece (text such as ``"1/3"``), ``padding`` (axes and bases without the full index, and a ``fill``),
``unit_bits``, and the ``mesh`` of a layout that lives on the mesh of the file.

The reader trusts nothing: a file from a newer version, unknown and repeated keys, numbers that
break an invariant and files that are too large to be honest are refused, and each refusal names the
place, such as ``$.layouts.L2.pieces[3].axes[0]``.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import (
    TYPE_CHECKING,
    Annotated,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
)

import msgspec

from restride.algebra.layout import Layout, Padding
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.errors import FormatError, RestrideError, UnsupportedError
from restride.frozen import Frozen
from restride.strict_json import member_of, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["MapFile", "layout_from_json", "layout_to_json", "read_map", "write_map"]

_FORMAT: Final = "restride"
_VERSION: Final = 1
_WRITTEN: Final = f"{_FORMAT}/{_VERSION}"
_MOST_LOOPS: Final = 64
_MOST_SCALE_DIGITS: Final = 40
_ONE: Final = Fraction(1)
# Each piece is compared with each run of shards.
_MOST_CHECKS: Final = 2**22


T = TypeVar("T")
Args = ParamSpec("Args")


class MapFile(Frozen):
    """What a map file says.

    Attributes:
        mesh: Mesh of every layout that does not name its own.
        tensors: Layout of each tensor, by name.
    """

    mesh: Mesh
    tensors: Mapping[str, Layout]


def write_map(content: MapFile) -> str:
    """Write a map file: each layout once, each tensor on a line of its own.

    Returns:
        Text that `read_map` turns back into the same content. The same content gives the same text.

    Raises:
        RestrideError: The content is nothing that `read_map` would accept, such as a number of 2^63
            or more, or a name that is no Unicode text.

    Cost:
        O(size of the text).
    """
    identifiers: dict[Layout, str] = {}
    for layout in content.tensors.values():
        identifiers.setdefault(layout, f"L{len(identifiers)}")
    layouts = {
        identifier: layout_to_json(layout, mesh=content.mesh)
        for layout, identifier in identifiers.items()
    }
    tensors = {name: identifiers[layout] for name, layout in content.tensors.items()}
    text = (
        f'{{"format": "{_WRITTEN}",\n'
        f'"mesh": {_text(dict(content.mesh.axes))},\n'
        f'"layouts": {_lines(layouts)},\n'
        f'"tensors": {_lines(tensors)}}}\n'
    )
    read_map(text)
    return text


def read_map(text: str | bytes) -> MapFile:
    """Read a map file that nobody vouches for.

    Args:
        text: The JSON; bytes are UTF-8.

    Raises:
        FormatError: It is no map file: no JSON, an unknown, missing or repeated key, a value of the
            wrong type, a tensor without a layout.
        LayoutError: A number breaks an invariant of meshes, axes, pieces or layouts.
        UnsupportedError: It was written by a newer version, or is larger than any map should be.

    Cost:
        O(size of the text), which is limited to 16 MiB. Never walks elements.

    Examples:
        >>> text = write_map(MapFile(Mesh((("tp", 1),)), {}))
        >>> print(text, end="")
        {"format": "restride/1",
        "mesh": {"tp": 1},
        "layouts": {},
        "tensors": {}}
        >>> read_map(text)
        MapFile(mesh=Mesh(axes=(('tp', 1),)), tensors={})
    """
    value = parse_object(text)
    _require_version(value)
    file = _typed(value, _File, "$")
    mesh = _mesh(file.mesh, "$.mesh")
    layouts = {
        name: layout_from_json(entry, mesh=mesh, where=member_of("$.layouts", name))
        for name, entry in file.layouts.items()
    }
    tensors: dict[str, Layout] = {}
    for name, identifier in file.tensors.items():
        if not isinstance(identifier, str) or identifier not in layouts:
            raise FormatError(
                "this names no layout of the file", where=member_of("$.tensors", name)
            )
        tensors[name] = layouts[identifier]
    return MapFile(mesh, tensors)


def layout_to_json(layout: Layout, *, mesh: Mesh | None = None) -> dict[str, object]:
    """The JSON value of one layout.

    Args:
        layout: The layout.
        mesh: Mesh that a reader will know from elsewhere; it is left out where it is the same.

    Examples:
        >>> halves = Piece((Axis(2, 2, 1, 0), Axis(2, 1, 0, 1)))
        >>> value = layout_to_json(Layout.of({"tp": 2}, (4,), [(2,)] * 2, [halves]))
        >>> value["mesh"], value["full"], value["shards"]
        ({'tp': 2}, [4], [[2, [2]]])
        >>> value["pieces"]
        [{'axes': [[2, 2, 1, 0], [2, 1, 0, 1]], 'base': [0, 0, 0]}]
    """
    value: dict[str, object] = {}
    if layout.mesh != mesh:
        value["mesh"] = dict(layout.mesh.axes)
    value["full"] = list(layout.full_shape)
    value["shards"] = [[count, list(shape)] for count, shape in layout.shard_shapes]
    value["pieces"] = [_piece_to_json(piece) for piece in layout.all_pieces]
    if layout.padding:
        value["padding"] = [_padding_to_json(padding) for padding in layout.padding]
    if layout.unit_bits is not None:
        value["unit_bits"] = layout.unit_bits
    return value


def layout_from_json(value: object, *, mesh: Mesh | None = None, where: str = "$") -> Layout:
    """Build a layout from its JSON value, as `json.loads` returns it.

    Args:
        value: What `layout_to_json` returned.
        mesh: Mesh where the value does not name one.
        where: Place of the value, for errors.

    Raises:
        FormatError: A key is unknown or missing, or a value has the wrong type.
        LayoutError: A number breaks an invariant.
        UnsupportedError: There are more loops, pieces or shapes than any layout should have.
    """
    entry = _typed(value, _LayoutEntry, where)
    if entry.mesh is not None:
        mesh = _mesh(entry.mesh, f"{where}.mesh")
    if mesh is None:
        raise FormatError("the layout does not name its mesh", where=where)
    _require_modest(entry, where)
    pieces = tuple(
        _piece(piece, f"{where}.pieces[{number}]") for number, piece in enumerate(entry.pieces)
    )
    padding = tuple(
        _padding(piece, f"{where}.padding[{number}]") for number, piece in enumerate(entry.padding)
    )
    return _at(where, Layout, mesh, entry.full, entry.shards, pieces, padding, entry.unit_bits)


_Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """Base of what a file holds: an unknown key is an error."""


class _PieceEntry(_Entry):
    axes: tuple[tuple[_Int, _Int, _Int, _Int], ...]
    base: tuple[_Int, _Int, _Int]
    scale: str = "1"


class _PaddingEntry(_Entry):
    axes: tuple[tuple[_Int, _Int, _Int], ...]
    base: tuple[_Int, _Int]
    fill: Literal["zero", "undefined"] = "zero"


class _LayoutEntry(_Entry):
    full: tuple[_Int, ...]
    shards: tuple[tuple[_Int, tuple[_Int, ...]], ...]
    pieces: tuple[_PieceEntry, ...]
    padding: tuple[_PaddingEntry, ...] = ()
    unit_bits: _Int | None = None
    mesh: dict[str, _Int] | None = None


class _File(_Entry):
    format: str
    mesh: dict[str, _Int]
    # Members are looked at one by one, so that an error names them.
    layouts: dict[str, object]
    tensors: dict[str, object]


def _piece_to_json(piece: Piece) -> dict[str, object]:
    value: dict[str, object] = {
        "axes": [[a.extent, a.full_stride, a.rank_stride, a.shard_stride] for a in piece.axes],
        "base": [piece.full_base, piece.rank_base, piece.shard_base],
    }
    if piece.scale != 1:
        value["scale"] = str(piece.scale)
    return value


def _padding_to_json(padding: Padding) -> dict[str, object]:
    value: dict[str, object] = {
        "axes": [[axis.extent, axis.rank_stride, axis.shard_stride] for axis in padding.axes],
        "base": [padding.rank_base, padding.shard_base],
    }
    if padding.fill != "zero":
        value["fill"] = padding.fill
    return value


def _piece(entry: _PieceEntry, where: str) -> Piece:
    axes = _axes(entry.axes, where)
    scale = _scale(entry.scale, f"{where}.scale")
    return _at(where, Piece, axes, *entry.base, scale)


def _padding(entry: _PaddingEntry, where: str) -> Padding:
    axes = _axes([(extent, 0, rank, shard) for extent, rank, shard in entry.axes], where)
    return _at(where, Padding, axes, *entry.base, entry.fill)


def _axes(loops: Sequence[tuple[int, int, int, int]], where: str) -> tuple[Axis, ...]:
    if len(loops) > _MOST_LOOPS:
        raise UnsupportedError(
            f"{len(loops)} axes are more than the {_MOST_LOOPS} that a piece may have", where=where
        )
    return tuple(_at(f"{where}.axes[{number}]", Axis, *loop) for number, loop in enumerate(loops))


def _scale(text: str, where: str) -> Fraction:
    """Read a fraction in lowest terms; `Fraction` itself would also compute ``1e999999999``."""
    if text == "1":
        return _ONE
    numerator, slash, denominator = text.removeprefix("-").partition("/")
    digits = (numerator, denominator) if slash else (numerator,)
    are_digits = all(part.isascii() and part.isdigit() for part in digits)
    if len(text) <= _MOST_SCALE_DIGITS and are_digits and (not slash or int(denominator)):
        scale = Fraction(*map(int, digits)) * (-1 if text.startswith("-") else 1)
        if str(scale) == text:
            return scale
    raise FormatError(
        f"the scale {text[:_MOST_SCALE_DIGITS]!r} is no fraction in lowest terms",
        where=where,
        remedy="write it as '1/3' or '-2'",
    )


def _mesh(sizes: Mapping[str, int], where: str) -> Mesh:
    if len(sizes) > _MOST_LOOPS:
        raise UnsupportedError(f"a mesh of {len(sizes)} axes is no mesh of ranks", where=where)
    return _at(where, Mesh, tuple(sizes.items()))


def _require_modest(entry: _LayoutEntry, where: str) -> None:
    for name, shape in (("full", entry.full), *(("shards", shape) for _, shape in entry.shards)):
        if len(shape) > _MOST_LOOPS:
            raise UnsupportedError(
                f"{len(shape)} dimensions are more than the {_MOST_LOOPS} that a tensor may have",
                where=f"{where}.{name}",
            )
    checks = len(entry.shards) * (len(entry.pieces) + len(entry.padding))
    if checks > _MOST_CHECKS:
        raise UnsupportedError(
            f"{len(entry.pieces)} pieces, {len(entry.padding)} paddings and {len(entry.shards)} "
            "runs of shards are more than a layout may have",
            where=where,
        )


def _typed(value: object, kind: type[T], where: str) -> T:
    """Check the type of a parsed value, and put its place in front of the place inside it."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        problem, _, inside = str(error).partition(" - at `$")
        raise FormatError(problem, where=where + inside.removesuffix("`")) from None


def _at(where: str, make: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> T:
    """Call a constructor, and tell where its arguments stand if it refuses them."""
    try:
        return make(*args, **kwargs)
    except RestrideError as error:
        raise error.located(where) from None


def _require_version(value: Mapping[str, object]) -> None:
    found = value.get("format")
    name, _, version = found.partition("/") if isinstance(found, str) else ("", "", "")
    number = int(version) if re.fullmatch("[1-9][0-9]{0,8}", version) else 0
    if name != _FORMAT or not number:
        raise FormatError("this is no map file", where="$.format", remedy=f"{_WRITTEN!r} is one")
    if number > _VERSION:
        raise UnsupportedError(
            f"the map was written by a newer version ({name}/{number})",
            where="$.format",
            remedy=f"install a newer restride; this one reads {_WRITTEN}",
        )


def _lines(entries: Mapping[str, object]) -> str:
    """An object with one member on a line, so that `grep` finds a tensor."""
    if not entries:
        return "{}"
    members = (f"{_text(name)}: {_text(value)}" for name, value in entries.items())
    return "{\n" + ",\n".join(members) + "}"


def _text(value: object) -> str:
    """JSON in which names are themselves, not escaped."""
    return json.dumps(value, ensure_ascii=False)
