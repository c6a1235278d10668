r"""Parameter patterns, matched in linear time.

Universal checkpoints name parameters by regular expressions. Most are ``^escaped name$``; older
ones, written by hand, have a ``\d+`` in the middle. A file is hostile until proved otherwise, and
a backtracking matcher takes hours for a pattern of thirty characters: so this one walks the name
once, with a set of positions in the pattern.

Understood are literals, escapes, ``.``, classes such as ``[123]`` and ``[^a-z]``, ``\d \w \s``
and their opposites, the quantifiers ``* + ?``, and the anchors. As in ``re.match``, a pattern
without ``$`` matches a prefix. Everything else is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Pattern", "PatternTable", "literal_name", "parse_pattern"]

_T = TypeVar("_T")
_LONGEST: Final = 1024
_SPECIAL: Final = frozenset("()|{}[]^$*+?.\\")
# Almost all: every letter stands for itself, or is escaped to do so.
_SPELLED_OUT: Final = re.compile(r"\^?((?:[^()|{}\[\]^$*+?.\\]++|\\[\W_])*+)\$")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_CLASSES: Final[dict[str, str]] = {"d": r"\d", "w": r"\w", "s": r"\s"}


class _Atom(Frozen):
    """One position of a pattern: which characters it takes, and how often."""

    takes: Callable[[str], bool]
    is_optional: bool = False
    is_repeated: bool = False


class Pattern(Frozen):
    """A parsed pattern.

    Attributes:
        text: As it was written.
        atoms: What it takes, in order.
        is_whole: Whether the name must end where the pattern does.
    """

    text: str
    atoms: tuple[_Atom, ...]
    is_whole: bool

    def matches(self, name: str) -> bool:
        """Whether the pattern matches `name` from its start.

        Cost:
            O(len(name) * len(pattern)).
        """
        end = len(self.atoms)
        places = self._reach({0})
        for letter in name:
            if end in places and not self.is_whole:
                return True
            after: set[int] = set()
            for place in places:
                if place < end and self.atoms[place].takes(letter):
                    after.add(place if self.atoms[place].is_repeated else place + 1)
                    after.add(place + 1)
            places = self._reach(after)
            if not places:
                return False
        return end in places

    def _reach(self, places: set[int]) -> set[int]:
        """Add the positions that are reached without taking a letter."""
        reached = set(places)
        for place, atom in enumerate(self.atoms):
            if place in reached and atom.is_optional:
                reached.add(place + 1)
        return reached


def parse_pattern(text: str) -> Pattern:
    r"""Parse a pattern.

    Raises:
        UnsupportedError: It has groups, alternatives, counts or look-arounds, or is too long.

    Examples:
        >>> parse_pattern(r"^layers\.\d+\.bias$").matches("layers.12.bias")
        True
    """
    if len(text) > _LONGEST:
        raise UnsupportedError(f"a parameter pattern of {len(text)} characters is not understood")
    body = text.removeprefix("^")
    is_whole = body.endswith("$") and not _is_escaped(body, len(body) - 1)
    if is_whole:
        body = body[:-1]
    return Pattern(text, tuple(_atoms(text, body)), is_whole)


def literal_name(text: str) -> str | None:
    r"""The name that a pattern spells out to its end, or None where it is another kind of pattern.

    Examples:
        >>> literal_name(r"^wte\.weight$")
        'wte.weight'
    """
    match = _SPELLED_OUT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    if "\\\\" in match[1]:
        return _ESCAPED.sub(r"\1", match[1])
    return match[1].replace("\\", "")  # none of them stands for itself


class PatternTable(Generic[_T]):
    """Patterns with what they stand for; names that are written out are found directly.

    Args:
        entries: (pattern, value) pairs.

    Raises:
        UnsupportedError: A pattern is not understood.
    """

    def __init__(self, entries: Iterable[tuple[str, _T]]) -> None:
        self._named: dict[str, list[tuple[str, _T]]] = {}
        self._patterns: list[tuple[Pattern, _T]] = []
        for text, value in entries:
            name = literal_name(text)
            if name is None:
                self._patterns.append((parse_pattern(text), value))
            else:
                self._named.setdefault(name, []).append((text, value))

    def find(self, name: str) -> list[tuple[str, _T]]:
        """Return every (pattern, value) that matches `name`."""
        return self._named.get(name, []) + [
            (pattern.text, value) for pattern, value in self._patterns if pattern.matches(name)
        ]


def _atoms(text: str, body: str) -> Iterator[_Atom]:
    place = 0
    while place < len(body):
        atom, place = _atom(text, body, place)
        mark = body[place : place + 1]
        if mark and mark in "*+?":
            place += 1
            # A lazy or possessive mark changes which match is found, not whether there is one...
            # but a possessive one may forbid it: neither is written by anybody, so neither is read.
            if body[place : place + 1] in {"?", "+", "*"}:
                raise _not_understood(text, body[place - 1 : place + 1])
            atom = _Atom(atom.takes, mark in "*?", mark in "*+")
        yield atom


def _atom(text: str, body: str, place: int) -> tuple[_Atom, int]:
    letter = body[place]
    if letter == "\\":
        return _escape(text, body[place + 1 : place + 2]), place + 2
    if letter == ".":
        return _Atom(lambda character: character != "\n"), place + 1
    if letter == "[":
        stop = body.find("]", place + 2)
        inside = body[place + 1 : stop]
        if stop < 0 or "[" in inside or "\\" in inside:
            raise _not_understood(text, body[place:])
        return _class(text, f"[{inside}]"), stop + 1
    if letter in _SPECIAL:
        raise _not_understood(text, letter)
    return _Atom(letter.__eq__), place + 1


def _escape(text: str, letter: str) -> _Atom:
    if letter.lower() in _CLASSES:
        return _class(text, "\\" + letter)
    if not letter or letter.isalnum():
        raise _not_understood(text, "\\" + letter)
    return _Atom(letter.__eq__)


def _class(text: str, expression: str) -> _Atom:
    """A class takes one letter, which Python's own matcher decides in constant time."""
    try:
        compiled = re.compile(expression)
    except re.error:
        raise _not_understood(text, expression) from None
    return _Atom(lambda character: compiled.fullmatch(character) is not None)


def _is_escaped(body: str, place: int) -> bool:
    before = body[:place]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _not_understood(text: str, part: str) -> UnsupportedError:
    return UnsupportedError(
        f"the parameter pattern {text[:80]!r} is not understood at {part[:20]!r}",
        remedy="literals, '.', classes, '*', '+', '?' and '$' are",
    )
