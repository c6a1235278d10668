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
        parts = [_read_part(text, part) for part in _split(text)]
        # What stands behind the last ``**`` is at the end of the name, each part in its place.
        after = max((n + 1 for n, accepted in enumerate(parts) if accepted is None), default=0)
        self._tail = [accepted for accepted in reversed(parts[after:]) if accepted is not None]
        self._parts = parts[:after]

    def matches(self, name: str) -> bool:
        """Whether the whole name is one that the pattern stands for.

        Cost:
            O(parts of the name * parts of the pattern).
        """
        parts = name.split(".")
        if len(parts) < len(self._tail) or (not self._parts and len(parts) > len(self._tail)):
            return False
        for accepted, part in zip(self._tail, reversed(parts), strict=False):
            if accepted and part not in accepted:
                return False
        # Most patterns have one ``**``, at the start.
        return len(self._parts) < 2 or self._walks(parts[: len(parts) - len(self._tail)])  # noqa: PLR2004

    def _walks(self, parts: list[str]) -> bool:
        """Whether the part of the pattern to its last ``**`` stands for all of these."""
        end = len(self._parts)
        places = self._reach({0})
        for part in parts:
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
