"""A target of `fuzz.py`: ranks that hold different copies, and what is made of them."""

from __future__ import annotations

import shutil
import tempfile
from fnmatch import fnmatchcase
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuzz_checkpoints import scratch
from fuzz_choices import ByteRandom
from restride import api
from restride.comparison import diff, fingerprint
from restride.errors import ReplicaError, RestrideError
from restride.testing.gather import gather
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

if TYPE_CHECKING:
    from random import Random

    from numpy.typing import NDArray

__all__ = ["drift_seeds", "drifted"]

_STATES = ("fp32", "exp_avg", "exp_avg_sq")
_SHAPES = ((1,), (3,), (2, 3), (40,))
_BITS = (0x3F800000, 0x80000000, 0, 1, 0x33800000, 0x47800000, 0x7F7FFFFF, 0x387FC000, 0x477FEFFF)


def drift_seeds() -> list[bytes]:
    """Inputs of many lengths; what they decide has no seeds that are better than others."""
    return [bytes((n * 79 + at * 43) & 255 for at in range(4 << n % 8)) for n in range(48)]


def drifted(content: bytes) -> str:
    """Convert what ranks disagree about, as it is said which copy counts, and count by hand."""
    random = ByteRandom(content)
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        tp, dp = random.choice((2, 2, 3)), random.choice((1, 2, 3))
        copies = _copies(random, tp)
        _write(place, copies, dp)
        root = place / "in"
        _require_told(root, copies)
        kind = random.randrange(4)
        if kind == 0:
            return _taken_by_each(random, place, copies)
        return _decided(random, place, copies, all_states=kind > 1)
    finally:
        shutil.rmtree(place)


_Copies = dict[str, list[dict[str, "NDArray[Any]"]]]


def _copies(random: Random, tp: int) -> _Copies:
    """The states of each parameter that each rank holds whole: weights are rounded masters."""
    found: _Copies = {}
    for number in range(random.randrange(1, 4)):
        shape = random.choice(_SHAPES)
        base = {state: _values(random, shape) for state in _STATES}
        ranks = []
        for rank in range(tp):
            states = {state: values.copy() for state, values in base.items()}
            for state in _STATES if rank and random.randrange(3) else ():
                for _ in range(random.choice((0, 0, 1, 3))):
                    at = random.randrange(states[state].size)
                    states[state].ravel()[at] = _values(random, (1,))[0]
            with np.errstate(over="ignore"):
                states["weight"] = states["fp32"].astype(np.float16)
            ranks.append(states)
        found[f"layers.{number}.bias"] = ranks
    return found


def _values(random: Random, shape: tuple[int, ...]) -> NDArray[np.float32]:
    numel = int(np.prod(shape))
    bits = [random.choice((*_BITS, random.getrandbits(31))) for _ in range(numel)]
    values = np.array(bits, np.uint32).view(np.float32).reshape(shape)
    return np.where(np.isfinite(values), values, np.float32(0.1)).astype(np.float32)


def _write(place: Path, copies: _Copies, dp: int) -> None:
    """One run for each rank, and of each the files of that rank; and one parameter that is cut."""
    tp = len(next(iter(copies.values())))
    whole = np.arange(4 * tp, dtype=np.float32).reshape(tp, 4)
    cut = dict.fromkeys(_STATES, whole) | {"weight": whole.astype(np.float16)}
    for rank in range(tp):
        parameters = {
            name: Parameter(ranks[rank]["fp32"].shape, ranks[rank])
            for name, ranks in copies.items()
        }
        parameters["up.weight"] = Parameter((tp, 4), cut, (0, (1,) * tp))
        write_zero_run(place / f"run{rank}", ZeroRun(dp, tp, parameters))
        (place / "in" / "step").mkdir(parents=True, exist_ok=True)
        for path in (place / f"run{rank}" / "step").glob(f"*mp_rank_{rank:02d}_*"):
            path.rename(place / "in" / "step" / path.name)
        shutil.rmtree(place / f"run{rank}")
    (place / "in" / "latest").write_text("step")


def _is_drifted(ranks: list[dict[str, NDArray[Any]]], state: str) -> bool:
    return any(other[state].tobytes() != ranks[0][state].tobytes() for other in ranks[1:])


def _require_told(root: Path, copies: _Copies) -> None:
    """`check` names exactly the arrays of which there are two, and others do not call it one."""
    wrong = {
        (name, state)
        for name, ranks in copies.items()
        for state in (*_STATES, "weight")
        if _is_drifted(ranks, state)
    }
    found: dict[tuple[str, str], dict[tuple[int, ...], int]] = {}
    for finding in api.check(root).findings:
        if finding.kind == "replica-drift":
            details: Any = finding.details
            counts = found.setdefault((details["tensor"], details["state"]), {})
            counts[tuple(details["ranks"])] = details["different_numel"]
        else:
            assert finding.severity == "note", finding
    assert found.keys() == wrong, (found, wrong)
    verdict = diff(root, root).verdict
    assert verdict == ("incomplete" if wrong else "same"), (verdict, wrong)
    is_refused = False
    try:
        fingerprint(root)
    except ReplicaError:
        is_refused = True
    assert is_refused == bool(wrong), "several copies have one fingerprint, or one has none"


def _decided(random: Random, place: Path, copies: _Copies, *, all_states: bool) -> str:
    tp = len(next(iter(copies.values())))
    choices = ("check", "first", "mean", *(f"tp={rank}" for rank in range(tp)))
    rules = [("*", random.choice(choices))]
    for _ in range(random.randrange(3)):
        pattern = random.choice(("layers.*", "layers.0.bias", "*.bias", "layers.0.bias/exp_avg"))
        rules.append((pattern, random.choice(choices)))
    said: Any = rules[0][1] if len(rules) == 1 else rules
    states = (*_STATES, "weight") if all_states else ("weight",)
    by_array = {(name, state): _rule(rules, name, state) for name in copies for state in states}
    left = [
        key
        for key, decision in by_array.items()
        if decision == "check" and _is_drifted(copies[key[0]], key[1])
    ]
    more = {"states": "all"} if all_states else {}
    budget = random.choice((1 << 19, 1 << 22, None))
    try:
        api.convert(place / "in", place / "out", replicas=said, budget_nbytes=budget, **more)
    except ReplicaError as error:
        if not left:
            raise AssertionError("refused although everything is decided") from error
        return "refused"
    assert not left, f"{left} are written, and nobody said which"
    catalog = api.open(place / "out")
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            if (tensor.name, state) in by_array:
                ranks = copies[tensor.name]
                written = gather(catalog, entry).tobytes()
                right = _right(ranks, state, by_array[tensor.name, state], all_states=all_states)
                assert any(written == one for one in right), f"{tensor.name}/{state} of {said}"
    return "decided"


def _rule(rules: list[tuple[str, str]], name: str, state: str) -> str:
    return next(
        decision
        for pattern, decision in reversed(rules)
        if fnmatchcase(f"{name}/{state}" if "/" in pattern else name, pattern)
    )


def _right(
    ranks: list[dict[str, NDArray[Any]]], state: str, decision: str, *, all_states: bool
) -> list[bytes]:
    """What may be written: several, where sums of three copies depend on their order."""
    if decision in {"check", "first"}:
        return [ranks[0][state].tobytes()]
    if decision.startswith("tp="):
        return [ranks[int(decision[3:])][state].tobytes()]
    if state == "weight" and all_states:
        masters = _means([rank["fp32"] for rank in ranks])
        with np.errstate(over="ignore"):
            return [master.astype(np.float16).tobytes() for master in masters]
    return [mean.tobytes() for mean in _means([rank[state] for rank in ranks])]


def _means(copies: list[NDArray[Any]]) -> list[NDArray[Any]]:
    dtype = copies[0].dtype
    bits = [copy.view(f"u{dtype.itemsize}") for copy in copies]
    agree = np.logical_and.reduce([other == bits[0] for other in bits[1:]])
    found = []
    for order in permutations(copies):
        total = sum(copy.astype(np.float64) for copy in order)
        with np.errstate(over="ignore", under="ignore"):
            mean = (total / len(copies)).astype(dtype)
        found.append(np.where(agree, copies[0], mean).astype(dtype))
    return found


def _taken_by_each(random: Random, place: Path, copies: _Copies) -> str:
    """Each rank goes on with what it had, whatever the other axes are."""
    zero = random.choice((1, 2))
    out = place / "own"
    try:
        api.convert(
            place / "in", out, to="deepspeed", dp=random.choice((1, 2)), zero=zero, replicas="own"
        )
    except RestrideError as error:
        raise AssertionError("each rank's own is refused") from error
    for rank in range(len(next(iter(copies.values())))):
        taken = place / f"taken{rank}"
        api.convert(out, taken, states="all", replicas=f"tp={rank}")
        catalog = api.open(taken)
        for tensor in catalog.tensors:
            for state, entry in tensor.states.items():
                if tensor.name in copies and state in copies[tensor.name][rank]:
                    right = copies[tensor.name][rank][state].tobytes()
                    assert gather(catalog, entry).tobytes() == right, (rank, tensor.name, state)
    return "own"
