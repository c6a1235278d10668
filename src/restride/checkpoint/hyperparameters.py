"""Hyperparameters that a user gives, where the checkpoint left them out.

With `elastic_checkpoint` DeepSpeed saves none: neither learning rates nor anything else of the
parameter groups. What stands in ``ds_config`` does not tell them: groups have settings of the
script's own, and a schedule has changed the rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup, Pipeline, Training
    from restride.checkpoint.values import Value

__all__ = ["with_hyperparameters"]

_RATE: Final = "lr"


def with_hyperparameters(
    training: Training, given: Sequence[Mapping[str, Value]], where: str
) -> tuple[Training, Finding]:
    """Give the parameter groups of a training their settings.

    Args:
        training: That of the source, which has none.
        given: The settings of each group, in the order of the optimizer; of one for all of them.
        where: What they were read from, for errors.

    Returns:
        The training with them, and a note that says where they come from.

    Raises:
        UnsupportedError: The training has its own, or has other groups, or a group no learning
            rate.
    """
    count = len(training.groups)
    if any(group.settings for group in training.groups):
        raise UnsupportedError(
            "hyperparameters are given, and the checkpoint has its own: only elastic_checkpoint "
            "leaves them out",
            where=where,
            remedy="leave them out as well",
        )
    if len(given) != count:
        raise UnsupportedError(
            f"has the settings of {counted(len(given), 'parameter group')}, the checkpoint has "
            f"{count}",
            where=where,
            remedy="give a list with one object for each group, in the optimizer's order",
        )
    for number, settings in enumerate(given):
        if _RATE not in settings:
            raise UnsupportedError(
                f"has no 'lr' for parameter group {number}, and every optimizer has one",
                where=where,
                remedy="give all that the optimizer's param_groups have, without 'params'",
            )
    groups = tuple(
        replace(group, settings={key: value for key, value in own.items() if key != "params"})
        for group, own in zip(training.groups, given, strict=True)
    )
    rates = ", ".join(f"{own[_RATE]!r}" for own in given)
    message = (
        f"the settings of the {counted(count, 'parameter group')} are those of {where}: lr {rates}"
    )
    given_to = replace(training, groups=groups, pipeline=_staged(training, groups))
    return given_to, Finding("note", "hyperparameters", message, where)


def _staged(training: Training, groups: Sequence[ParameterGroup]) -> Pipeline | None:
    """The stages of a pipeline with the settings of its groups.

    Without settings nothing else tells groups apart, and all stages have the same number of them.
    """
    pipeline = training.pipeline
    if pipeline is None:
        return None
    return replace(
        pipeline,
        stages=tuple(
            replace(
                stage,
                groups=tuple(
                    replace(own, settings=group.settings)
                    for own, group in zip(stage.groups, groups, strict=True)
                ),
            )
            for stage in pipeline.stages
        ),
    )
