"""The experts of a checkpoint, of whichever kind, placed for the ranks of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from restride.errors import UnsupportedError
from restride.formats.deepspeed._writing.autoep_target import PlacedExperts, place_stacked
from restride.formats.deepspeed._writing.native_target import PlacedNative, place_native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.training import Training
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["Placed", "place_experts"]

Placed: TypeAlias = PlacedExperts | PlacedNative


def place_experts(
    catalog: Catalog,
    training: Training,
    target: DeepSpeedTarget,
    layouts: Mapping[str, Layout],
) -> Placed | None:
    """Place the experts of a checkpoint on the ranks of a target, or return None where it has none.

    Args:
        catalog: What the checkpoint holds.
        training: What goes with the tensors.
        target: The ranks.
        layouts: How its tensor-parallel ranks hold tensors that are no stacks.

    Raises:
        FormatError, CorruptError: What is said of the layers is wrong.
        UnsupportedError: The target has expert-parallel ranks and the checkpoint no layers of
            experts that a rank may have a part of; the experts do not divide; or DeepSpeed cannot
            resume from such a checkpoint.
        ExecutionError: A file cannot be read.
    """
    if training.experts:
        return place_stacked(catalog, training, target)
    native = place_native(catalog, training, target, layouts)
    if native is None and target.ep > 1:
        raise UnsupportedError(
            "has no layers of experts of AutoEP or of deepspeed.moe.layer.MoE, and "
            f"{target.ep} expert-parallel ranks are asked for",
            where=catalog.root,
            remedy="leave out --ep; tensor-parallel ranks cut experts as other weights",
        )
    return native
