"""Numbers of things in sentences, for errors and findings: one of them is not several."""

from __future__ import annotations

__all__ = ["counted", "plural", "which"]


def plural(noun: str) -> str:
    """The word for several.

    Examples:
        >>> plural("rank"), plural("copy"), plural("array")
        ('ranks', 'copies', 'arrays')
    """
    return f"{noun[:-1]}ies" if noun.endswith(("py", "ry")) else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """A number of things.

    Examples:
        >>> counted(1, "parameter group"), counted(0, "rank"), counted(2, "copy")
        ('1 parameter group', '0 ranks', '2 copies')
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def which(number: int, one: str, several: str) -> str:
    """The word that goes with a number of things.

    Examples:
        >>> which(1, "is", "are"), which(3, "is", "are")
        ('is', 'are')
    """
    return one if number == 1 else several
