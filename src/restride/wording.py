"""Numbers and sizes in sentences, for errors and findings: one of a thing is not several."""

from __future__ import annotations

from typing import Final

__all__ = ["counted", "enough_size", "format_size", "plural", "told_apart", "which"]

_STEP: Final = 1000


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


def format_size(nbytes: int) -> str:
    """Write bytes with three digits and a decimal unit.

    Examples:
        >>> format_size(999), format_size(282749), format_size(5_000_000_000)
        ('999 B', '283 kB', '5.00 GB')
    """
    if nbytes < _STEP:
        return f"{nbytes} B"
    size, unit = nbytes / _STEP, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        # From 999.5 on it would be written as 1000.
        if size < _STEP - 0.5:
            break
        size, unit = size / _STEP, larger
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0  # noqa: PLR2004
    return f"{size:.{digits}f} {unit}"


def told_apart(*sizes_nbytes: int) -> tuple[str, ...]:
    """Sizes of one sentence: short, or exact where two that differ would look the same.

    Examples:
        >>> told_apart(5_800_000_000, 41024)
        ('5.80 GB', '41.0 kB')
        >>> told_apart(67108865, 67108864)
        ('67,108,865 bytes', '67,108,864 bytes')
    """
    short = tuple(map(format_size, sizes_nbytes))
    if len(set(short)) == len(set(sizes_nbytes)):
        return short
    return tuple(f"{nbytes:,} bytes" for nbytes in sizes_nbytes)


def enough_size(nbytes: int) -> str:
    """A short size to ask for that is not below a number of bytes.

    Examples:
        >>> enough_size(999), enough_size(1159089), enough_size(67_000_000)
        ('999B', '1.16MB', '67MB')
    """
    unit, name = 1, "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if nbytes < unit * _STEP:
            break
        unit, name = unit * _STEP, larger
    return f"{-(-100 * nbytes // unit) / 100:g}{name}"
