"""Targets of `fuzz.py`: what several processes left of an output, and casts of values."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz_checkpoints import StopsAfter, hurt_journal, hurt_unfinished, made_once, scratch, tree
from fuzz_choices import ByteRandom
from restride import api
from restride.arrays.casts import round_once, storage_dtype
from restride.checkpoint.dtypes import DTYPES
from restride.errors import RestrideError
from restride.executors import blocks, manifests, resuming
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE
from restride.testing.hostile_safetensors import safetensors_file
from restride.testing.rounding import nearest_bits, value_of
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from fractions import Fraction
    from random import Random

    from restride.checkpoint.dtypes import DType

__all__ = ["casts", "output_seeds", "team"]

_WAYS: tuple[dict[str, Any], ...] = (
    {"states": "all"},
    {"to": "universal"},
    {"to": "deepspeed", "tp": 1, "dp": 3},
)
_COUNT = 3
_SMALL: dict[str, Any] = {
    "workers": 1,
    "sync_nbytes": 1,
    "budget_nbytes": 1 << 21,
    "durable": False,
}
_WAIT_SECONDS = 20.0
_BLOCK_NBYTES = 4096


def output_seeds() -> list[bytes]:
    """Inputs of many lengths; what they decide has no seeds that are better than others."""
    return [bytes((n * 83 + at * 29) & 255 for at in range(4 << n % 8)) for n in range(48)]


@dataclass(frozen=True)
class _Left:
    """What several processes left that were stopped, and what it would have become."""

    options: dict[str, Any]
    folder: Path
    whole: dict[str, bytes]


@made_once
def _leftovers() -> tuple[_Left, ...]:
    # Parts are made of blocks: so small a checkpoint has several only of small ones.
    for module in (blocks, manifests, resuming):
        vars(module)["BLOCK_NBYTES"] = _BLOCK_NBYTES
    found: list[_Left] = []
    for number, options in enumerate(_WAYS):
        whole = scratch() / f"whole{number}"
        api.convert(SAMPLE, whole, **options, **_SMALL)
        for steps in ((3, 1, 40), (1, 9, 2), (14, 14, 14)):
            out = scratch() / "team" / "out"
            shutil.rmtree(out.parent, ignore_errors=True)
            _together(out, _COUNT, options, steps=steps)
            left = scratch() / f"left{len(found)}"
            if partial_folder(out).exists():
                shutil.move(partial_folder(out), left)
                found.append(_Left(options, left, tree(whole)))
    assert len(found) > 3
    return tuple(found)


def _together(
    out: Path, count: int, options: dict[str, Any], *, steps: Sequence[int] = (), **more: Any
) -> tuple[RestrideError | None, list[BaseException]]:
    """Write with so many processes, which are threads here.

    Returns:
        What the first one refused, and what others died of that is no refusal.
    """
    stops = [Event() for _ in range(count)]

    def one(number: int) -> None:
        watch = StopsAfter(steps[number], stops[number]) if steps else None
        process = (number, count) if count > 1 else None
        api.convert(
            *(SAMPLE, out),
            **{**_SMALL, **options, **more},
            process=process,
            wait_seconds=_WAIT_SECONDS,
            observer=watch,
            stop=stops[number],
        )

    refused = None
    with ThreadPoolExecutor(count) as pool:
        others = [pool.submit(one, number) for number in range(1, count)]
        try:
            one(0)
        except RestrideError as error:
            str(error)
            refused = error
        finally:
            if refused is not None or not steps:
                for stop in stops:
                    stop.set()  # those that wait for the first one, which has ended
        problems = list(_problems(others))
    return refused, problems


def _problems(others: Sequence[Future[None]]) -> Iterator[BaseException]:
    for other in others:
        try:
            error = other.exception(timeout=3 * _WAIT_SECONDS)
        except TimeoutError:
            # Nothing ends such a thread but the end of the process, which is a find.
            traceback.print_stack()
            print("a process waits for ever", file=sys.stderr, flush=True)
            os._exit(70)
        if isinstance(error, RestrideError):
            str(error)
        elif error is not None:
            yield error


def team(content: bytes) -> str:
    """Go on, with any number of processes, with what several left and something is wrong in."""
    random = ByteRandom(content)
    case = random.choice(_leftovers())
    out = scratch() / "team" / "out"
    shutil.rmtree(out.parent, ignore_errors=True)
    partial = partial_folder(out)
    shutil.copytree(case.folder, partial)
    for _ in range(random.randrange(5)):
        _hurt_team(random, partial)
    count = random.choice((1, _COUNT, _COUNT, 2, 5))
    force = random.randrange(6) == 0
    refused, problems = _together(out, count, case.options, resume=not force, force=force)
    for problem in problems:
        raise problem
    if refused is not None:
        assert not os.path.lexists(out), "after an error there is something under the final name"
        return f"not resumed by {count}"
    assert tree(out) == case.whole, "what was resumed is another output"
    assert [*out.parent.iterdir()] == [out], "something was left beside the output"
    return f"resumed by {count}"


def _hurt_team(random: Random, partial: Path) -> None:
    """Spoil what the others noted, as far as there is something; or anything else."""
    number = random.randrange(1, _COUNT + 1)
    journal = partial / f"journal.{number}"
    other = partial / f"journal.{random.randrange(1, _COUNT + 1)}"
    kind = random.randrange(8)
    if kind < 3 and journal.is_file():
        journal.write_bytes(hurt_journal(random, journal))
    elif kind == 3 and journal.is_file() and other.is_file():
        content = journal.read_bytes()
        journal.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == 4:
        journal.unlink(missing_ok=True)
    elif kind == 5:
        kinds = ("hello", "welcome", "lock", "journal", "stop", "members")
        name = random.choice(kinds)
        path = partial / (name if name in {"stop", "members"} else f"{name}.{number}")
        said = {"word": "x", "run": "y", "count": _COUNT, "job": "z", "ended": True}
        path.write_bytes(_record(said) if random.randrange(2) else random.randbytes(9))
    else:
        hurt_unfinished(random, partial)


def _record(value: dict[str, Any]) -> bytes:
    payload = json.dumps(value).encode()
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


# Casts.

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_SAFETENSORS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FIELDS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def _bits(random: Random, dtype: DType) -> int:
    """A bit pattern: at an edge of the type or of a narrower one, or any."""
    exponent_bits, fraction_bits = _FIELDS[dtype.name]
    width = 1 + exponent_bits + fraction_bits
    kind = random.randrange(8)
    if kind < 3:
        return random.getrandbits(width)
    sign = random.randrange(2) << (width - 1)
    top = ((1 << exponent_bits) - 1) << fraction_bits
    low = random.choice((0, 1, 2, 1 << (fraction_bits - 1), (1 << fraction_bits) - 1))
    if kind == 3:
        return sign | top | random.choice((0, low, random.getrandbits(fraction_bits)))
    if kind == 4:
        return sign | low  # no number, or one without a leading bit
    if kind == 5:
        return sign | (top - random.choice((0, 1, 1 << fraction_bits))) & (1 << width - 1) - 1
    # Half way between two values of a narrower type, or just beside: rounding once decides.
    narrow = DTYPES[random.choice(_FLOATS)]
    below = random.getrandbits(sum(_FIELDS[narrow.name]))
    values = [value_of(below + step, narrow) for step in range(2)]
    if values[0] is None or values[1] is None:
        return sign
    middle = nearest_bits((values[0] + values[1]) / 2, dtype)
    return sign | max(0, min(top, middle + random.choice((0, 0, 1, -1, 2, 1 << 12, 1 << 28))))


def _is_nan(bits: int, dtype: DType) -> bool:
    exponent_bits, fraction_bits = _FIELDS[dtype.name]
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    return (bits & ~_sign(dtype)) > infinity


def _sign(dtype: DType) -> int:
    return 1 << sum(_FIELDS[dtype.name])


def _cast_once(bits: int, source: DType, target: DType) -> int:
    """What one rounding makes of a bit pattern that is no NaN, by exact fractions."""
    value: Fraction | str | None = value_of(bits, source)
    sign = "-" if bits & _sign(source) else ""
    if value is None:
        value = f"{sign}inf"
    elif not value:
        value = f"{sign}0"
    return nearest_bits(value, target)


def _cast(bits: int, source: DType, target: DType) -> int:
    if source == target:
        return bits
    if source.name == "float64" and target.itemsize_nbytes == 2:
        single = DTYPES["float32"]
        return _cast_once(_cast_once(bits, source, single), single, target)
    return _cast_once(bits, source, target)


def _require_cast(
    before: Sequence[int], after: Sequence[int], source: DType, target: DType
) -> None:
    assert len(before) == len(after), f"{len(after)} of {len(before)} elements"
    for old, new in zip(before, after, strict=True):
        told = f"{source.name} {old:#x} became {target.name} {new:#x}"
        if _is_nan(old, source):
            assert _is_nan(new, target), told
            assert bool(old & _sign(source)) == bool(new & _sign(target)), told
            assert source != target or old == new, told
        else:
            assert new == _cast(old, source, target), told


def casts(content: bytes) -> str:
    """Convert weights to another type, and hold every element against exact fractions."""
    random = ByteRandom(content)
    if random.randrange(4) == 0:
        return _mean(random)
    source, target = (DTYPES[random.choice(_FLOATS)] for _ in range(2))
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        if source.name == "float16" and random.randrange(2):
            rows = [[_bits(random, source) for _ in range(12)] for _ in range(2)]
            _write_run(place / "in", rows)
            before = rows[0] + rows[1]
        else:
            before = [_bits(random, source) for _ in range(random.choice((0, 1, 7, 40)))]
            raw = np.array(before, f"u{source.itemsize_nbytes}").tobytes()
            entry = {
                "dtype": _SAFETENSORS[source.name],
                "shape": [len(before)],
                "data_offsets": [0, len(raw)],
            }
            (place / "in").mkdir()
            (place / "in" / "model.safetensors").write_bytes(safetensors_file({"a": entry}, raw))
        budget = random.choice((None, 1 << 20, 1 << 18))
        api.convert(
            *(place / "in", place / "out"), dtype=target.name, budget_nbytes=budget, workers=1
        )
        after = _values(place / "out", target)
    finally:
        shutil.rmtree(place)
    _require_cast(before, after, source, target)
    return f"{source.name} to {target.name}"


def _write_run(folder: Path, rows: list[list[int]]) -> None:
    """Two parameters of a training, one of them cut by columns."""
    parameters = {}
    for name, row, cut in (("a", rows[0], (1, (3, 1))), ("b", rows[1], None)):
        weight = np.array(row, np.uint16).view(np.float16).reshape(3, 4)
        with np.errstate(invalid="ignore"):
            wide = weight.astype(np.float32)
        states: dict[str, Any] = {
            "weight": weight,
            "fp32": wide,
            "exp_avg": wide,
            "exp_avg_sq": wide,
        }
        parameters[name] = Parameter((3, 4), states, cut)
    write_zero_run(folder, ZeroRun(2, 2, parameters))


def _values(folder: Path, dtype: DType) -> list[int]:
    """Bit patterns of all tensors of the written file, in the order of their names."""
    content = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    found: list[int] = []
    for name in sorted(set(header) - {"__metadata__"}):
        assert header[name]["dtype"] == _SAFETENSORS[dtype.name]
        first, last = header[name]["data_offsets"]
        raw = content[start + first : start + last]
        found += np.frombuffer(raw, f"u{dtype.itemsize_nbytes}").tolist()
    return found


def _mean(random: Random) -> str:
    """Values that were computed are rounded once, whatever type they go to."""
    double, target = DTYPES["float64"], DTYPES[random.choice(_FLOATS)]
    before = [_bits(random, double) for _ in range(24)]
    values = np.array(before, np.uint64).view(np.float64)
    after = round_once(values, target).view(storage_dtype(target))
    for old, new in zip(before, after.view(f"u{target.itemsize_nbytes}").tolist(), strict=True):
        told = f"{old:#x} was rounded to {target.name} {new:#x}"
        if _is_nan(old, double):
            assert _is_nan(new, target), told
        else:
            assert new == (old if target == double else _cast_once(old, double, target)), told
    return f"rounded to {target.name}"
