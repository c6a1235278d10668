r"""`universal_checkpoint_info` made anew: how the ranks of the target cut each parameter.

DeepSpeed says it twice (deepspeed 0.19.8 `module_inject/layers.py`,
`collect_autotp_universal_checkpoint_info`): as affine maps, and for older converters as lists of
patterns. Both follow from the layouts. Without tensor parallelism it says nothing, nor do we.

A model that says it itself, as those of Megatron do, has the lists alone. An engine of such a model
loads a universal folder by marks that converters make of the lists, and not of maps: with these it
would cut by rows what is cut by columns, without a word (seen with deepspeed 0.19.8).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.errors import RestrideError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._placement import REPLICATED, ROW_PARALLEL, VOCABULARY, Placement
from restride.formats.deepspeed.maps import MAP_VERSION
from restride.formats.deepspeed.maps_out import to_affine_map
from restride.frozen import Frozen
from restride.layouts._arguments import find_mesh_axis
from restride.layouts._runs import read_row_cut
from restride.layouts._segments import read_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.values import Value

__all__ = ["universal_info"]

_VERSION: Final = "universal_checkpoint_version"
_CURRENT_VERSION: Final = 0.4
_VOCABULARY_SIZE: Final = "original_vocab_size"
_VOCABULARY_NAMES: Final = ("embed", "lm_head")
_MATRIX: Final = 2
# Rebuilding and extracting has no bound; the peer's planner, which has one, is not in its way.
_MOST_BOXES: Final = 1 << 18

_Widths: TypeAlias = tuple[tuple[int, ...], ...]


def universal_info(
    parameters: Mapping[str, Layout], described: Mapping[str, Value], *, has_maps: bool = True
) -> dict[Value, Value]:
    """Describe the layouts of the target as DeepSpeed's own converter reads them.

    Args:
        parameters: How the tensor-parallel ranks cut each parameter, by name.
        described: What the source says besides.
        has_maps: Whether there are maps of what the lists alone would say.

    Raises:
        UnsupportedError: A layout has no words in DeepSpeed's format.
    """
    look = cache(_look_at)  # layers are cut alike
    cuts = {
        f"^{re.escape(name)}$": _Cut(name, layout, *look(layout))
        for name, layout in parameters.items()
    }
    vocabulary = described.get(_VOCABULARY_SIZE)
    if vocabulary is None:
        sizes = (cut.layout.full_shape[0] for cut in cuts.values() if cut.is_vocabulary)
        vocabulary = next(sizes, None)
    parts = {pattern: cut for pattern, cut in cuts.items() if cut.sub_params is not None}
    info: dict[Value, Value] = {
        **dict(described.items()),
        _VERSION: _CURRENT_VERSION,
        ROW_PARALLEL: _listed(pattern for pattern, cut in cuts.items() if cut.is_by_column),
        REPLICATED: _listed(pattern for pattern, cut in cuts.items() if cut.dim is None),
        # The peer cuts every one of these to the size of the vocabulary, whatever it is.
        VOCABULARY: _listed(
            pattern
            for pattern, cut in cuts.items()
            if cut.is_vocabulary and cut.layout.full_shape[0] == vocabulary
        ),
        "parameter_with_sub_params": [cut.described(pattern) for pattern, cut in parts.items()],
        "autotp_unsupported_parameter_patterns": {},
    }
    if parts:
        info["sub_param_shard_widths"] = {
            pattern: [list(widths) for widths in cut.sub_params or ()]
            for pattern, cut in parts.items()
        }
    if vocabulary is not None:
        info[_VOCABULARY_SIZE] = vocabulary
    if has_maps or not _is_told(info, parameters):
        info["affine_map"] = {"version": MAP_VERSION, "params": _maps(cuts, vocabulary)}
    return info


def _is_told(info: dict[Value, Value], parameters: Mapping[str, Layout]) -> bool:
    """Whether the lists alone say how every parameter is cut."""
    mesh = next((layout.mesh for layout in parameters.values()), Mesh((("tp", 1),)))
    try:
        placement = Placement(Field(info, "lists"), mesh, "lists")
        return all(
            same_layout(layout, placement.layout(name, _shards(layout)))
            for name, layout in parameters.items()
        )
    except RestrideError:
        return False


def _shards(layout: Layout) -> list[Shape]:
    return [layout.shard_shape(rank) for rank in range(layout.rank_count)]


class _Cut(Frozen):
    """How one parameter is cut, as the lists of patterns tell it.

    Attributes:
        name: The parameter.
        layout: How it is cut.
        dim: Dimension along which the shards are smaller than the tensor; None where none is.
        sub_params: Widths of each part on each rank, where it is made of parts that are each cut.
    """

    name: str
    layout: Layout
    dim: int | None
    sub_params: _Widths | None

    @property
    def is_by_column(self) -> bool:
        """Whether it is a matrix whose columns are cut: what the field calls row-parallel."""
        return self.dim == 1 and len(self.layout.full_shape) == _MATRIX

    @property
    def is_vocabulary(self) -> bool:
        """Whether its rows are words: by its name, or because they are padded."""
        is_named = any(part in self.name for part in _VOCABULARY_NAMES)
        is_matrix = self.dim == 0 and len(self.layout.full_shape) == _MATRIX
        return is_matrix and (is_named or bool(self.layout.padding))

    def described(self, pattern: str) -> Value:
        """The entry of a parameter with sub-parameters."""
        shape: list[Value] = [*self.layout.full_shape]
        if self.dim is not None:
            shape[self.dim] = tuple(sum(widths) for widths in self.sub_params or ())
        return {"patterns": [pattern], "shape": shape, "partition_dim": self.dim}


def _listed(patterns: Iterable[str]) -> list[Value]:
    return [*sorted(patterns)]


def _maps(cuts: Mapping[str, _Cut], vocabulary: Value) -> dict[Value, Value]:
    known: dict[Layout, dict[str, object]] = {}
    maps: dict[Value, Value] = {}
    for pattern, cut in cuts.items():
        layout = cut.layout
        if cut.is_vocabulary and layout.padding and layout.full_shape[0] == vocabulary:
            continue  # a padded vocabulary is described by its size
        if layout not in known:
            try:
                known[layout] = to_affine_map(layout, most_boxes=_MOST_BOXES)
            except RestrideError as error:
                raise error.located(f"parameter {cut.name!r}") from None
        maps[pattern] = known[layout]  # type: ignore[assignment]  # plain lists, dicts and numbers
    return maps


def _look_at(layout: Layout) -> tuple[int | None, _Widths | None]:
    """The dimension along which a layout cuts, and the widths of the parts that it cuts each."""
    dim = _cut_dim(layout)
    return dim, None if dim is None else _sub_params(layout)


def _cut_dim(layout: Layout) -> int | None:
    """Dimension along which the shards are smaller than the tensor, or None where none is."""
    for _, shard in layout.shard_shapes:
        for dim, (size, own) in enumerate(zip(layout.full_shape, shard, strict=False)):
            if size != own:
                return dim
    return None


def _sub_params(layout: Layout) -> _Widths | None:
    """Widths of each part on each rank, where a parameter is made of parts that are each cut."""
    cut = read_row_cut(layout, find_mesh_axis(layout.mesh, None))
    segments = read_segments(cut) if cut is not None else None
    if segments is None or len(segments) == 1:
        return None
    widths = tuple(tuple(widths) for _, widths in segments if widths is not None)
    return widths if len(widths) == len(segments) else None
