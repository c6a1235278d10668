"""Whether a layer of a pipeline can be tied where nothing is told, by the shapes that are numbered.

A stage numbers its tied modules first, whatever layers they are of, and then its own. So if at no
place where a tied module may be, another layer has the shapes that are numbered there, then the
tied modules of a stage are its own first layers. None of them is on two stages, and as many numbers
as parameters leave none out: the numbers are what they are where nothing is tied. Layers are taken
to be frozen as a whole, or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Shape

__all__ = ["Tied", "Tokens", "most_alike", "none_can_be_tied"]

Tokens: TypeAlias = "tuple[tuple[Shape, ...], ...]"
"""Of parameters one after the other the shapes on all tensor-parallel ranks."""

_Kinds: TypeAlias = "dict[tuple[Shape, ...], Counter[Tokens]]"


@dataclass(frozen=True, slots=True)
class Tied:
    """A layer that may be tied, or not.

    Attributes:
        tokens: Its parameters, one at least.
        may_be: Whether nothing says that it is not.
    """

    tokens: Tokens
    may_be: bool


def most_alike(layers: Sequence[Tied]) -> int:
    """How many parameters the different kinds of layers have at most that begin with one shape."""
    found: Counter[tuple[Shape, ...]] = Counter()
    for tokens in {layer.tokens for layer in layers}:
        found[tokens[0]] += len(tokens)
    return max(found.values(), default=0)


def none_can_be_tied(
    stages: Sequence[tuple[Tokens, Sequence[Tied]]], layers: Sequence[Tied]
) -> bool:
    """Tell whether the numbers of all stages are what they are where nothing is tied.

    Args:
        stages: What each of them numbers: all parameters of these layers, in their order.
        layers: Those of all stages.

    Cost:
        O(numbers * `most_alike`).

    Examples:
        >>> table, block, norm = (Tied((((n, 2),),), True) for n in (7, 4, 2))
        >>> first = (table.tokens + block.tokens, [table, block])
        >>> none_can_be_tied([first, (norm.tokens, [norm])], [table, block, norm])
        True
        >>> none_can_be_tied([first, (block.tokens, [block])], [table, block, block])
        False
    """
    kinds: _Kinds = defaultdict(Counter)
    for layer in layers:
        kinds[layer.tokens[0]][layer.tokens] += layer.may_be
    return all(_are_first(tokens, own, kinds) for tokens, own in stages)


def _are_first(tokens: Tokens, layers: Sequence[Tied], kinds: _Kinds) -> bool:
    """Whether the tied modules of a stage can only be its own first layers."""
    fitting = [_fitting_at(place, tokens, kinds) for place in range(len(tokens))]
    ends = {len(tokens)}  # from here on there may be whole layers
    for place in range(len(tokens))[::-1]:
        if any(place + len(kind) in ends for kind in fitting[place]):
            ends.add(place)
    place = 0
    for own in layers:
        for kind, count in fitting[place].items():
            others = count - (own.may_be and kind == own.tokens)
            if others and place + len(kind) in ends:
                return False
        if not own.may_be:
            break
        place += len(own.tokens)
    return True


def _fitting_at(place: int, tokens: Tokens, kinds: _Kinds) -> Mapping[Tokens, int]:
    """Kinds of layers that have the shapes of a place, and how many of each may be tied."""
    known: Mapping[Tokens, int] = kinds.get(tokens[place], {})
    return {own: n for own, n in known.items() if tokens[place : place + len(own)] == own}
