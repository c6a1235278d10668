"""The form of ZeRO-1 and ZeRO-2 that `elastic_checkpoint` gives: states without hyperparameters.

An engine that resumes from it keeps the hyperparameters that it starts with. Where a checkpoint has
none, that is the form that can be written of it; engines of other stages, and BF16_Optimizer, load
files with hyperparameters alone (deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`).

The engine makes the states of every group after the first one's names, and asks for a step of all
groups, which it leaves out where the optimizer counts in its states (torch's do): it does not load
its own files then. What it asks for is of no use to such an optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError
from restride.formats.deepspeed._writing.groups import scalar_states, states_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.writing import Writing

__all__ = ["STEP", "elastic_findings", "require_elastic", "step_of"]

STEP: Final = "base_optimizer_state_step"
_FLAT_STAGES: Final = (1, 2)
_GIVEN: Final = "give them (--hyperparameters FILE)"


def require_elastic(writing: Writing) -> None:
    """Refuse what no engine loads without hyperparameters.

    Raises:
        UnsupportedError: The engine of the target is of another class, or would lose a state.
        ExecutionError: The step of a parameter cannot be read.
    """
    root, zero = writing.catalog.root, writing.target.zero
    if zero not in _FLAT_STAGES:
        raise UnsupportedError(
            f"has no hyperparameters: elastic_checkpoint leaves them out, and an engine of "
            f"ZeRO-{zero} needs them",
            where=root,
            remedy=f"{_GIVEN}, choose --zero 1 or 2, or convert with --to universal: an engine "
            "that loads either keeps its own",
        )
    if not writing.is_lean:
        raise UnsupportedError(
            "has no hyperparameters: elastic_checkpoint leaves them out, and BF16_Optimizer, which "
            "ds_config in the files asks for, needs them",
            where=root,
            remedy=f"{_GIVEN}, or choose --zero 2",
        )
    first: frozenset[str] | None = None
    for number, group in enumerate(writing.training.groups):
        arrays = () if not group.names else states_of(writing, number, group)
        names = frozenset({*arrays, *scalar_states(writing, number, group), *group.numbers})
        first = names if first is None else first
        if names != first:
            raise UnsupportedError(
                f"has no hyperparameters: elastic_checkpoint leaves them out, and without them an "
                f"engine loads the states of parameter group 0 of all groups; group {number} has "
                f"{', '.join(sorted(names))}, group 0 has {', '.join(sorted(first))}",
                where=root,
                remedy=_GIVEN,
            )


def step_of(writing: Writing) -> Value:
    """The step of all groups that the engine asks for."""
    stored = writing.training.optimizer.get(STEP)
    if stored is not None:
        return stored
    values = writing.training.ranks[0].values
    counted, skipped = values.get("global_steps"), values.get("skipped_steps")
    done = counted if type(counted) is int else 0
    return done - skipped if type(skipped) is int else done


def elastic_findings(writing: Writing) -> Iterator[Finding]:
    """Tell what the engine that resumes has to have of its own."""
    message = (
        "the checkpoint has no hyperparameters (elastic_checkpoint leaves them out): an engine "
        "that resumes must have elastic_checkpoint on, and keeps those of its own configuration; "
        "--hyperparameters FILE gives them"
    )
    yield Finding("warning", "no-settings", message)
    pipeline = writing.training.pipeline
    if pipeline is not None and len(pipeline.stages) > 1:
        message = (
            "without hyperparameters the parameter groups of the pipeline stages are told by their "
            "places alone: the first of one stage is taken for the first of every other one"
        )
        yield Finding("note", "stage-groups", message)
    if writing.training.ranks[0].values.get("lr_scheduler") is not None:
        message = (
            "the learning rate of the schedule is among the hyperparameters that are missing: the "
            "engine takes its first step with the rate that it starts with, and the schedule "
            "counts from there"
        )
        yield Finding("warning", "no-settings", message)
