"""What in a run's configuration decides how its flat buffers are laid out (deepspeed 0.19.8)."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._fields import Field

__all__ = [
    "group_order",
    "is_bf16",
    "is_enabled",
    "is_offloaded",
    "is_round_robin",
    "optimizer_type",
    "parameter_alignment",
    "round_robin_order",
    "uses_bf16_optimizer",
    "zero_setting",
]

_T = TypeVar("_T")
_ALIGNED_NBYTES: Final = 16
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_FLOAT32: Final = frozenset({"torch.float32", "fp32", "float32", "float"})


def zero_setting(config: Field | None, key: str) -> Field | None:
    """An entry of ``zero_optimization``, where there is one."""
    if config is None or not config.is_mapping:
        return None
    section = config.get("zero_optimization")
    return section.get(key) if section is not None and section.is_mapping else None


def is_round_robin(config: Field | None) -> bool:
    """Whether the parameters of ZeRO-1/2 are dealt out to the partitions in turn."""
    return is_enabled(zero_setting(config, "round_robin_gradients"))


def parameter_alignment(config: Field | None, itemsize_nbytes: int) -> int:
    """Elements to a multiple of which each parameter of a ZeRO-1/2 buffer is padded."""
    if not is_enabled(zero_setting(config, "parameter_alignment")):
        return 1
    return _ALIGNED_NBYTES // gcd(_ALIGNED_NBYTES, itemsize_nbytes)


def is_bf16(config: Field | None) -> bool:
    """Whether the run trains in bfloat16, which is in the names of its optimizer files."""
    for key in ("bf16", "bfloat16"):
        section = config.get(key) if config is not None and config.is_mapping else None
        if section is not None and section.is_mapping and is_enabled(section.get("enabled")):
            return True
    return False


def uses_bf16_optimizer(config: Field | None, zero: int) -> bool:
    """Whether an engine with this configuration wraps its optimizer in BF16_Optimizer.

    That is the class of ZeRO-1 with gradients in float32 (`_do_optimizer_sanity_check`). It knows
    neither round robin nor alignment, and cuts no padding off.
    """
    if zero != 1 or not is_bf16(config) or config is None:
        return False
    types = config.get("data_types")
    gradients = types.get("grad_accum_dtype") if types is not None and types.is_mapping else None
    spelled = gradients.value if gradients is not None else None
    if not isinstance(spelled, str) or spelled not in _FLOAT32:
        return False
    return _offload_device(config) != "cpu"


def is_offloaded(config: Field | None) -> bool:
    """Whether the optimizer of ZeRO-1/2 works on the CPU, away from the weights."""
    return _offload_device(config) not in {None, "none"}


def is_enabled(setting: Field | None) -> bool:
    """Whether a switch is there, and on, in one of the spellings that pydantic takes for true."""
    if setting is None:
        return False
    value = setting.value
    return value.lower() in _TRUE if isinstance(value, str) else value in (True, 1)


def optimizer_type(config: Field | None) -> str | None:
    """Class of the optimizer that the configuration asks for; None where a script makes it."""
    section = config.get("optimizer") if config is not None and config.is_mapping else None
    name = section.get("type") if section is not None and section.is_mapping else None
    return name.value.lower() if name is not None and isinstance(name.value, str) else None


def _offload_device(config: Field | None) -> Value:
    if is_enabled(zero_setting(config, "cpu_offload")):
        return "cpu"  # as it was spelled once, and still may be
    offload = zero_setting(config, "offload_optimizer")
    device = offload.get("device") if offload is not None and offload.is_mapping else None
    return None if device is None else device.value


def round_robin_order(members: Sequence[_T], count: int) -> list[_T]:
    """Deal out parameters to `count` partitions: 0, n, 2n, ..., then 1, n + 1, ...

    Examples:
        >>> round_robin_order("abcde", 2)
        ['a', 'c', 'e', 'b', 'd']
    """
    return [members[turn] for first in range(count) for turn in range(first, len(members), count)]


def group_order(members: Sequence[_T], count: int) -> list[_T]:
    """Undo `round_robin_order`.

    Examples:
        >>> group_order(round_robin_order("abcde", 2), 2)
        ['a', 'b', 'c', 'd', 'e']
    """
    turns = round_robin_order(range(len(members)), count)
    return [member for _, member in sorted(zip(turns, members, strict=True), key=lambda p: p[0])]
