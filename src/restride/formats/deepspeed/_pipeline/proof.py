"""Whether a layer of a pipeline can be tied where nothing is told, by the shapes that are numbered.

A stage numbers its tied modules first, whatever layers they are of, and then its own. Any parameter
may be frozen and have no number. The numbers of each stage are taken for its own layers in their
order, of which they have the shapes. Look at the layers that a stage has before the first one that
is sure not to be tied, and at the first number of that one. If no other layer that may be tied has
a parameter of the shape that is numbered there, no number is of a tied module of another stage: the
first such number would be at one of these places. So no parameter has two numbers, as many numbers
as parameters leave none out, and stages have their layers whole and in their order.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.algebra.layout import Shape

__all__ = ["Tied", "Tokens", "none_can_be_tied"]

Tokens: TypeAlias = "tuple[tuple[Shape, ...], ...]"
"""Of parameters one after the other the shapes on all tensor-parallel ranks."""


class Tied(Frozen):
    """A layer that may be tied, or not.

    Attributes:
        tokens: Its parameters, one at least.
        may_be: Whether nothing says that it is not.
    """

    tokens: Tokens
    may_be: bool


def none_can_be_tied(stages: Sequence[Sequence[Tied]]) -> bool:
    """Tell whether the numbers of all stages are what they are where nothing is tied.

    Args:
        stages: The layers of each, of which its numbers have all shapes in their order.

    Cost:
        O(parameters).

    Examples:
        >>> table, block, norm = (Tied((((n, 2),),), True) for n in (7, 4, 2))
        >>> none_can_be_tied([[table, block], [norm]])
        True
        >>> none_can_be_tied([[table, block], [block, norm]])
        False
    """
    holders = Counter(
        chain.from_iterable({*own.tokens} for layers in stages for own in layers if own.may_be)
    )
    return all(_are_first(layers, holders) for layers in stages)


def _are_first(layers: Sequence[Tied], holders: Counter[tuple[Shape, ...]]) -> bool:
    """Whether the tied modules of a stage can only be its own first layers."""
    for own in layers:
        if not own.may_be:
            return not holders[own.tokens[0]]
        if any(holders[token] > 1 for token in own.tokens):
            return False
    return True
