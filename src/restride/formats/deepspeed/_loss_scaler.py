"""The loss scale, in the two forms that DeepSpeed keeps it: an object, or entries of a dict.

The ZeRO optimizers pickle an object of their own class; the wrappers without ZeRO save its numbers
as entries of their own state (deepspeed 0.19.8 `runtime/fp16/loss_scaler.py`,
`runtime/fp16/unfused_optimizer.py`). A `Training` has the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.checkpoint.values import Constructed, GlobalName
from restride.errors import FormatError
from restride.formats.deepspeed._fields import Field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.checkpoint.values import Value

__all__ = ["ENTRIES", "entries_of_scaler", "scaler_of_entries"]

_MODULE: Final = "deepspeed.runtime.fp16.loss_scaler"
_STATIC: Final = GlobalName(_MODULE, "LossScaler")
_DYNAMIC: Final = GlobalName(_MODULE, "DynamicLossScaler")
_MOVING: Final = ("last_overflow_iter", "scale_factor", "scale_window")

ENTRIES: Final = frozenset({"cur_scale", "cur_iter", *_MOVING})
"""What a wrapper saves of the scale, beside ``dynamic_loss_scale``."""


def scaler_of_entries(state: Field, config: Field | None) -> dict[str, Value]:
    """Make the object and its flag from the entries that a wrapper saved.

    What the wrapper does not count (the hysteresis) starts anew, as it does whenever one of its own
    checkpoints is resumed.

    Args:
        state: The wrapper's dict.
        config: ``ds_config``, for the limits of a scale that moves.

    Raises:
        FormatError: An entry is missing.
    """
    flag = state.get("dynamic_loss_scale")
    is_dynamic = flag is not None and flag.value is True
    scale = state.get("cur_scale")
    numbers: dict[Value, Value] = {"cur_scale": 1.0 if scale is None else scale.value}
    if not is_dynamic:
        static = Constructed(_STATIC, state={**numbers, "dynamic": False}, is_new=True)
        return {"loss_scaler": static, "dynamic_loss_scale": False, "overflow": False}
    section = config.get("fp16") if config is not None and config.is_mapping else None
    hysteresis = _setting(section, "hysteresis", 2)
    scaler = Constructed(
        _DYNAMIC,
        state={
            **{key: state.at(key).value for key in ("cur_scale", "cur_iter", *_MOVING)},
            "min_scale": _setting(section, "min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": hysteresis,
            "consecutive_hysteresis": _setting(section, "consecutive_hysteresis", default=False),
            "raise_error_at_min_scale": True,
            "dynamic": True,
            "dtype": GlobalName("torch", "float16"),
        },
        is_new=True,
    )
    return {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}


def entries_of_scaler(optimizer: Mapping[str, Value], steps: int, where: str) -> dict[Value, Value]:
    """Make the entries of a wrapper from the object.

    Args:
        optimizer: State of the optimizer as a whole; without a scaler the scale is 1.
        steps: Steps so far: a scale that does not move does not count them.
        where: Checkpoint, for errors.

    Raises:
        FormatError: The object is none that is known.
    """
    stored = optimizer.get("loss_scaler")
    if stored is None:
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": steps}
    scaler = Field(stored, f"{where}: loss_scaler")
    is_dynamic = scaler.attribute("dynamic").value
    entries: dict[Value, Value] = {
        "dynamic_loss_scale": is_dynamic,
        "cur_scale": scaler.attribute("cur_scale").value,
        "cur_iter": steps,
    }
    if type(is_dynamic) is not bool:
        raise FormatError(
            f"a loss scaler is expected, found one with dynamic={is_dynamic!r}", where=scaler.where
        )
    if is_dynamic:
        entries |= {key: scaler.attribute(key).value for key in ("cur_iter", *_MOVING)}
    return entries


def _setting(section: Field | None, key: str, default: Value) -> Value:
    stored = section.get(key) if section is not None and section.is_mapping else None
    return default if stored is None else stored.value
