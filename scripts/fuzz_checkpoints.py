"""Targets of `fuzz.py`: whole checkpoints that tell lies, and outputs that are not finished."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fuzz_choices import ByteRandom, changed, changed_bytes, renamed
from fuzz_readers import changed_config, changed_rules
from restride import api
from restride.checkpoint.manifest import MANIFEST_NAME
from restride.comparison import diff, fingerprint
from restride.errors import RestrideError, StoppedError
from restride.executors.events import NullObserver
from restride.storage.journal import read_journal
from restride.storage.torch_zip import open_torch_zip
from restride.storage.unfinished import partial_folder
from restride.testing.command_line import SAMPLE
from restride.testing.partitioned_files import write_partitioned_run
from restride.testing.saved_values import save_file
from restride.testing.whole_files import rounded_run, write_whole_run
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

__all__ = [
    "Base",
    "StopsAfter",
    "bases_of",
    "checkpoint_seeds",
    "deepspeed",
    "hurt_journal",
    "hurt_unfinished",
    "made_once",
    "resume",
    "scratch",
    "tree",
    "universal",
]

_ROOT = Path(__file__).resolve().parents[1]
_STATES = ("weight", "fp32", "exp_avg", "exp_avg_sq")
_NAMES = (
    *("", ".", "..", "../x", "/x", "a/b", "a\\b", "\0", "é" * 200, "x" * 300, "fp32", "module"),
    *("a/fp32", "b\nc", "*", "[ab]", "(", "tied_modules.x.y", "0.weight", "latest", " ", "\x1b[2J"),
)
_BUDGETS = (None, 1 << 20, 1 << 18)
# What is asked for now and then: most checkpoints have no experts, and no stages.
_RARE: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 3, 4),
    "pp": (1, 2, 3),
    "pp_layers": ("uniform", "parameters", (1, 2), (2, 1, 1), (0, 9)),
    "plan": (False, True),
    "optimizer_transform": (False, True),
    "zero_init": (False, True),
    "grain": (1, 2, 64),
}
_CHANGES = (0, 1, 1, 1, 2, 4)
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it, to spare the disk


@lru_cache
def scratch() -> Path:
    """A folder of this process, in memory where that is possible; the caller's child removes it."""
    place = os.environ.get("RESTRIDE_FUZZ_SCRATCH")
    return Path(place or tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None))


_Made = TypeVar("_Made")


def made_once(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """Keep what a target starts from; where that is refused, it is no refusal of an input."""

    @lru_cache
    @wraps(make)
    def made() -> _Made:
        try:
            return make()
        except RestrideError as error:
            raise AssertionError("what the target starts from is refused") from error

    return made


@dataclass(frozen=True)
class Base:
    """A right checkpoint, whose files are decoded when they are first changed."""

    root: Path
    files: tuple[str, ...]
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Base:
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return cls(root, tuple(name for name in files if "reference" not in name))

    def value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = open_torch_zip(self.root / name).value
        return self.values[name]


def _parameter(shape: tuple[int, ...], first: int, cut: Any = None, group: int = 0) -> Parameter:
    states = {state: distinct(shape, first + 100 * n) for n, state in enumerate(_STATES)}
    states["weight"] = states["fp32"].astype(np.float16)
    return Parameter(shape, states, cut, group)


def _run(dp: int, tp: int, **options: Any) -> ZeroRun:
    widths = {1: (4,), 2: (3, 1), 3: (2, 0, 2)}[tp]
    parameters = {
        "layers.0.up.weight": _parameter((4, 3), 0, (0, widths)),
        "layers.0.down.weight": _parameter((3, 4), 20, (1, widths)),
        "bias": _parameter((2,), 50),
        "norm.weight": _parameter((3,), 40, group=1),
        "layers.1.up.weight": _parameter((4, 3), 60, (0, widths)),
    }
    return ZeroRun(dp, tp, parameters, **options)


def _written() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Small checkpoints of every kind that the test kit writes."""
    plain = _run(2, 2)
    yield "zero", lambda folder: write_zero_run(folder, plain)
    uneven = _run(3, 3, alignment=4, is_round_robin=True)
    yield "dealt", lambda folder: write_zero_run(folder, uneven)
    yield "elastic", lambda folder: write_zero_run(folder, _run(2, 1, writer="elastic"))
    bf16 = _run(2, 2, writer="bf16_optimizer")
    yield "bf16", lambda folder: write_zero_run(folder, bf16)
    old = _run(2, 1, has_mappings=False)
    yield "old", lambda folder: write_zero_run(folder, old)
    yield "partitioned", lambda folder: write_partitioned_run(folder, _run(2, 1))
    for kind in ("bare", "unfused", "flat"):
        run = rounded_run(_run(1, 2), kind)
        yield kind, lambda folder, run=run, kind=kind: write_whole_run(folder, run, kind)  # type: ignore[misc]


@made_once
def _deepspeed_bases() -> tuple[Base, ...]:
    bases = [SAMPLE]
    for name, write in _written():
        folder = scratch() / "bases" / name
        write(folder)
        api.open(folder)
        bases.append(folder)
    recorded = sorted((_ROOT / "tests/data").glob("deepspeed*/*"))
    return tuple(map(Base.of, [*bases, *recorded]))


def bases_of(kind: str) -> tuple[Base, ...]:
    """The small right checkpoints, and the universal folders that are made of them."""
    return _deepspeed_bases() if kind == "deepspeed" else _universal_bases()


@lru_cache
def _real_bases() -> tuple[Base, ...]:
    """The larger ones that may be laid out beside the repository."""
    shared = os.environ.get("RESTRIDE_SHARED", _ROOT.parent / "shared")
    return tuple(Base.of(p) for p in sorted(Path(shared, "checkpoints").glob("*")) if p.is_dir())


@made_once
def _universal_bases() -> tuple[Base, ...]:
    bases: list[Base] = []
    for base in _deepspeed_bases():
        for stage in (1, 3):
            out = scratch() / "bases" / f"universal{len(bases)}"
            try:
                api.convert(base.root, out, to="universal", stage=stage)
            except RestrideError:
                continue
            if stage == 1:
                (out / MANIFEST_NAME).unlink()  # it tells of every lie
            bases.append(Base.of(out))
    assert len(bases) > 10
    return tuple(bases)


def checkpoint_seeds() -> list[bytes]:
    """Every base, with decisions of several kinds behind it."""
    return [bytes([base, *[37 * n + base & 255] * 96]) for base in range(64) for n in range(3)]


def deepspeed(content: bytes) -> str:
    """Open, check and convert a DeepSpeed checkpoint in which some things are wrong."""
    random = ByteRandom(content)
    small, real = _deepspeed_bases(), _real_bases()
    return _lying(random, random.choice(real if real and random.randrange(8) == 0 else small))


def universal(content: bytes) -> str:
    """Open, check and convert a universal folder in which some things are wrong."""
    random = ByteRandom(content)
    return _lying(random, random.choice(_universal_bases()))


def _lying(random: Random, base: Base) -> str:
    place = Path(tempfile.mkdtemp(dir=scratch()))
    try:
        if not _write_lies(random, base, place / "in"):
            return "cannot be spelled"
        return _use(random, place)
    finally:
        shutil.rmtree(place)


def _write_lies(random: Random, base: Base, folder: Path) -> bool:
    """Write the checkpoint anew: links to what is right, files of their own for what is not."""
    lies = _rename(random, base) if random.randrange(6) == 0 else {}
    for _ in range(random.choice(_CHANGES)):
        name = random.choice(base.files)
        if name.endswith(".pt"):
            lies[name] = changed(random, lies.get(name, base.value(name)))
    for name in base.files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in lies:
            try:
                save_file(path, lies[name])
            except (TypeError, ValueError, OverflowError, KeyError):
                return False  # The kit cannot write it: no torch.save would have, either.
        else:
            path.symlink_to(base.root / name)
    if random.randrange(4) == 0:
        _hurt_files(random, base, folder)
    if random.randrange(6) == 0:
        (folder / "config.json").write_bytes(changed_config(random))
    return True


def _rename(random: Random, base: Base) -> dict[str, Any]:
    """Give tensors other names, the same in all files: two may have one, or no name at all."""
    values = {name: base.value(name) for name in base.files if name.endswith(".pt")}
    known = sorted({key for value in values.values() for key in _module(value)})
    names: dict[str, str] = {}
    for _ in range(random.choice((1, 1, 2))) if known else ():
        old, new = random.choice(known), random.choice((*_NAMES, random.choice(known)))
        names |= {old: new, f"^{re.escape(old)}$": f"^{re.escape(new)}$"}
    return {name: renamed(value, names) for name, value in values.items()} if names else {}


def _module(value: Any) -> list[str]:
    module = value.get("module") if isinstance(value, dict) else None
    return [key for key in module if isinstance(key, str)] if isinstance(module, dict) else []


def _hurt_files(random: Random, base: Base, folder: Path) -> None:
    """Lose a file, cut it, give it another name or the content of another one."""
    one, two = random.choice(base.files), random.choice(base.files)
    path = folder / one
    content = path.read_bytes()
    path.unlink()
    kind = random.randrange(5)
    if kind == 1:
        path.write_bytes(content[: random.randrange(len(content) + 1)])
    elif kind == 2:
        path.write_bytes(changed_bytes(random, content))
    elif kind == 3:
        path.write_bytes((base.root / two).read_bytes())
    elif kind == 4:
        digits = [n for n, letter in enumerate(path.name) if letter.isdigit()]
        name = list(path.name)
        if digits:
            name[random.choice(digits)] = random.choice("0129")
        renamed = path.with_name("".join(name))
        renamed.unlink(missing_ok=True)  # it may be a link: nobody writes through it
        renamed.write_bytes(content)


def _use(random: Random, place: Path) -> str:
    """Everything that a command would do with a folder; what it writes is held against it."""
    root, out = place / "in", place / "out"
    try:
        api.open(root)
    except RestrideError as error:
        str(error)
        return "not opened"
    budget = random.choice(_BUDGETS)
    if random.randrange(3) == 0:
        _quietly(lambda: api.check(root, budget_nbytes=budget))
    if random.randrange(8) == 0:
        _quietly(lambda: fingerprint(root))
    options = _options(random)
    if options["to"] == "deepspeed" and random.randrange(6) == 0:
        (root / "rules.toml").write_text(changed_rules(random), errors="replace")
        options["rules"] = root / "rules.toml"
    if random.randrange(8) == 0:
        wanted = {k: v for k, v in options.items() if k != "replicas"}
        _quietly(lambda: api.dry_run(root, out, api.Wanted(**wanted), budget_nbytes=budget))
        assert not out.exists(), "a dry run wrote something"
    try:
        api.convert(root, out, budget_nbytes=budget, workers=1, **options)
    except RestrideError as error:
        str(error)
        left = sorted(path.name for path in place.iterdir())
        assert left == ["in"], f"after an error there is {left}"
        return "opened, not converted"
    try:
        _require_same(root, out, options)
    except RestrideError as error:
        raise AssertionError("what was written is refused") from error
    return f"converted to {options['to']}"


def _options(random: Random) -> dict[str, Any]:
    replicas = random.choice(("check", "check", "first", "mean", "own"))
    kind = random.randrange(4)
    if kind == 0:
        dtype = random.choice((None, None, "bfloat16", "float32"))
        return {"to": "safetensors", "dtype": dtype, "replicas": "check"}
    if kind == 1:
        size = random.choice((None, 100, 4000))
        return {"to": "safetensors", "states": "all", "max_shard_nbytes": size}
    if kind == 2:
        return {"to": "universal", "stage": random.choice((None, 1, 3)), "replicas": replicas}
    ranks = {key: random.choice((None, 1, 2, 3)) for key in ("tp", "dp")}
    zero = random.choice((None, None, 0, 1, 2, 3))
    wanted = {"to": "deepspeed", "zero": zero, "replicas": replicas, **ranks}
    return {**wanted, **{k: random.choice(v) for k, v in _RARE.items() if not random.randrange(20)}}


def _require_same(root: Path, out: Path, options: dict[str, Any]) -> None:
    report = api.check(out)
    damaged = [f for f in report.findings if f.kind == "damaged"]
    assert not damaged, damaged
    if options.get("dtype") is None and options.get("replicas", "check") == "check":
        all_states = options["to"] != "safetensors" or "states" in options
        found = diff(root, out, states="all" if all_states else "weights")
        # Where a training goes on from master copies, weights that are not theirs are left behind.
        lies = options["to"] != "safetensors" and _of_no_masters(root)
        differences = [d for d in found.differences if not (lies and d.state == "weight")]
        assert not differences, differences[0]


def _of_no_masters(root: Path) -> bool:
    """Whether a check finds weights that are not their master copies: a conversion looks at few."""
    return any(f.kind == "master-mismatch" for f in api.check(root).findings)


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except RestrideError as error:
        str(error)


# Outputs that are not finished.

_WAYS: tuple[dict[str, Any], ...] = (
    {"states": "all"},
    {"to": "universal"},
    {"to": "deepspeed", "tp": 1, "dp": 3},
)


class StopsAfter(NullObserver):
    """Sets an event after so many steps."""

    def __init__(self, steps: int, stop: Event | None = None) -> None:
        self.stop = stop or Event()
        self._left = steps

    def on_step(self, _: object, /) -> None:
        self._left -= 1
        if self._left <= 0:
            self.stop.set()


@dataclass(frozen=True)
class _Stopped:
    """What a conversion left that was stopped, and what it would have become."""

    options: dict[str, Any]
    left: Path
    whole: dict[str, bytes]


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@made_once
def _stopped() -> tuple[_Stopped, ...]:
    found: list[_Stopped] = []
    for number, options in enumerate(_WAYS):
        out = scratch() / "resumed" / "out"
        whole = scratch() / f"whole{number}"
        api.convert(SAMPLE, whole, **options)
        for steps in (1, 6, 20):
            watch = StopsAfter(steps)
            shutil.rmtree(out.parent, ignore_errors=True)
            try:
                api.convert(SAMPLE, out, observer=watch, stop=watch.stop, **_small(options))
            except StoppedError:
                left = scratch() / f"left{len(found)}"
                shutil.move(partial_folder(out), left)
                found.append(_Stopped(options, left, tree(whole)))
    assert len(found) > 3
    return tuple(found)


def _small(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "workers": 1, "sync_nbytes": 1, "budget_nbytes": 1 << 21}


def resume(content: bytes) -> str:
    """Go on with an unfinished output in which something is wrong: the same bytes, or an error."""
    random = ByteRandom(content)
    case = random.choice(_stopped())
    out = scratch() / "resumed" / "out"
    shutil.rmtree(out.parent, ignore_errors=True)
    partial = partial_folder(out)
    shutil.copytree(case.left, partial)
    for _ in range(random.randrange(4)):
        hurt_unfinished(random, partial)
    force = random.randrange(4) == 0
    try:
        api.convert(SAMPLE, out, resume=not force, force=force, **_small(case.options))
    except RestrideError as error:
        str(error)
        assert not os.path.lexists(out), "after an error there is something under the final name"
        return "not resumed"
    assert tree(out) == case.whole, "what was resumed is another output"
    assert [*out.parent.iterdir()] == [out], "something was left beside the output"
    return "resumed"


def hurt_unfinished(random: Random, partial: Path) -> None:
    """Spoil the journal of an unfinished output or a file of it, or put a stranger there."""
    journal = partial / "journal"
    files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    kind = random.randrange(8)
    if kind < 4 and journal.is_file():
        journal.write_bytes(hurt_journal(random, journal))
    elif kind == 4 and files:
        random.choice(files).unlink()
    elif kind == 5 and files:
        path = random.choice(files)
        path.write_bytes(changed_bytes(random, path.read_bytes()))
    elif kind == 6:
        path = partial / "files" / random.choice(("x", "model.safetensors", "restride.json"))
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * random.randrange(99))
    elif kind == 7:
        path = partial / random.choice(("journal.new", "replaced", "stranger", "files"))
        if not path.exists():
            path.write_bytes(b"")


def hurt_journal(random: Random, journal: Path) -> bytes:
    """Records with right checksums that say something else, come twice, or are missing."""
    if random.randrange(4) == 0:
        return changed_bytes(random, journal.read_bytes())
    records: Any = read_journal(journal)
    made = changed(random, records, is_json=True)
    payloads = (
        [json.dumps(r, separators=(",", ":")).encode() for r in made if r is not None]
        if (isinstance(made, list))
        else []
    )
    return b"".join(b"%08x %b\n" % (zlib.crc32(payload), payload) for payload in payloads)
