"""Which rule of sizes gave the widths that ranks have, and what it gives on other ranks."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.errors import RuleError
from restride.frozen import Frozen
from restride.layouts.sizes import autotp_sizes, chunk_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["RuleName", "SizeRule", "divisors", "fitting_rules"]

RuleName: TypeAlias = Literal["near-even", "heads", "grain", "chunked", "listed"]

_Sizes: TypeAlias = "tuple[int, ...]"

# Beyond so many rows nobody counts heads, and divisors take long to find.
_MOST_ROWS: Final = 1 << 26
_SHOWN: Final = 6


class SizeRule(Frozen):
    """A rule by which rows are cut into widths.

    Attributes:
        name: ``"near-even"`` (the first ranks one more), ``"heads"`` (whole key/value heads),
            ``"grain"`` (whole grains, the rest on the last rank), ``"chunked"`` (rounded up, the
            last ranks short), ``"listed"`` (no rule that is known).
        possible: Head counts or grains with which the rule gives these widths.
    """

    name: RuleName
    possible: tuple[int, ...] = ()

    def widths(
        self, totals: Sequence[int], ranks: int, number: int | None = None
    ) -> tuple[_Sizes, ...]:
        """Cut every total over so many ranks.

        Args:
            totals: Rows to cut, one by one.
            ranks: Ranks.
            number: The head count or the grain, where several are possible.

        Raises:
            RuleError: The rule is none, `number` is not possible, or several are possible and give
                different widths.
        """
        if self.name == "listed":
            raise RuleError(
                "the widths follow no rule that is known",
                remedy="give the widths of the other ranks to split, sub_params or segmented",
            )
        if self.name == "near-even":
            return tuple(autotp_sizes(total, ranks) for total in totals)
        if self.name == "chunked":
            return tuple(chunk_sizes(total, ranks) for total in totals)
        chosen = choose(self.name, self.possible, number)
        found = {self._with(totals, ranks, value): value for value in chosen}
        if len(found) > 1:
            raise undecided(self.name, self.possible, ranks)
        return next(iter(found))

    def _with(self, totals: Sequence[int], ranks: int, value: int) -> tuple[_Sizes, ...]:
        if self.name == "heads":
            return tuple(autotp_sizes(total, ranks, heads=value) for total in totals)
        return tuple(autotp_sizes(total, ranks, grain=value) for total in totals)


def choose(name: str, possible: tuple[int, ...], number: int | None) -> tuple[int, ...]:
    """The numbers that are left when one is given.

    Raises:
        RuleError: The one that is given is not possible.
    """
    if number is None:
        return possible
    if number not in possible:
        raise RuleError(
            f"{number} {name} do not give this layout", remedy=f"possible are {shown(possible)}"
        )
    return (number,)


def undecided(name: str, possible: tuple[int, ...], ranks: int) -> RuleError:
    """The error that says which number has to be known."""
    return RuleError(
        f"{name} may be {shown(possible)}, which are cut differently over {ranks} ranks",
        remedy=f"pass {name}= of the model",
    )


def shown(possible: tuple[int, ...]) -> str:
    """A list of numbers in few words."""
    texts = [str(number) for number in possible[:_SHOWN]]
    more = len(possible) - len(texts)
    return ", ".join(texts) + (f" or {more} more" if more > 0 else "")


def fitting_rules(totals: Sequence[int], widths: Sequence[_Sizes]) -> tuple[SizeRule, ...]:
    """Find every rule that cuts all of `totals` into the widths that there are.

    Returns:
        Rules in the order of how common they are; ``"listed"`` where no other fits.

    Cost:
        That of finding the divisors of the totals: O(sqrt(total)) steps.

    Examples:
        >>> [rule.name for rule in fitting_rules([5], [(2, 2, 1)])]
        ['near-even', 'chunked']
        >>> fitting_rules([48], [(16, 16, 8, 8)])
        (SizeRule(name='heads', possible=(6,)),)
    """
    ranks = len(widths[0])
    given = tuple(widths)
    found: list[SizeRule] = []
    if given == SizeRule("near-even").widths(totals, ranks):
        found.append(SizeRule("near-even"))
    heads = _fitting("heads", divisors(gcd(*totals)), totals, given)
    if found:
        # Heads of one row each are the near-even rule once more.
        heads = tuple(number for number in heads if any(total != number for total in totals))
    if heads:
        found.append(SizeRule("heads", heads))
    if given == SizeRule("chunked").widths(totals, ranks):
        found.append(SizeRule("chunked"))
    if not found:
        shared = gcd(*(width for sizes in given for width in sizes[:-1]))
        grains = _fitting("grain", divisors(shared), totals, given)
        found.append(SizeRule("grain", grains) if grains else SizeRule("listed"))
    return tuple(found)


def _fitting(
    name: Literal["heads", "grain"],
    numbers: Iterable[int],
    totals: Sequence[int],
    widths: tuple[_Sizes, ...],
) -> tuple[int, ...]:
    ranks = len(widths[0])
    return tuple(
        number
        for number in numbers
        if SizeRule(name, (number,)).widths(totals, ranks, number) == widths
    )


def divisors(number: int) -> tuple[int, ...]:
    """Divisors in rising order; none of 0, nor of what is too large to count heads of."""
    return tuple(sorted(_divisors(number))) if 0 < number <= _MOST_ROWS else ()


def _divisors(number: int) -> Iterator[int]:
    step = 1
    while step * step <= number:
        if number % step == 0:
            yield step
            if step * step != number:
                yield number // step
        step += 1
