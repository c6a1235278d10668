"""Patterns of parameter names: ``**.self_attn.{q_proj,k_proj}.{weight,bias}``.

A name is cut at its dots. ``*`` stands for any one part, ``**`` for any number of them, braces for
one of several texts. Nothing else is special, so a pattern is matched in linear time and means what
it looks like.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Final

from restride.errors import RuleError

__all__ = ["NamePattern"]

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_MOST_TEXTS: Final = 256


class NamePattern:
    """One pattern.

    Args:
        text: The pattern.

    Raises:
        RuleError: It is empty, has an empty part, braces that do not close, or a ``*`` inside a
            part.

    Examples:
        >>> pattern = NamePattern("**.attn.{q,k}_proj.weight")
        >>> pattern.matches("h.0.attn.k_proj.weight"), pattern.matches("h.0.attn.v_proj.weight")
        (True, False)
        >>> NamePattern("lm_head.*").matches("model.lm_head.weight")
        False
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts = [_read_part(text, part) for part in _split(text)]

    def matches(self, name: str) -> bool:
        """Whether the whole name is one that the pattern stands for.

        Cost:
            O(parts of the name * parts of the pattern).
        """
        end = len(self._parts)
        places = self._reach({0})
        for part in name.split("."):
            after: set[int] = set()
            for place in places - {end}:
                accepted = self._parts[place]
                if accepted is None:
                    after.add(place)
                elif not accepted or part in accepted:
                    after.add(place + 1)
            places = self._reach(after)
        return end in places

    def _reach(self, places: set[int]) -> set[int]:
        """Add the places behind each ``**``, which may stand for nothing."""
        for place, accepted in enumerate(self._parts):
            if place in places and accepted is None:
                places.add(place + 1)
        return places


def _split(text: str) -> list[str]:
    """Cut at the dots that are outside braces."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == "." and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _read_part(text: str, part: str) -> frozenset[str] | None:
    """Texts that a part takes: an empty set takes any, None any number of parts."""
    if part == "**":
        return None
    if part == "*":
        return frozenset()
    plain = _BRACES.sub("", part)
    if not part or "*" in part or "{" in plain or "}" in plain:
        raise RuleError(
            f"the name pattern {text!r} is not understood at {part!r}",
            remedy="write parts between dots: '*' for one, '**' for any number, {a,b} for one of "
            "several texts",
        )
    pieces = _BRACES.split(part)
    choices = [piece.split(",") if n % 2 else [piece] for n, piece in enumerate(pieces)]
    found = frozenset("".join(texts) for texts in product(*choices[:8]))
    if len(pieces) > 8 or len(found) > _MOST_TEXTS:  # noqa: PLR2004 - four braces in one part
        raise RuleError(f"the name pattern {text!r} has too many alternatives in {part!r}")
    return found
