"""What a training says of its expert-parallel ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from restride.errors import UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._settings import is_enabled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.training import Training

__all__ = [
    "any_of",
    "expert_rank_count",
    "is_data_first",
    "native_rank_count",
    "stacked_experts",
]

_GROUP_NAME: Final = re.compile(r"ep_size_(\d{1,6})")
_DATA_FIRST: Final = "use_data_before_expert_parallelism"


def expert_rank_count(training: Training) -> int:
    """Expert-parallel ranks of a training; 1 where it has none, or has no experts."""
    sizes = [layer.get("ep_size") for layer in training.experts[:1]]
    said = next((size for size in sizes if isinstance(size, int)), None)
    return native_rank_count(training) if said is None else said


def native_rank_count(training: Training) -> int:
    """The same of DeepSpeed's own layers, by the names of the groups that their experts are in.

    Raises:
        UnsupportedError: There are several.
    """
    found = {
        int(match[1])
        for group in training.groups
        if group.settings.get("moe") is True
        and isinstance(name := group.settings.get("name"), str)
        and (match := _GROUP_NAME.fullmatch(name))
    }
    if len(found) > 1:
        raise UnsupportedError(
            f"has layers with experts on {' and on '.join(map(str, sorted(found)))} ranks",
            where=training.ranks[0].where,
            remedy="save a model whose layers of experts have one ep_size",
        )
    return max(found.pop(), 1) if found else 1


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
