"""What a training says of its expert-parallel ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._settings import is_enabled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.training import ParameterGroup, Training

__all__ = [
    "any_of",
    "expert_rank_count",
    "is_data_first",
    "native_rank_count",
    "native_rank_counts",
    "stacked_experts",
]

_GROUP_NAME: Final = re.compile(r"ep_size_([1-9]\d{0,5})")
_DATA_FIRST: Final = "use_data_before_expert_parallelism"


def expert_rank_count(training: Training) -> int:
    """Expert-parallel ranks of a training, the largest number where layers are on several.

    It is 1 where there are none, or there are no experts.
    """
    sizes = [layer.get("ep_size") for layer in training.experts[:1]]
    said = next((size for size in sizes if isinstance(size, int)), None)
    return max(native_rank_counts(training), default=1) if said is None else said


def native_rank_counts(training: Training) -> tuple[int, ...]:
    """The numbers of ranks that experts of DeepSpeed's own layers are on, as their groups say."""
    sizes = {native_rank_count(group) for group in training.groups}
    return tuple(sorted(size for size in sizes if size is not None))


def native_rank_count(group: ParameterGroup) -> int | None:
    """The same of one group; None where it has no such experts."""
    name = group.settings.get("name") if group.settings.get("moe") is True else None
    match = _GROUP_NAME.fullmatch(name) if isinstance(name, str) else None
    return int(match[1]) if match else None


def stacked_experts(training: Training) -> frozenset[str]:
    """Names of the stacked parameters of AutoEP's layers."""
    said = (layer.get("expert_key_prefix") for layer in training.experts)
    prefixes = [prefix for prefix in said if isinstance(prefix, str)]
    return frozenset(f"{prefix}.{weight}" for prefix in prefixes for weight in ("w1", "w2", "w3"))


def is_data_first(training: Training) -> bool:
    """Whether neighbouring ranks hold the same experts."""
    config = training.ranks[0].values.get("ds_config")
    said = config.get(_DATA_FIRST) if isinstance(config, dict) else None
    return is_enabled(Field(said, f"ds_config[{_DATA_FIRST!r}]"))


def any_of(numbers: Sequence[int]) -> str:
    """Write numbers of which one is to be chosen.

    Examples:
        >>> any_of([1, 2, 4]), any_of([1])
        ('1, 2 or 4', '1')
    """
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
