"""How tensor-parallel ranks cut each parameter: what the checkpoint says, and nothing else.

`universal_checkpoint_info` says it in two ways. New checkpoints have affine maps, which are
geometry. Older ones (and Megatron-DeepSpeed) sort parameters into categories by pattern; there, a
parameter that is in no category is cut along dimension 0, which is the rule of the format
(deepspeed 0.19.8 `checkpoint/ds_to_universal.py`, `merge_tp_slices`) and holds only where the
categories have been written. A parameter of which nothing is said is refused: its shape and its
name look the same whether it was cut, fused or replicated. A user may know it (`told_cut.py`).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import CorruptError, LayoutError, UnsupportedError
from restride.formats.deepspeed._patterns import PatternTable
from restride.formats.deepspeed._sub_params import SubParams, read_sub_params
from restride.formats.deepspeed.maps import read_affine_maps
from restride.layouts.replicated import replicated
from restride.layouts.segmented import sub_params
from restride.layouts.split import padded, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import Mesh
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed.told_cut import ToldCut

__all__ = [
    "AVERAGED",
    "REPLICATED",
    "ROW_PARALLEL",
    "TWO_SUB_PARAMS",
    "VOCABULARY",
    "Placement",
]

REPLICATED: Final = "tp_replicated_parameter_patterns"
AVERAGED: Final = "parameter_to_average_patterns"
ROW_PARALLEL: Final = "parameter_with_row_parallelism_patterns"
TWO_SUB_PARAMS: Final = "parameter_with_2_sub_params_cat_dim_0"
VOCABULARY: Final = "vocabulary_parameter_patterns"
_UNSUPPORTED: Final = "autotp_unsupported_parameter_patterns"
_MATRIX: Final = 2


class Placement:
    """Layouts over the tensor-parallel ranks, from the metadata of one model file.

    Args:
        info: `universal_checkpoint_info`, or None where the file has none.
        mesh: The tensor-parallel ranks.
        where: File, for errors.
        told: What a user tells of parameters of which nothing is said.
        may_be_told: Whether a user could: nobody asks for what is told of experts.

    Raises:
        FormatError: The metadata has another type than it must have.
        CorruptError: An affine map contradicts itself.
        UnsupportedError: The metadata has a pattern, key or version that is not understood.
    """

    def __init__(
        self,
        info: Field | None,
        mesh: Mesh,
        where: str,
        told: ToldCut | None = None,
        *,
        may_be_told: bool = True,
    ) -> None:
        self._mesh = mesh
        self._may_be_told = may_be_told
        self._told = told
        self._where = where
        self._maps: PatternTable[Layout] = PatternTable([])
        self._unsupported: PatternTable[str] = PatternTable([])
        self._categories: PatternTable[str] = PatternTable([])
        self._vocabulary: PatternTable[str] = PatternTable([])
        self._sub_params: PatternTable[SubParams] = PatternTable([])
        self._vocabulary_rows: int | None = None
        self._has_categories = False
        if info is not None and mesh.size > 1:
            self._read(info)

    def _read(self, info: Field) -> None:
        maps = info.get("affine_map")
        if maps is not None:
            self._maps = PatternTable(read_affine_maps(maps, self._mesh))
        unsupported = info.get(_UNSUPPORTED)
        if unsupported is not None:
            self._unsupported = PatternTable(
                (pattern, reason.text()) for pattern, reason in unsupported.items()
            )
        self._categories = PatternTable(
            (pattern, category)
            for category in (REPLICATED, AVERAGED, ROW_PARALLEL, TWO_SUB_PARAMS)
            for pattern in _texts(info.get(category))
        )
        self._vocabulary = PatternTable(
            (pattern, VOCABULARY) for pattern in _texts(info.get(VOCABULARY))
        )
        self._sub_params = PatternTable(read_sub_params(info))
        rows = info.get("original_vocab_size")
        self._vocabulary_rows = None if rows is None else rows.integer()
        self._has_categories = all(
            info.get(category) is not None for category in (REPLICATED, ROW_PARALLEL)
        )

    def is_averaged(self, name: str) -> bool:
        """Whether ranks are known to hold copies that drift, which DeepSpeed averages."""
        return any(category == AVERAGED for _, category in self._categories.find(name))

    def layout(self, name: str, shapes: Sequence[Shape]) -> Layout:
        """Describe how a parameter is cut.

        Args:
            name: The parameter.
            shapes: Shape of its shard on each tensor-parallel rank, as stored.

        Raises:
            CorruptError: The shards do not have the shapes that the metadata says, or several
                patterns contradict each other.
            UnsupportedError: Nothing is said of this parameter, or the writer itself says that
                its layout is not known.
            RuleError: What a user tells of it makes no such shards.
        """
        if self._mesh.size == 1:
            return replicated(shapes[0], mesh=self._mesh)
        reasons = self._unsupported.find(name)
        if reasons:
            raise UnsupportedError(
                f"DeepSpeed marks the layout of the parameter as unknown: {reasons[0][1]}",
                where=self._place(name),
                remedy="save the checkpoint with tensor parallelism of 1",
            )
        found = self._maps.find(name)
        _require_one(found, self._place(name))
        if found and not _is_of_empty_partition(found[0][1], shapes):
            return _as_stored(found[0][1], shapes, self._place(name))
        try:
            layout = self._by_category(name, shapes)
        except LayoutError as error:
            raise CorruptError(
                f"the shards of shapes {', '.join(map(str, shapes))} do not fit what is said of "
                f"them: {error.problem}",
                where=self._place(name),
            ) from error
        if layout is not None:
            return layout
        if self._told is not None:
            return self._told.layout(name, shapes, self._mesh)
        kinds = " and ".join(map(str, dict.fromkeys(shapes)))
        raise UnsupportedError(
            f"nothing in the checkpoint says how {self._mesh.size} tensor-parallel ranks "
            f"hold shards of {kinds}",
            where=self._place(name),
            remedy="give the config.json of the model with --source-config"
            if self._may_be_told
            else f"save it with an affine_map in universal_checkpoint_info, or {ROW_PARALLEL} and "
            f"{REPLICATED}",
        )

    def _by_category(self, name: str, shapes: Sequence[Shape]) -> Layout | None:
        """What the categories say; None where they have not been written."""
        found = [category for _, category in self._categories.find(name)]
        if len(set(found)) > 1:
            raise CorruptError(f"is said to be {' and '.join(found)}", where=self._place(name))
        parts = self._sub_params.find(name)
        _require_one(parts, self._place(name))
        if parts and not found:
            return parts[0][1].layout(shapes, self._mesh)
        category = found[0] if found else None
        if category in {REPLICATED, AVERAGED}:
            return _replicas(shapes, self._mesh, self._place(name))
        if category == ROW_PARALLEL:
            return self._joined(name, shapes, 1)
        if category == TWO_SUB_PARAMS:
            return _two_halves(shapes, self._mesh)
        if not self._has_categories:
            return None
        return self._joined(name, shapes, 0)

    def _joined(self, name: str, shapes: Sequence[Shape], dim: int) -> Layout:
        """Shards side by side along one dimension; a vocabulary loses its padding at the end."""
        first = shapes[0]
        if any(
            len(shape) != len(first) or _without(shape, dim) != _without(first, dim)
            for shape in shapes
        ) or dim >= len(first):
            raise CorruptError(
                f"shards of shapes {', '.join(map(str, shapes))} do not join along dimension {dim}",
                where=self._place(name),
            )
        sizes = [shape[dim] for shape in shapes]
        full = (*first[:dim], sum(sizes), *first[dim + 1 :])
        rows = self._vocabulary_rows
        if not self._vocabulary.find(name) or rows is None or rows == full[0] or dim:
            return split(full, mesh=self._mesh, dim=dim, sizes=sizes)
        if len(set(sizes)) > 1:
            raise UnsupportedError(
                f"a vocabulary of {rows} rows is padded to uneven shards of {sizes} rows",
                where=self._place(name),
            )
        return padded((rows, *full[1:]), mesh=self._mesh, rows=full[0], fill="undefined")

    def _place(self, name: str) -> str:
        return f"{self._where}: tensor {name!r}"


def _is_of_empty_partition(layout: Layout, shapes: Sequence[Shape]) -> bool:
    """Whether a map says nothing of a parameter, although it has elements.

    Under zero.Init a parameter that nobody cut is mapped by the shape of its empty partition
    (deepspeed 0.19.8 `module_inject/layers.py`, `collect_autotp_universal_checkpoint_info`). It is
    in the category of replicated parameters as well, and that holds.
    """
    return layout.full_numel == 0 and any(prod(shape) for shape in shapes)


def _texts(stored: Field | None) -> tuple[str, ...]:
    return () if stored is None else stored.texts()


def _require_one(found: Sequence[tuple[str, object]], where: str) -> None:
    if len(found) > 1:
        raise CorruptError(
            f"matches {len(found)} patterns: {', '.join(repr(text) for text, _ in found[:3])}",
            where=where,
        )


def _without(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _replicas(shapes: Sequence[Shape], mesh: Mesh, where: str) -> Layout:
    if any(shape != shapes[0] for shape in shapes):
        raise CorruptError(
            f"is said to be whole on every rank, the shards have shapes "
            f"{', '.join(map(str, shapes))}",
            where=where,
        )
    return replicated(shapes[0], mesh=mesh)


def _two_halves(shapes: Sequence[Shape], mesh: Mesh) -> Layout:
    """Two sub-parameters of equal size, each cut, side by side in every shard."""
    widths = [shape[0] // 2 for shape in shapes if shape]
    if len(widths) != len(shapes) or any(shape[0] % 2 for shape in shapes):
        raise LayoutError("two halves need an even number of rows in every shard")
    full = (2 * sum(widths), *shapes[0][1:])
    return sub_params(full, mesh=mesh, sizes=[sum(widths)] * 2, widths=[widths] * 2)


def _as_stored(layout: Layout, shapes: Sequence[Shape], where: str) -> Layout:
    """Compare the shards of a map with those that are stored, and give the tensor its own shape.

    Fused parameters are mapped in more dimensions than they have (deepspeed 0.19.8
    `module_inject/layers.py`, SubParamLinearLayer): the stored matrix has the leading ones merged.
    """
    for rank, shape in enumerate(shapes):
        if prod(shape) != layout.shard_numel(rank):
            raise CorruptError(
                f"tp rank {rank} stores a shard of shape {shape}, its affine map is of shape "
                f"{layout.shard_shape(rank)}",
                where=where,
            )
    full, ndim = layout.full_shape, len(shapes[0])
    if all(shape == layout.shard_shape(rank) for rank, shape in enumerate(shapes)):
        return layout
    is_merged = ndim == _MATRIX < len(full) and all(shape[-1] == full[-1] for shape in shapes)
    if not is_merged:
        rank = next(rank for rank, shape in enumerate(shapes) if shape != layout.shard_shape(rank))
        raise CorruptError(
            f"tp rank {rank} stores a shard of shape {shapes[rank]}, its affine map is of shape "
            f"{layout.shard_shape(rank)}",
            where=where,
        )
    return replace(
        layout,
        full_shape=(prod(full[:-1]), full[-1]),
        shard_shapes=tuple(
            (count, (prod(shape[:-1]), shape[-1])) for count, shape in layout.shard_shapes
        ),
    )
