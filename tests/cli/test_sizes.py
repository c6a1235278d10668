"""Sizes, rates and times are read and written as people do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restride.cli.sizes import (
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4096B", 4096),
        ("512MB", 512_000_000),
        ("512mb", 512_000_000),
        ("2GiB", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("1.5kB", 1500),
        ("0.5KiB", 512),
        ("0.3KiB", 307),
        ("1TB", 10**12),
        ("1PiB", 1 << 50),
        ("512Mi", 512 << 20),
    ],
)
def test_a_size_is_read_with_decimal_and_binary_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1.2.3MB", "5 bytes", "1e6", "NaN", "0", "0.2B", "٣MB", "9" * 5000]
)
def test_what_is_no_size_is_refused_with_what_was_said(text: str) -> None:
    with pytest.raises(ValueError, match=r"no size|less than one byte") as caught:
        parse_size(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["10g", "10 G", "5G", "1.5m"])
def test_a_size_that_may_be_two_names_both(text: str) -> None:
    number, prefix = text[:-1].strip(), text[-1].upper()

    with pytest.raises(ValueError, match="write which one") as caught:
        parse_size(text)

    assert f"{number}{prefix}B (thousands) or {number}{prefix}iB (1024s)" in str(caught.value)


@given(st.integers(min_value=1, max_value=10**18))
def test_a_written_size_is_within_half_a_percent(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.005)


@given(st.integers(min_value=1, max_value=10**17))
def test_a_written_size_is_short(nbytes: int) -> None:
    number, unit = format_size(nbytes).split()

    assert len(number) <= 4
    assert float(number) < 1000
    assert unit in {"B", "kB", "MB", "GB", "TB", "PB"}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB")],
)
def test_a_unit_changes_where_the_number_would_need_four_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_a_rate_over_no_time_is_still_a_number() -> None:
    assert format_rate(1, 0.0).endswith("B/s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_a_duration_is_written_in_the_units_people_use(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_one_thing_is_singular_and_no_thing_is_plural() -> None:
    assert format_count(1, "entry") == "1 entry"
    assert format_count(0, "entry") == "0 entries"
    assert format_count(1234, "rank") == "1,234 ranks"
