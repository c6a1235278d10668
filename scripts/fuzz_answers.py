"""Targets of `fuzz.py`: answers of `diff` and `fingerprint`, found again element by element.

A wrong one is no crash: it says "the same" of what differs, or the other way round.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz_arrays import CODES, PLAIN, SHAPES, Stored, some_array, some_bits, write_file
from fuzz_checkpoints import scratch
from fuzz_choices import ByteRandom
from restride.arrays._without_kernel import SlowDigester
from restride.arrays.fingerprint import MODULUS, Digester, finish
from restride.checkpoint.dtypes import DTYPES
from restride.comparison import diff, fingerprint
from restride.testing.fingerprints import digest_slowly
from restride.testing.partitioned_files import write_partitioned_run
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

if TYPE_CHECKING:
    from random import Random

    from restride.checkpoint.dtypes import DType
    from restride.comparison import DiffReport

__all__ = ["answer_seeds", "differences", "digests"]

_BUDGETS = (1 << 22, 1 << 23, 512 << 20)


def answer_seeds() -> list[bytes]:
    """Inputs of many lengths; what they decide has no seeds that are better than others."""
    return [bytes((n * 71 + at * 37) & 255 for at in range(4 << n % 8)) for n in range(48)]


# Differences.

_COMPARED = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint64", "uint16"),
    *("uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"),
)
_TOLERANCES = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.5), (0.25, 0.0), (1e-3, 1e-6), (0.0, 1e300))


def _with_changes(random: Random, array: Stored) -> Stored:
    """The same, but for some elements; now and then of another type or shape."""
    size, content = array.dtype.itemsize_nbytes, bytearray(array.content)
    for _ in range(random.choice((0, 0, 1, 2, 5)) if array.numel else 0):
        at = random.randrange(array.numel) * size
        content[at : at + size] = some_bits(random, array.dtype)
    array = Stored(array.dtype, array.shape, bytes(content))
    kind = random.randrange(8)
    if kind == 0:
        other = DTYPES[random.choice(_COMPARED)]
        return _converted(random, array, other)
    if kind == 1 and len(array.shape) == 2:
        return Stored(array.dtype, array.shape[::-1], array.content)
    return array


def _converted(random: Random, array: Stored, dtype: DType) -> Stored:
    """The same small values in another type where both have them, else any."""
    names = {array.dtype.name, dtype.name}
    if array.numel and names <= {"float64", "float32", "float16"}:
        values = np.frombuffer(array.content, PLAIN[array.dtype.name])
        with np.errstate(all="ignore"):
            return Stored(dtype, array.shape, values.astype(PLAIN[dtype.name]).tobytes())
    return some_array(random, dtype, array.shape)


def _value(bits: bytes, dtype: DType) -> Any:
    """What an element is, as Python has it: bool, int, float or complex."""
    whole = int.from_bytes(bits, "little")
    if dtype.kind == "complex":
        parts = [_value(half, DTYPES["float32"]) for half in (bits[:4], bits[4:])]
        return complex(*parts)
    if dtype.kind == "int":
        return int.from_bytes(bits, "little", signed=True)
    if dtype.kind in {"uint", "bool"}:
        return whole
    wider = {"bfloat16": ("<f4", 2), "float8_e5m2": ("<f2", 1)}
    name, zeros = wider.get(dtype.name, (PLAIN.get(dtype.name), 0))
    if name:
        return float(np.frombuffer(bytes(zeros) + bits, name)[0])
    sign = -1.0 if whole & 0x80 else 1.0
    exponent, fraction = whole >> 3 & 15, whole & 7
    if whole & 0x7F == 0x7F:
        return math.copysign(math.nan, sign)
    scaled = fraction / 8 * 2.0**-6 if not exponent else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return sign * scaled


def _comparable(a: DType, b: DType) -> bool:
    """Whether some type has all values of both."""
    if a.name == b.name or {a.kind, b.kind} == {"float"} or {a.kind, b.kind} == {"complex"}:
        return True
    if {a.kind, b.kind} <= {"int", "uint"}:
        return not any(
            one.name == "uint64" and other.kind == "int" for one, other in ((a, b), (b, a))
        )
    return False


def _is_nan(value: Any) -> bool:
    return bool(value != value)  # noqa: PLR0124


def _gap(a: Any, b: Any) -> int | float:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a - b)
    if all(x == y or (_is_nan(x) and _is_nan(y)) for x, y in _parts(a, b)):
        return 0.0
    with np.errstate(all="ignore"):
        gap = float(np.abs(np.subtract(a, b)))
    return math.inf if math.isnan(gap) else gap


def _is_same(a: Any, b: Any) -> bool:
    """Whether values of two types are: a zero has a sign, and NaNs are all alike."""
    return all(
        (_is_nan(x) and _is_nan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y))
        for x, y in _parts(a, b)
    )


def _parts(a: Any, b: Any) -> tuple[tuple[Any, Any], ...]:
    """Each part of complex numbers is a value; so is what is no complex number."""
    if isinstance(a, complex):
        return (a.real, b.real), (a.imag, b.imag)
    return ((a, b),)


def _size(value: Any) -> float:
    """How large it is, in doubles."""
    with np.errstate(all="ignore"):
        return float(np.abs(np.complex128(value) if isinstance(value, complex) else float(value)))


def _expected(a: Stored, b: Stored, rtol: float, atol: float) -> tuple[Any, ...] | None:
    """How many differ, the first one, both values and the largest gap; None where none does."""
    same_dtype = a.dtype.name == b.dtype.name
    is_exact = not (rtol or atol)
    count, first, largest = 0, -1, 0.0
    for at in _unlike(a, b) if same_dtype else range(a.numel):
        bits = a.element(at), b.element(at)
        values = _value(bits[0], a.dtype), _value(bits[1], b.dtype)
        if not same_dtype and _is_same(*values):
            continue
        gap = _gap(*values)
        if not is_exact:
            allowed = atol + rtol * _size(values[1])
            if gap == 0 or (gap <= allowed and math.isfinite(gap)):
                continue
        count += 1
        first = at if first < 0 else first
        largest = max(largest, gap)
    return (count, first, largest) if count else None


def _unlike(a: Stored, b: Stored) -> list[int]:
    """Elements of which some bit is another one."""
    size = a.dtype.itemsize_nbytes
    raw = (np.frombuffer(one.content, np.uint8).reshape(-1, size) for one in (a, b))
    found: list[int] = np.flatnonzero(np.not_equal(*raw).any(axis=1)).tolist()
    return found


def _require_answer(
    report: DiffReport, ours: dict[str, Stored], theirs: dict[str, Stored], rtol: float, atol: float
) -> None:
    found = {(d.tensor, d.state): d for d in report.differences}
    for name, a in ours.items():
        b = theirs.get(name)
        key = (name, "weight")
        if b is None:
            assert key in report.only_a, f"{name}: only A has it, and nothing says so"
            continue
        told = found.pop(key, None)
        if a.shape != b.shape or not _comparable(a.dtype, b.dtype):
            assert told is not None, f"{name}: other shape or type, and nothing says so"
            assert told.different_numel is None, told
            continue
        right = _expected(a, b, rtol, atol)
        if right is None:
            silent = a.dtype == b.dtype or rtol or atol
            assert (told is None) if silent else (told and told.different_numel == 0), told
            continue
        assert told is not None, f"{name}: {right[0]} elements differ, and nothing says so"
        assert (told.different_numel, told.first_index) == right[:2], (told, right)
        assert told.first_coordinates == tuple(map(int, np.unravel_index(right[1], a.shape)))
        assert told.largest is not None
        assert math.isclose(told.largest, right[2], rel_tol=1e-6), (told, right)
    assert not found, f"differences of what is the same: {[*found.values()]}"
    assert {name for name, _ in report.only_b} == theirs.keys() - ours.keys()


def differences(content: bytes) -> str:
    """Compare two checkpoints, with and without a tolerance, and compare again by hand."""
    random = ByteRandom(content)
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        if random.randrange(4) == 0:
            return _compared_runs(random, place)
        ours = {
            f"a{n}": some_array(random, DTYPES[random.choice(_COMPARED)], random.choice(SHAPES))
            for n in range(random.randrange(1, 4))
        }
        if random.randrange(8) == 0:  # of several steps
            ours["long"] = some_array(random, DTYPES[random.choice(_COMPARED)], (3, 100_000))
        theirs = {name: _with_changes(random, array) for name, array in ours.items()}
        if random.randrange(8) == 0:
            theirs[f"b{random.randrange(4)}"] = theirs.pop("a0")
        for folder, arrays in (("a", ours), ("b", theirs)):
            names = random.sample(sorted(arrays), len(arrays))
            write_file(place / folder / "model.safetensors", arrays, names)
        rtol, atol = random.choice(_TOLERANCES)
        budget = random.choice(_BUDGETS)
        report = diff(place / "a", place / "b", rtol=rtol, atol=atol, budget_nbytes=budget)
        _require_answer(report, ours, theirs, rtol, atol)
    finally:
        shutil.rmtree(place)
    return report.verdict


def _compared_runs(random: Random, place: Path) -> str:
    """A training that is cut over ranks, beside its states that are not, with other elements."""
    run, arrays = _written_run(random, place / "a")
    theirs = dict(arrays)
    for key in random.sample(sorted(arrays), random.randrange(3)):
        theirs[key] = _with_changes(random, arrays[key])
    # In a file called model.safetensors every key would be that of a weight.
    write_file(place / "b" / "all.safetensors", theirs, sorted(theirs))
    rtol, atol = random.choice(_TOLERANCES)
    budget = random.choice(_BUDGETS)
    right = {}
    for key, array in arrays.items():
        other = theirs[key]
        if array.shape != other.shape or not _comparable(array.dtype, other.dtype):
            right[key] = None
        else:
            found = _expected(array, other, rtol, atol)
            if found or (array.dtype != other.dtype and not (rtol or atol)):
                right[key] = (found or (0, None))[:2]
    for turned in (False, True):
        if turned and (rtol or any(v is None for v in right.values())):
            break
        sides = (place / "b", place / "a") if turned else (place / "a", place / "b")
        report = diff(*sides, rtol=rtol, atol=atol, budget_nbytes=budget)
        told: dict[str, Any] = {}
        for one in report.differences:
            key = one.tensor if one.state == "weight" else f"{one.tensor}/{one.state}"
            counts = (one.different_numel, one.first_index)
            told[key] = None if one.different_numel is None else counts
        only = {*report.only_a, *report.only_b} - {(name, "step") for name in run.parameters}
        apart = {k for k, v in right.items() if v is None and theirs[k].shape != arrays[k].shape}
        if not apart:  # a state of another shape is a tensor of its own there
            assert told == right, (told, right)
            assert not only, only
    return f"runs: {report.verdict}"


def _written_run(random: Random, folder: Path) -> tuple[ZeroRun, dict[str, Stored]]:
    run, arrays = _cut_run(random)
    if random.randrange(2):
        write_zero_run(folder, run)
    else:  # no weight is stored: each is its master copy, rounded
        for name in run.parameters:
            arrays[name] = _rounded(arrays[f"{name}/fp32"], arrays[name].dtype)
        write_partitioned_run(folder, run)
    return run, arrays


def _rounded(array: Stored, dtype: DType) -> Stored:
    values = np.frombuffer(array.content, PLAIN[array.dtype.name]).copy()
    bits = values.view(np.uint32)
    bits[np.isnan(values)] |= 1 << 22  # quiet, as the machine makes it; NumPy does not always
    with np.errstate(all="ignore"):
        rounded = values.astype(PLAIN[dtype.name])
    return Stored(dtype, array.shape, rounded.tobytes())


def _cut_run(random: Random) -> tuple[ZeroRun, dict[str, Stored]]:
    dp, tp = random.choice((1, 2, 3)), random.choice((1, 2))
    parameters, arrays = {}, {}
    for number in range(random.randrange(1, 4)):
        rows, columns = random.randrange(2, 7), random.randrange(2, 7)
        dim = random.randrange(2)
        first = random.randrange(1, (rows, columns)[dim])
        cut = (dim, (first, (rows, columns)[dim] - first)) if tp == 2 else None
        name = f"layers.{number}.weight"
        states = {}
        for state, dtype in (
            *(("weight", "float16"), ("fp32", "float32")),
            *(("exp_avg", "float32"), ("exp_avg_sq", "float32")),
        ):
            array = some_array(random, DTYPES[dtype], (rows, columns))
            key = name if state == "weight" else f"{name}/{state}"
            arrays[key] = array
            values = np.frombuffer(array.content, PLAIN[dtype]).reshape(rows, columns)
            states[state] = values
        parameters[name] = Parameter((rows, columns), states, cut)
    return ZeroRun(dp, tp, parameters), arrays


# Digests.


def digests(content: bytes) -> str:
    """Fingerprints of files and of cut runs, against words that are added up one by one."""
    random = ByteRandom(content)
    if random.randrange(2):
        return _in_runs(random)
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        if random.randrange(3) == 0:
            run, arrays = _cut_run(random)
            write_zero_run(place, run)
        else:
            arrays = {f"a{n}": _sparse(random) for n in range(random.randrange(1, 4))}
            write_file(
                place / "model.safetensors", arrays, random.sample(sorted(arrays), len(arrays))
            )
        found = fingerprint(place, budget_nbytes=random.choice(_BUDGETS))
    finally:
        shutil.rmtree(place)
    for key, array in arrays.items():
        name, _, state = key.partition("/")
        right = finish(digest_slowly(array.content), array.dtype.name, array.shape)
        assert found[name][state or "weight"] == right, f"{key} of {array.dtype} {array.shape}"
    return f"{len(arrays)} arrays"


def _in_runs(random: Random) -> str:
    """Any bytes anywhere in an array: the kernel, NumPy and runs of any length agree."""
    nbytes = max(1, random.choice((1, 40, 1 << 10, 1 << 15, 1 << 18, 1 << 19)) + _near(random))
    data = random.choice((random.randbytes(nbytes), b"\xff" * nbytes, bytes(nbytes)))
    start = max(0, random.choice((0, 0, 1 << 18, 3 << 18, 1 << 30, 1 << 40)) + _near(random))
    digester = Digester(random.choice((1, 3, 128)))
    slow = SlowDigester(random.choice((1, 3, 128)))
    whole = digester.digest(data, start)
    assert whole == slow.digest(memoryview(data), start), (nbytes, start)
    places = sorted({0, nbytes, *(random.randrange(nbytes) for _ in range(random.randrange(5)))})
    runs = [(digester, slow)[random.randrange(2)] for _ in places]
    parts = [
        one.digest(memoryview(data)[low:high], start + low)
        for one, (low, high) in zip(runs, pairwise(places), strict=False)
    ]
    assert sum(parts) % MODULUS == whole % MODULUS, (nbytes, start, places)
    return "in runs"


def _near(random: Random) -> int:
    return random.randrange(-40, 41)


def _sparse(random: Random) -> Stored:
    """Mostly zeros, which the slow sum skips, with words near the edges of rows and blocks."""
    dtype = DTYPES[random.choice(sorted(CODES))]
    edge = random.choice((0, 1 << 8, 1 << 10, 1 << 15, 1 << 18, 1 << 19, 3 << 18))
    nbytes = max(0, edge + _near(random))
    numel = nbytes // dtype.itemsize_nbytes
    data = bytearray(numel * dtype.itemsize_nbytes)
    for _ in range(random.randrange(9) if data else 0):
        near = random.choice((0, 1 << 10, 1 << 15, 1 << 18, len(data), random.randrange(len(data))))
        at = min(max(0, near + random.randrange(-20, 20)), len(data) - 1)
        word = random.randbytes(random.randrange(1, 20))
        data[at : at + len(word)] = word[: len(data) - at]
    return Stored(dtype, (numel,), bytes(data))
