"""The order in which the model gives its parameters to the optimizer, as model files tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from restride.formats.deepspeed._settings import group_order, is_round_robin

if TYPE_CHECKING:
    from restride.formats.deepspeed.model_files import ModelFiles
    from restride.formats.universal._optimizer_state import OptimizerState

__all__ = ["in_order"]


def in_order(models: ModelFiles, state: OptimizerState) -> list[list[list[str]]]:
    """Names in each entry of ``param_shapes``, for each tensor-parallel rank.

    Ranks that lack a parameter deal the others out in another order, so that only what is not dealt
    out is the same on all of them.

    Args:
        models: The model files.
        state: The optimizer's state, which tells of the class that wrote it.

    Raises:
        CorruptError: A group mixes experts with other parameters.
    """
    # BF16_Optimizer, which says no stage, knows of no round robin, whatever is configured.
    is_dealt_out = state.root.get("zero_stage") is not None and not models.is_partitioned
    found: list[list[list[str]]] = []
    for model in models.run.models:
        shapes = [list(names) for names in model.param_shapes or ()]
        if is_dealt_out and is_round_robin(model.root.get("ds_config")):
            shapes = [group_order(names, models.partition_count(names)) for names in shapes]
        found.append(shapes)
    return found
