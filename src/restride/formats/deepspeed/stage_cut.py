"""What a user says of the stages of a pipeline: how its layers are dealt out to them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from msgspec import field

from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PartitionMethod", "StageCut", "read_stage_cut", "read_ties"]

PartitionMethod: TypeAlias = Literal["parameters", "uniform"]
"""A ``partition_method`` of DeepSpeed's PipelineModule that can be computed of a checkpoint."""

_METHODS: Final = get_args(PartitionMethod)
# No pipeline has so many layers, and counting them takes the square of it.
_MOST_LAYERS: Final = 4096
_HOW: Final = (
    "give the first layer of each stage, as 0,3,6, or parameters, uniform, or one of these with "
    "the number of layers, as uniform:9"
)


class StageCut(Frozen):
    """How the layers of a pipeline are dealt out.

    Attributes:
        starts: First layer of each stage, or None.
        method: By what method otherwise; None keeps the stages of the source where their number
            stays, and is ``"parameters"`` where it does not.
        layer_count: Layers in all, those without a file among them; None where it is not said.
        tied: For the key of a tied module, all layers that use it.
    """

    starts: tuple[int, ...] | None = None
    method: PartitionMethod | None = None
    layer_count: int | None = None
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_said(self) -> bool:
        """Whether anything is said of the stages."""
        return self.starts is not None or self.method is not None


def read_stage_cut(
    layers: str | Sequence[int] | None, tied: Mapping[str, Sequence[int]] | None
) -> StageCut:
    """Understand what is said of the stages.

    Args:
        layers: First layer of each stage, or a method, with the number of layers behind a colon
            where that matters.
        tied: For the key of a tied module, all layers that use it.

    Raises:
        UnsupportedError: It is no such thing.

    Examples:
        >>> read_stage_cut("0,3", {"embed": [0, 5]}).starts
        (0, 3)
        >>> read_stage_cut("uniform:9", None).layer_count
        9
    """
    uses = read_ties(tied or {})
    if layers is None:
        return StageCut(tied=uses)
    if not isinstance(layers, str):
        return StageCut(_starts(list(layers), ",".join(map(str, layers))), tied=uses)
    name, colon, count = layers.strip().partition(":")
    for method in _METHODS:
        if name == method and (count.isdecimal() or not colon):
            number = _count(count) if colon else None
            return StageCut(method=method, layer_count=number, tied=uses)
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isdecimal() and len(part) <= len(str(_MOST_LAYERS)) for part in parts):
        is_type = name.startswith("type")
        why = ": a checkpoint has no classes of layers" if is_type else ""
        raise UnsupportedError(f"{layers!r} is no cut into stages{why}", remedy=_HOW)
    return StageCut(_starts([int(part) for part in parts], layers), tied=uses)


def read_ties(tied: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Understand what is said of tied modules: for the key of each, all layers that use it.

    Raises:
        UnsupportedError: It is no such thing.

    Examples:
        >>> read_ties({"embed": [5, 0]})
        {'embed': (0, 5)}
    """
    given: object = tied
    if not isinstance(given, Mapping):
        raise UnsupportedError(
            f"{tied!r:.80} does not say which layers are tied",
            remedy="write it as {'embed': [0, 8]}",
        )
    uses = {key: tuple(sorted(_numbers(numbers, key))) for key, numbers in tied.items()}
    keys: dict[int, str] = {}
    for key, numbers in uses.items():
        for number in numbers:
            if keys.setdefault(number, key) != key:
                raise UnsupportedError(
                    f"layer {number} is said to use both {keys[number]!r} and {key!r}",
                    remedy="name the one module that each layer uses",
                )
    return uses


def _starts(starts: Sequence[int], said: str) -> tuple[int, ...]:
    is_rising = all(first < second for first, second in pairwise(starts))
    if not starts or starts[0] != 0 or not is_rising or starts[-1] > _MOST_LAYERS:
        raise UnsupportedError(
            f"{said!r} are no first layers of stages: they begin with 0, rise, and end at most at "
            f"{_MOST_LAYERS}",
            remedy=_HOW,
        )
    return tuple(starts)


def _count(text: str) -> int:
    count = int(text) if len(text) <= len(str(_MOST_LAYERS)) else _MOST_LAYERS + 1
    if not 1 <= count <= _MOST_LAYERS:
        raise UnsupportedError(
            f"no pipeline has {text} layers", remedy=f"give 1 to {_MOST_LAYERS} layers"
        )
    return count


def _numbers(numbers: Sequence[int], key: str) -> set[int]:
    found = set(numbers)
    if not found or not all(0 <= number <= _MOST_LAYERS for number in found):
        raise UnsupportedError(
            f"{sorted(found)} are no layers that are tied to {key!r}",
            remedy=f"give at least one of 0 to {_MOST_LAYERS}",
        )
    return found
