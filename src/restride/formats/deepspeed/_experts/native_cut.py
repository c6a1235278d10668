"""How tensor-parallel ranks hold the experts of DeepSpeed's own layers: whole, or a part of each.

A model says it when its layers are built (`enable_expert_tensor_parallelism`), and files of several
tensor-parallel ranks show it. It decides which ranks share an expert: among all ranks where they
are whole, among those of each tensor-parallel rank where they are cut (deepspeed 0.19.8
`moe/layer.py`, `_create_process_groups`). For another number of ranks the cut is found as that of
all other parameters; a layout that cuts an expert says that they are cut, and otherwise the files
of the source do. Where it has one tensor-parallel rank only rules can say anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.errors import UnsupportedError
from restride.formats.deepspeed._experts.native import expert_name
from restride.formats.deepspeed._rank_blocks import block_of
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = [
    "are_cut",
    "held_before",
    "names_on_ranks",
    "on_tensor_ranks",
    "require_said",
    "require_saved",
]

_TP: Final = "tp"
_PRESET: Final = "preset"


def on_tensor_ranks(catalog: Catalog) -> Catalog:
    """A catalog in which experts are over the tensor-parallel ranks alone, as all else is.

    Args:
        catalog: What the checkpoint holds. Its other tensors stay as they are.
    """
    mesh = Mesh(((_TP, _ranks(catalog)),))
    tensors = tuple(
        replace(tensor, layout=_on(mesh, tensor.layout)) if expert_name(tensor.name) else tensor
        for tensor in catalog.tensors
    )
    return replace(catalog, tensors=tensors)


def held_before(tensor: TensorEntry) -> int:
    """Elements that a rank of the source has of a tensor of an expert."""
    layout = tensor.layout
    return next(filter(None, map(layout.shard_numel, range(layout.rank_count))), 0)


def names_on_ranks(catalog: Catalog) -> dict[str, str | None]:
    """What the rank of the source that holds an expert calls each of its tensors, by name.

    Nothing that is said of such a name counts where whole experts are beside tensor-parallel ranks:
    these have others under it.

    Args:
        catalog: What the checkpoint holds.
    """
    parts = {t.name: own for t in catalog.tensors if (own := expert_name(t.name)) is not None}
    counts: dict[str, int] = {}
    for prefix, number, _ in parts.values():
        counts[prefix] = max(counts.get(prefix, 0), number + 1)
    found: dict[str, str | None] = {}
    for tensor in catalog.tensors:
        if tensor.name in parts:
            prefix, number, rest = parts[tensor.name]
            axes = dict(tensor.layout.mesh.axes)
            is_apart = "ep" in axes and _TP not in axes and _ranks(catalog) > 1
            held = counts[prefix] // axes.get("ep", 1)
            found[tensor.name] = None if is_apart else f"{prefix}.{number % held}.{rest}"
    return found


def require_said(names: Iterable[str], how: Mapping[str, str]) -> None:
    """Refuse what the preset of a model says of experts: none has layers of this kind.

    Args:
        names: Names of tensors.
        how: What decided how each is cut.

    Raises:
        UnsupportedError: It was asked.
    """
    asked = next((n for n in names if expert_name(n) and how[n].startswith(_PRESET)), None)
    if asked is not None:
        raise UnsupportedError(
            f"is of an expert of DeepSpeed's own MoE layer, which {how[asked]} knows nothing of",
            where=f"tensor {asked!r}",
            remedy="write a rule for the experts (--rules): their layout, or whole",
        )


def are_cut(catalog: Catalog, cuts: Mapping[str, Layout]) -> bool:
    """Whether tensor-parallel ranks of a target cut experts.

    Args:
        catalog: The source.
        cuts: How they hold each tensor of an expert.
    """
    for layout in {*cuts.values()}:
        if not same_layout(layout, replicated(layout.full_shape, mesh=layout.mesh)):
            return True
    return any(_is_cut(tensor.layout) for tensor in catalog.tensors if expert_name(tensor.name))


def require_saved(
    target: DeepSpeedTarget, *, is_cut: bool, is_data_first: bool, where: str
) -> None:
    """Refuse ranks of which the engine cannot be made, or that it does not save all of.

    Of experts that are whole it saves what the first rank with each has: files of other
    tensor-parallel ranks are there only if that rank has all of them among the first ones, and
    without them neither it nor anything else resumes from what it saves (deepspeed 0.19.8
    `runtime/engine.py`, `_save_moe_checkpoint`, which returns before the model file).

    Raises:
        UnsupportedError: The target has such ranks.
    """
    if target.tp == 1:
        return
    if is_cut:
        if target.dp % target.ep:
            raise UnsupportedError(
                f"{target.dp} data-parallel ranks cannot be divided into groups of "
                f"{target.ep} expert-parallel ones, which is what they are where tensor-parallel "
                "ranks cut the experts",
                where=where,
                remedy="choose --dp as a multiple of --ep",
            )
        return
    ranks = target.dp * target.tp
    if is_data_first and target.ep != ranks:
        raise UnsupportedError(
            f"is of a run with use_data_before_expert_parallelism, and with {target.tp} "
            f"tensor-parallel ranks, {target.ep} expert-parallel ones of {ranks} and whole experts "
            "DeepSpeed saves the model file of the first alone: nothing resumes from what such a "
            "run saves next",
            where=where,
            remedy=f"choose --tp 1, or --ep {ranks}",
        )
    if target.ep % target.tp:
        raise UnsupportedError(
            f"with {target.tp} tensor-parallel ranks, {target.ep} expert-parallel ones and whole "
            "experts DeepSpeed saves neither all model files nor all experts that its ranks load: "
            "nothing resumes from what such a run saves next",
            where=where,
            remedy=f"choose --ep as a multiple of --tp ({target.tp}, {2 * target.tp}, ...), or "
            "--tp 1",
        )


def _ranks(catalog: Catalog) -> int:
    return dict(catalog.mesh.axes).get(_TP, 1)


def _is_cut(layout: Layout) -> bool:
    """Whether files of every tensor-parallel rank had an expert."""
    axes = dict(layout.mesh.axes)
    return axes.get(_TP, 1) > 1


def _on(mesh: Mesh, layout: Layout) -> Layout:
    """How the tensor-parallel ranks of the source hold a tensor of an expert."""
    if not _is_cut(layout):
        return replicated(layout.full_shape, mesh=mesh)
    ranks = range(layout.rank_count)
    held = next((rank for rank in ranks if layout.shard_numel(rank)), 0)
    return block_of(layout, held // mesh.size * mesh.size, mesh)
