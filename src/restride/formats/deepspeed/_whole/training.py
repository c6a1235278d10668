"""What a ZeRO-0 checkpoint says of its training: groups and optimizer, from the model files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.orders import merged_order
from restride.checkpoint.training import ParameterGroup
from restride.checkpoint.values import difference
from restride.errors import UnsupportedError
from restride.formats.deepspeed._fields import shown
from restride.formats.deepspeed._loss_scaler import ENTRIES, scaler_of_entries
from restride.formats.deepspeed._whole.file import CONSUMED_KEYS
from restride.storage.holders import has_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._whole.states import Whole

__all__ = ["with_whole_optimizer"]

_STEP: Final = "step"

# Of the optimizer's dict, what other stages keep in another form.
_SCALE: Final = frozenset({"dynamic_loss_scale", "overflow", *ENTRIES})


def with_whole_optimizer(training: Training, whole: Whole) -> Training:
    """Add groups and optimizer to what the model files say of a training.

    Args:
        training: The training without its optimizer.
        whole: What the model files hold of the optimizer.

    Raises:
        UnsupportedError: The optimizer's states have no names.
        FormatError: The loss scale is not whole.
    """
    first = whole.ranks[0]
    if whole.problem is not None:
        raise UnsupportedError(
            f"the optimizer's states cannot be matched to the parameters: {whole.problem}",
            where=first.file.where,
            remedy="convert the weights with --to safetensors; save with an optimizer that was "
            "given named_parameters(), or with ZeRO-1",
        )
    state = first.file.state
    optimizer = {
        key: entry.value
        for key, entry in state.items()
        if key not in CONSUMED_KEYS and key not in _SCALE
    }
    if first.file.kind != "bare":
        optimizer |= scaler_of_entries(state, first.model.root.get("ds_config"))
    return replace(training, groups=tuple(_groups(whole)), optimizer=optimizer)


def _groups(whole: Whole) -> Iterator[ParameterGroup]:
    first = whole.ranks[0]
    for number, (names, settings) in enumerate(
        zip(whole.members, first.file.settings, strict=True)
    ):
        yield ParameterGroup(
            names=names,
            settings={key: entry.value for key, entry in settings.items() if key != "params"},
            numbers=_numbers(whole, names, number, is_fused=_is_fused(settings)),
            listed=_listed(whole, number, names),
        )


def _listed(whole: Whole, number: int, order: Sequence[str]) -> tuple[str, ...] | None:
    """Everything that the optimizer numbers: in fp32 that is what the script gave it."""
    by_rank = [rank.listed[number] for rank in whole.ranks]
    if whole.ranks[0].file.kind != "bare" or any(None in names for names in by_rank):
        return None
    known = [[name for name in names if name is not None] for names in by_rank]
    # Ranks number their own experts, and are put together as those that they train.
    return merged_order(known, order) if len({*by_rank}) > 1 else tuple(known[0])


def _is_fused(settings: Field) -> bool:
    """Whether DeepSpeed's fused Adam keeps the group, by its own entries."""
    return {"bias_correction", _STEP} <= {key for key, _ in settings.items()}


def _numbers(
    whole: Whole, names: tuple[str, ...], number: int, *, is_fused: bool
) -> Mapping[str, Value]:
    """States that are no arrays, and of which other stages have one for the whole group.

    The fused Adam counts the step of a group in the state of the last parameter that it looked at,
    and leaves that of the others where it began (deepspeed 0.19.8 `ops/adam/fused_adam.py`).
    """
    found: dict[str, Value] = {}
    for rank in whole.ranks:
        for name in names:
            others = rank.owned[name].others if name in rank.owned else {}
            for key, entry in others.items():
                value = entry.value
                known = found.setdefault(key, value)
                if has_tensor(value) or not difference(value, known):
                    continue
                if is_fused and key == _STEP and type(value) is type(known) is int:
                    found[key] = max(value, known)
                    continue
                raise UnsupportedError(
                    f"state {key!r} of {name!r} is {shown(value)}, of others in parameter "
                    f"group {number} it is {shown(known)}, and a group has one for all",
                    where=entry.where,
                    remedy="convert a checkpoint whose parameters were all trained alike",
                )
    return found
