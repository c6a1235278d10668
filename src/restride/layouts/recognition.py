"""Name the family of a layout, and build it again on another mesh.

A stored map or a probed layout says where elements are on the mesh that there was. To cut the same
tensor for another mesh one has to know the rule, and one layout may come from several: 4 rows on
each of 4 ranks are four heads, a near-even cut, or `torch.chunk`. `recognize` makes every candidate
that shape, shards and mesh suggest, keeps those that mean exactly the same as the layout, and says
what tells them apart.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.mesh import as_mesh
from restride.algebra.signature import same_layout
from restride.errors import LayoutError, RuleError
from restride.frozen import Frozen
from restride.layouts._arguments import MeshAxis, find_mesh_axis
from restride.layouts._recognized import Family, Flat, Padded, Replicated, Transposed
from restride.layouts._recognized_cuts import Codegen, Experts, Segments, Yuan
from restride.layouts._runs import read_row_cut
from restride.layouts._segments import read_segments
from restride.layouts._size_rules import fitting_rules
from restride.layouts.permuted import transposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import MeshLike

__all__ = ["Recognized", "rebuild_on", "recognize"]

_MATRIX = 2


class Recognized(Frozen):
    """One family that a layout belongs to.

    Attributes:
        name: Name in the catalogue.
        also: Other names of the catalogue for the same geometry on this mesh.
        text: The family with its numbers, in one line.
        apart: What tells it from the other families that fit; empty where there is none.
        axis: Mesh axis that is cut, or None where nothing is.
        family: What builds it again.
        unit_bits: As in the layout.
    """

    name: str
    also: tuple[str, ...]
    text: str
    apart: str
    axis: str | None
    family: Family
    unit_bits: int | None = None

    @property
    def rule_layout(self) -> str:
        """What a rule file calls the family, as far as it has the word."""
        match self.family:
            case Segments(dim=0) if self.name in {"split", "chunked"}:
                return "column"
            case Segments(dim=1) if self.name in {"split", "chunked"}:
                return "row"
            case Replicated():
                return "whole"
            case _:
                return self.name

    @property
    def may_follow_a_grain(self) -> bool:
        """Whether a grain that the layout does not show might cut it otherwise."""
        return not isinstance(self.family, Replicated) and self.takes != "grain"

    @property
    def takes(self) -> str:
        """The number of the model that `rebuild_on` may be given; empty where there is none."""
        return self.family.takes

    def __str__(self) -> str:
        also = f" (also {', '.join(self.also)})" if self.also else ""
        return f"{self.text}{also}" + (f"; {self.apart}" if self.apart else "")


def recognize(layout: Layout) -> tuple[Recognized, ...]:
    """Name every family that a layout belongs to, the commonest first.

    Args:
        layout: A whole layout, such as a stored map or a probed one.

    Returns:
        Families whose layout on this mesh means the same as `layout`; none where no family that is
        known does. Widths that follow no rule, and a table of blocks of a matrix, are named only
        where nothing else fits; a table of stacked matrices always is.

    Cost:
        O(ranks * pieces) and some milliseconds. Never walks elements.

    Examples:
        >>> from restride.layouts import autotp_sizes, split
        >>> for found in recognize(split((48, 2), mesh={"tp": 4}, sizes=[16, 16, 8, 8])):
        ...     print(found)
        split of dimension 0 by heads: 6 (also bloom-qkv)
    """
    plain = replace(layout, unit_bits=None)
    found = [(axis, family) for axis, family in _candidates(plain) if _means(family, plain, axis)]
    if not found and len(layout.full_shape) > 1:
        turned = transposed(plain)
        found = [
            (axis, Transposed(family))
            for axis, family in _candidates(turned)
            if _means(family, turned, axis) and _means(Transposed(family), plain, axis)
        ]
    # A table or list says nothing of other ranks: it is named where nothing else is.
    found = [one for one in found if not _is_listed(one[1])] or found
    return tuple(
        Recognized(
            family.names[0],
            family.names[1:],
            family.text,
            family.apart if len(found) > 1 else "",
            None if axis is None else axis.name,
            family,
            layout.unit_bits,
        )
        for axis, family in found
    )


def rebuild_on(
    recognized: Recognized,
    mesh: MeshLike,
    *,
    axis: str | None = None,
    heads: int | None = None,
    grain: int | None = None,
) -> Layout:
    """Build the layout of a recognized family on another mesh.

    Args:
        recognized: What `recognize` found.
        mesh: The new ranks.
        axis: Mesh axis that is cut: by default the one of the same name, or the only one.
        heads: Head count of the model, where the layout leaves several possible.
        grain: DeepSpeed's `tp_grain_size`, likewise.

    Returns:
        A layout of the same full tensor. On one rank it is whole.

    Raises:
        RuleError: The family cannot be cut over so many ranks, a number is missing that would
            decide how, or one is given that the family does not take.

    Examples:
        >>> from restride.layouts import codegen_qkv
        >>> (found,) = recognize(codegen_qkv((48, 2), mesh={"tp": 4}, heads=16))
        >>> rebuild_on(found, {"tp": 2}) == codegen_qkv((48, 2), mesh={"tp": 2}, heads=16)
        True
        >>> rebuild_on(found, {"tp": 3})
        Traceback (most recent call last):
        restride.errors.RuleError: codegen-qkv: heads is known to be a multiple of 16, and 3 ranks \
need a multiple of 12; pass heads= of the model
    """
    ranks = as_mesh(mesh)
    names = [name for name, _ in ranks.axes]
    if recognized.axis is None:
        target = MeshAxis(ranks, names[0] if names else "", ranks.size)
    else:
        chosen = recognized.axis if axis is None and recognized.axis in names else axis
        target = find_mesh_axis(ranks, chosen)
    numbers = {"heads": heads, "grain": grain}
    given = {name: number for name, number in numbers.items() if number is not None}
    for name in given:
        if name != recognized.family.takes:
            raise RuleError(f"{recognized.text!r} does not depend on {name}")
    try:
        built = recognized.family.on(target, given)
    except LayoutError as error:
        raise error.located(recognized.name) from None
    return replace(built, unit_bits=recognized.unit_bits)


def _is_listed(family: Family) -> bool:
    """Whether a family only repeats the layout, without a rule behind it."""
    match family:
        case Segments():
            return family.rule.name == "listed"
        case Experts():
            return len(family.shape) <= _MATRIX
        case Transposed():
            return _is_listed(family.inner)
        case _:
            return False


def _means(family: Family, layout: Layout, axis: MeshAxis | None) -> bool:
    """Whether a family gives this very layout on its own mesh."""
    target = axis or MeshAxis(layout.mesh, "", layout.mesh.size)
    try:
        return same_layout(family.same(target), layout)
    except LayoutError:
        return False


def _candidates(layout: Layout) -> Iterator[tuple[MeshAxis | None, Family]]:
    scales = {piece.scale for piece in layout.all_pieces} or {Fraction(1)}
    if len(scales) > 1:
        return
    (scale,) = scales
    yield None, Replicated(layout.full_shape, scale)
    for name, size in layout.mesh.axes:
        target = MeshAxis(layout.mesh, name, size)
        if size > 1 and scale * size == 1:
            yield target, Replicated(layout.full_shape, scale, is_divided=True)
        if size > 1 and scale == 1:
            for family in _cut(layout, target):
                yield target, family


def _cut(layout: Layout, target: MeshAxis) -> Iterator[Family]:
    shape = layout.full_shape
    if all(shard == shape for _, shard in layout.shard_shapes):
        return
    if layout.padding or any(len(shard) != len(shape) for _, shard in layout.shard_shapes):
        yield from _padded(layout, target)
    cut = read_row_cut(layout, target)
    if cut is None:
        return
    segments = read_segments(cut)
    if segments is not None:
        totals = [rows for rows, widths in segments if widths is not None]
        widths = [sizes for _, sizes in segments if sizes is not None]
        for rule in fitting_rules(totals, widths):
            yield Segments(shape, cut.dim, tuple(segments), rule)
    yield Codegen(shape, 4 * target.size)
    yield from Yuan.candidates(shape, cut, target.size)
    if cut.dim == 0 and (segments is None or len(segments) > 1 or len(shape) > _MATRIX):
        yield Experts.of(shape, cut)


def _padded(layout: Layout, target: MeshAxis) -> Iterable[Family]:
    fills = {padding.fill for padding in layout.padding} or {"undefined"}
    shape, shard = layout.full_shape, layout.shard_shape(0)
    for fill in sorted(fills):
        if len(shard) == len(shape):
            for dim, size in enumerate(shard):
                if size * target.size >= shape[dim] and size != shape[dim]:
                    yield Padded(shape, dim, size * target.size, fill)
        if len(shard) == 1:
            yield Flat.of(shape, shard[0], target.size, fill)
