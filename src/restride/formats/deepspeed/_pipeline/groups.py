"""The parameter groups of a pipeline, put together over its stages.

Every stage has an optimizer of its own. A script gives all of them the same groups, and the engine
throws away those that are empty on a stage (deepspeed 0.19.8 `runtime/engine.py`,
`_configure_optimizer`): what is group 1 of one stage may be group 0 of the next. Where stages do
not have the same groups in the same places, a group is told by its settings.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.checkpoint.orders import merged_order
from restride.checkpoint.training import ParameterGroup
from restride.errors import CorruptError, RestrideError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._values import JsonWriter, read_bytes
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.checkpoint.values import Value

__all__ = ["merged_groups", "require_one_order"]

_Groups = tuple[ParameterGroup, ...]


def merged_groups(stages: Sequence[_Groups], order: Iterable[str], where: str) -> _Groups:
    """List the groups of all stages, each once, with its members on all of them.

    Args:
        stages: The groups of each stage.
        order: Names of the module in its order.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: The stages have different groups, and those of one stage cannot be told
            apart; or what is one number for a group is another one on another stage.
        CorruptError: Two stages have the same groups in different orders.
        ExecutionError: A setting is a tensor that cannot be read.
    """
    if len(stages) == 1:
        return stages[0]
    known = tuple(order)
    keyed = _keyed(stages, where)
    merged: list[ParameterGroup] = []
    for key in merged_order([list(groups) for groups in keyed]):
        held = [groups[key] for groups in keyed if key in groups]
        _require_alike(held, where)
        names = _merged([group.names for group in held], known)
        first = next((group for group in held if group.names), held[0])
        merged.append(replace(first, names=names, listed=_listed(held, known)))
    return tuple(merged)


def require_one_order(stages: Sequence[_Groups], where: str) -> None:
    """Refuse groups of which no stage says in which order an optimizer has them.

    Raises:
        UnsupportedError: No stage has two of them, which a stage of another cut would have.
        CorruptError, ExecutionError: As for `merged_groups`.
    """
    keyed = [list(groups) for groups in _keyed(stages, where)]
    after = {pair for keys in keyed for pair in pairwise(keys)}
    for first, second in pairwise(merged_order(keyed)):
        if (first, second) not in after:
            raise UnsupportedError(
                "no stage has all parameter groups, so that nothing says in which order an "
                "optimizer of other stages has them",
                where=where,
                remedy="keep the stages of the source, or convert with --to universal",
            )


def _keyed(stages: Sequence[_Groups], where: str) -> list[dict[str, ParameterGroup]]:
    """The groups of each stage under keys that are the same for the same group."""
    with FilePool() as pool:
        texts = [[_text(group.settings, pool) for group in groups] for groups in stages]
    if all(own == texts[0] for own in texts):
        return [{f"{n:06}": group for n, group in enumerate(groups)} for groups in stages]
    for stage, own in enumerate(texts):
        if len(set(own)) < len(own):
            raise UnsupportedError(
                f"pipeline stage {stage} has {len(own)} parameter groups, others have "
                "different ones, and two of its groups have the same settings: nothing tells "
                "which group of another stage is which",
                where=where,
                remedy="train with the same parameter groups on every stage, or with different "
                "settings in each group",
            )
    return [dict(zip(own, groups, strict=True)) for own, groups in zip(texts, stages, strict=True)]


def _listed(groups: Sequence[ParameterGroup], order: Iterable[str]) -> tuple[str, ...] | None:
    """All that a script gave to the optimizers of all stages, where each of them tells."""
    told = [group.listed for group in groups if group.listed is not None]
    return _merged(told, order) if len(told) == len(groups) else None


def _merged(by_stage: Sequence[Sequence[str]], order: Iterable[str]) -> tuple[str, ...]:
    """Members of a group on all stages.

    Only what is tied is on several of them, and each has its tied modules in the order of its own
    first uses: where these contradict each other, the order of the checkpoint is as good as any.
    """
    known = tuple(order)
    try:
        return merged_order(by_stage, known)
    except CorruptError:
        places = {name: place for place, name in enumerate(known)}
        names = dict.fromkeys(chain.from_iterable(by_stage))
        return tuple(sorted(names, key=lambda name: places.get(name, len(places))))


def _require_alike(groups: Sequence[ParameterGroup], where: str) -> None:
    """What a group has once must be the same on all stages: it is written once."""
    trained = [group for group in groups if group.names]  # the others have no step
    with FilePool() as pool:
        texts = [_text(group.numbers, pool) for group in trained]
    for group, text in zip(trained, texts, strict=True):
        if text != texts[0]:
            raise UnsupportedError(
                f"the parameter group of {group.names[0]!r} has {_shown(group)}, on another "
                f"pipeline stage that of {trained[0].names[0]!r} has {_shown(trained[0])}",
                where=where,
                remedy="convert a checkpoint whose parameters were all trained alike",
            )


def _shown(group: ParameterGroup) -> str:
    plain = (int, float, str, bool, type(None))
    return ", ".join(
        f"{key} {value!r}" if isinstance(value, plain) else key
        for key, value in group.numbers.items()
    )


def _text(entries: Mapping[str, Value], pool: FilePool) -> str:
    """Entries in a form that can be compared, with the bytes of small tensors in it."""
    writer = JsonWriter(partial(read_bytes, pool))
    try:
        found = {key: writer.of(Field(value, key)) for key, value in entries.items()}
    except RestrideError as error:
        raise error.located("param_groups") from None
    return json.dumps(found, sort_keys=True)
