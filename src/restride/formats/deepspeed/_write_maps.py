r"""`universal_checkpoint_info` made anew: how the ranks of the target cut each parameter.

DeepSpeed says it twice (deepspeed 0.19.8 `module_inject/layers.py`,
`collect_autotp_universal_checkpoint_info`): as affine maps, and for older converters as lists of
patterns. Both follow from the layouts. Without tensor parallelism it says nothing, nor do we.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from restride.errors import RestrideError
from restride.formats.deepspeed._placement import REPLICATED, ROW_PARALLEL, VOCABULARY
from restride.formats.deepspeed.maps import MAP_VERSION
from restride.formats.deepspeed.maps_out import to_affine_map
from restride.layouts._arguments import find_mesh_axis
from restride.layouts._runs import read_row_cut
from restride.layouts._segments import read_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.values import Value

__all__ = ["universal_info"]

_VERSION: Final = "universal_checkpoint_version"
_CURRENT_VERSION: Final = 0.4
_VOCABULARY_SIZE: Final = "original_vocab_size"
_VOCABULARY_NAMES: Final = ("embed", "lm_head")
_MATRIX: Final = 2
# Rebuilding and extracting has no bound; the peer's planner, which has one, is not in its way.
_MOST_BOXES: Final = 1 << 18


def universal_info(
    parameters: Mapping[str, Layout], described: Mapping[str, Value]
) -> dict[Value, Value]:
    """Describe the layouts of the target as DeepSpeed's own converter reads them.

    Args:
        parameters: How the tensor-parallel ranks cut each parameter, by name.
        described: What the source says besides.

    Raises:
        UnsupportedError: A layout has no words in DeepSpeed's format.
    """
    layouts = {f"^{re.escape(name)}$": (name, layout) for name, layout in parameters.items()}
    dims = {pattern: _cut_dim(layout) for pattern, (_, layout) in layouts.items()}
    parts = {
        pattern: found
        for pattern, (_, layout) in layouts.items()
        if dims[pattern] is not None and (found := _sub_params(layout)) is not None
    }
    rows = {
        pattern: layout.full_shape[0]
        for pattern, (name, layout) in layouts.items()
        if dims[pattern] == 0
        and len(layout.full_shape) == _MATRIX
        and any(part in name for part in _VOCABULARY_NAMES)
    }
    vocabulary = described.get(_VOCABULARY_SIZE) or next(iter(rows.values()), None)
    info: dict[Value, Value] = {
        _VERSION: _CURRENT_VERSION,
        **dict(described.items()),
        ROW_PARALLEL: _listed(
            pattern
            for pattern, (_, layout) in layouts.items()
            if dims[pattern] == 1 and len(layout.full_shape) == _MATRIX
        ),
        REPLICATED: _listed(pattern for pattern, dim in dims.items() if dim is None),
        # The peer cuts every one of these to the size of the vocabulary, whatever it is.
        VOCABULARY: _listed(pattern for pattern, size in rows.items() if size == vocabulary),
        "parameter_with_sub_params": [
            {
                "patterns": [pattern],
                "shape": [
                    tuple(sum(widths) for widths in found) if dim == dims[pattern] else size
                    for dim, size in enumerate(layouts[pattern][1].full_shape)
                ],
                "partition_dim": dims[pattern],
            }
            for pattern, found in parts.items()
        ],
        "autotp_unsupported_parameter_patterns": {},
    }
    if parts:
        info["sub_param_shard_widths"] = {
            pattern: [list(widths) for widths in found] for pattern, found in parts.items()
        }
    if vocabulary is not None:
        info[_VOCABULARY_SIZE] = vocabulary
    info["affine_map"] = {"version": MAP_VERSION, "params": _maps(layouts)}
    return info


def _listed(patterns: Iterable[str]) -> list[Value]:
    return [*sorted(patterns)]


def _maps(layouts: Mapping[str, tuple[str, Layout]]) -> dict[Value, Value]:
    known: dict[Layout, dict[str, object]] = {}
    maps: dict[Value, Value] = {}
    for pattern, (name, layout) in layouts.items():
        if layout.padding:  # a padded vocabulary is described by its size
            continue
        if layout not in known:
            try:
                known[layout] = to_affine_map(layout, most_boxes=_MOST_BOXES)
            except RestrideError as error:
                raise error.located(f"parameter {name!r}") from None
        maps[pattern] = known[layout]  # type: ignore[assignment]  # plain lists, dicts and numbers
    return maps


def _cut_dim(layout: Layout) -> int | None:
    """Dimension along which the shards are smaller than the tensor, or None where none is."""
    for _, shard in layout.shard_shapes:
        for dim, (size, own) in enumerate(zip(layout.full_shape, shard, strict=False)):
            if size != own:
                return dim
    return None


def _sub_params(layout: Layout) -> list[tuple[int, ...]] | None:
    """Widths of each part on each rank, where a parameter is made of parts that are each cut."""
    cut = read_row_cut(layout, find_mesh_axis(layout.mesh, None))
    segments = read_segments(cut) if cut is not None else None
    if segments is None or len(segments) == 1:
        return None
    widths = [tuple(widths) for _, widths in segments if widths is not None]
    return widths if len(widths) == len(segments) else None
