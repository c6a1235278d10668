"""The cut that a checkpoint has, built again on other ranks: one answer, or a refusal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from restride.errors import LayoutError, RuleError
from restride.frozen import Frozen
from restride.layouts.presets import name_pattern
from restride.layouts.recognition import rebuild_on, recognize
from restride.wording import counted

if TYPE_CHECKING:
    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.checkpoint._retarget_source import LayoutEquality, Source
    from restride.layouts.recognition import Recognized

__all__ = ["Families", "Numbers"]

_MOST_NAMED: Final = 3
_DIMENSION: Final = re.compile(r" of dimension \d+")


class Numbers(Frozen):
    """What is known of the model beside the checkpoint: key/value heads and grains.

    Attributes:
        heads: Key/value heads.
        old_grain: Of the run that wrote the checkpoint; 1 keeps nothing together.
        grain: Of the next one.
    """

    heads: int | None = None
    old_grain: int = 1
    grain: int = 1


class _Answer(Frozen):
    """What one family gives on the new ranks: a layout, or why there is none."""

    family: Recognized
    layout: Layout | None
    reason: str = ""


class Families:
    """Builds the cuts of a checkpoint again, and remembers what has several answers.

    Args:
        mesh: The new ranks.
        numbers: What is known of the model.
        same: Compares layouts.
    """

    def __init__(self, mesh: Mesh, numbers: Numbers, same: LayoutEquality) -> None:
        self._mesh = mesh
        self._numbers = numbers
        self._same = same
        self._known: dict[Layout, tuple[_Answer, ...]] = {}
        self._open: dict[tuple[str, Layout], list[Source]] = {}

    def rebuild(self, source: Source) -> tuple[Layout, str] | None:
        """Give the layout of a parameter on the new ranks and the name of its family.

        Returns:
            None where there is not one answer; `require_answers` says so of all of them.
        """
        answers = self._answers(source.layout)
        if self._numbers != Numbers(self._numbers.heads):
            # A grain is kept together, or is not any more: the cut that there is does not say it.
            answers = tuple(answer for answer in answers if not answer.family.may_follow_a_grain)
        layouts = [answer.layout for answer in answers if answer.layout is not None]
        if len(layouts) == len(answers) and layouts:
            first = layouts[0]
            if all(self._same(first, other) for other in layouts[1:]):
                return first, answers[0].family.name
        self._open.setdefault((name_pattern(source.name), source.layout), []).append(source)
        return None

    def require_answers(self, *, why: str = "", remedy: str = "") -> None:
        """Refuse where a parameter has been left without one answer.

        Args:
            why: Why nothing else decides.
            remedy: What would decide; a rule, if nothing is said.

        Raises:
            RuleError: One has; the error says what may be, and how to decide.
        """
        if not self._open:
            return
        (pattern, layout), members = next(iter(self._open.items()))
        count = sum(len(sources) for sources in self._open.values())
        others = f" and {count - 1} more" if count > 1 else ""
        answers = self._answers(layout)
        raise RuleError(
            f"the cut of {counted(layout.rank_count, 'rank')} leaves open that of "
            f"{self._mesh.size}: {_in_words(answers)}{self._of_grains()}" + (why and f"; {why}"),
            where=f"tensor {members[0].name!r}{others}",
            remedy=remedy or f"write a rule (--rules): {_rule(pattern, answers)}",
        )

    def _of_grains(self) -> str:
        old, new = self._numbers.old_grain, self._numbers.grain
        if old == new == 1:
            return ""
        return f", in grains of {new}" + (f" where they were of {old}" if old != new else "")

    def _answers(self, layout: Layout) -> tuple[_Answer, ...]:
        if layout not in self._known:
            families = recognize(layout)
            # The numbers of the model rule families out, but for the last one: its error tells.
            fitting = [family for family in families if self._fits(family, layout)] or families
            self._known[layout] = tuple(self._build(family) for family in fitting)
        return self._known[layout]

    def _fits(self, family: Recognized, layout: Layout) -> bool:
        """Whether a family gives the cut that there is with the numbers of the model."""
        try:
            self._on(family, layout.mesh, self._numbers.old_grain)
        except LayoutError:
            return False
        return True

    def _build(self, family: Recognized) -> _Answer:
        try:
            return _Answer(family, self._on(family, self._mesh, self._numbers.grain))
        except LayoutError as error:
            return _Answer(family, None, error.problem)

    def _on(self, family: Recognized, mesh: Mesh, grain: int) -> Layout:
        return rebuild_on(
            family,
            mesh,
            heads=self._numbers.heads if family.takes == "heads" else None,
            grain=grain if family.takes == "grain" and grain > 1 else None,
        )


def _in_words(answers: tuple[_Answer, ...]) -> str:
    """What may be, in a few words; `restride layouts` has the numbers of each."""
    if not answers:
        return "it is of no family that is known"
    if len(answers) == 1:
        return f"{answers[0].family.name} ({answers[0].reason})"
    # Without the dimension, which is that of the cut, and the numbers.
    texts = [_DIMENSION.sub("", answer.family.text.partition(":")[0]) for answer in answers]
    if len(texts) > _MOST_NAMED:
        texts = [*texts[:_MOST_NAMED], f"{len(texts) - _MOST_NAMED} more"]
    return f"{', '.join(texts[:-1])} or {texts[-1]}"


def _rule(pattern: str, answers: tuple[_Answer, ...]) -> str:
    """A rule that can be pasted: that of the first family, with the number that is missing."""
    layout = answers[0].family.rule_layout if answers else "split"
    number = next((answer.family.takes for answer in answers if answer.family.takes), "")
    missing = number and f", {number} = N"
    return f'rules = [{{match = "{pattern}", layout = "{layout}"{missing}}}]'
