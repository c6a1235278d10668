"""Sizes, rates and times as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from restride.wording import format_size, plural

__all__ = ["format_count", "format_duration", "format_rate", "format_size", "parse_size"]

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)},
}
# Some programs mean thousands, others 1024s.
_UNCLEAR: Final = frozenset("kmgtp")
_BY_LOWER: Final = {name.lower(): factor for name, factor in _UNITS.items()}
_SIZE: Final = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([A-Za-z]*)\s*", re.ASCII)
_MINUTE: Final = 60
_HOUR: Final = 3600


def parse_size(text: str) -> int:
    """Bytes in a size such as ``512MB`` (millions), ``2GiB`` (powers of 1024) or ``4096``.

    A fraction of a byte is dropped, so that a budget is never more than what was said.

    Raises:
        ValueError: The text is no size, leaves open which one, or is less than one byte.

    Examples:
        >>> parse_size("512MB"), parse_size("2 GiB"), parse_size("1.5kb")
        (512000000, 2147483648, 1500)
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match and unit in _UNCLEAR:
        number, prefix = match[1], unit.upper()
        raise ValueError(
            f"{text!r} may be {number}{prefix}B (thousands) or {number}{prefix}iB (1024s); write "
            "which one"
        )
    factor = _BY_LOWER.get(unit)
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write it like 512MB or 2GiB")
    nbytes = int(Fraction(match[1]) * factor)
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return nbytes


def format_rate(nbytes: int, seconds: float) -> str:
    """Write bytes per second; nothing took no time.

    Examples:
        >>> format_rate(3_000_000, 2.0)
        '1.50 MB/s'
    """
    return f"{format_size(round(nbytes / max(seconds, 1e-9)))}/s"


def format_duration(seconds: float) -> str:
    """Write a time as people say it.

    Examples:
        >>> format_duration(0.0421), format_duration(3.21), format_duration(245)
        ('0.04 s', '3.2 s', '4 min 05 s')
        >>> format_duration(7384)
        '2 h 03 min'
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE - 0.05:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"


def format_count(number: int, noun: str) -> str:
    """Write a number of things, in singular or plural.

    Examples:
        >>> format_count(1, "tensor"), format_count(16384, "element"), format_count(2, "copy")
        ('1 tensor', '16,384 elements', '2 copies')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural(noun)}"
