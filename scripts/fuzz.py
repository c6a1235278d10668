"""Fuzz the readers, the planner and whole conversions: anything but our own errors is a find.

    python scripts/fuzz.py --seconds 3600 --out FOLDER
    python scripts/fuzz.py --seconds 600 --targets pickle,torch --out FOLDER
    python scripts/fuzz.py --replay FOLDER/finds/pickle-1f2e3d4c.json

Every target gets its share of the time in a process of its own, one after the other. Where atheris
is installed, libFuzzer changes inputs guided by the coverage of restride; else they are changed
blindly. A find is an exception that is no `RestrideError`, a wrong byte, an output that is left
after an error, an input that takes more than 5 s of processor time or 512 MB of memory, or the
death of the process. The same seed gives the same inputs while the code is the same; a find is
written with its input in any case, and ``--replay`` runs it again. FOLDER keeps the log, the finds
and the corpus, from which the next run goes on. The exit code is 1 where something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType


class _Target(NamedTuple):
    """Where a target is, its share of the time, and whether coverage guides it.

    Instrumented code is several times slower. Where an input takes long and decides much, as a
    checkpoint does, more inputs find more than better ones.
    """

    module: str
    share: int = 1
    is_guided: bool = True


_TARGETS = {
    "pickle": _Target("fuzz_readers"),
    "torch": _Target("fuzz_readers"),
    "safetensors": _Target("fuzz_readers"),
    "document": _Target("fuzz_readers", share=2),
    "deepspeed": _Target("fuzz_checkpoints", share=4, is_guided=False),
    "universal": _Target("fuzz_checkpoints", share=2, is_guided=False),
    "resume": _Target("fuzz_checkpoints", share=2, is_guided=False),
    "team": _Target("fuzz_outputs", share=2, is_guided=False),
    "casts": _Target("fuzz_outputs", is_guided=False),
    "differences": _Target("fuzz_answers", is_guided=False),
    "digests": _Target("fuzz_answers", is_guided=False),
    "kept": _Target("fuzz_files", is_guided=False),
    "sharded": _Target("fuzz_files", is_guided=False),
    "drifted": _Target("fuzz_drift", is_guided=False),
    "commands": _Target("fuzz_commands", share=2, is_guided=False),
    "layouts": _Target("fuzz_planner", share=2),
    "numbers": _Target("fuzz_planner", share=2),
    "conversion": _Target("fuzz_planner", share=2),
    "arrays": _Target("fuzz_planner"),
}
_LONGEST_INPUT = {"pickle": 1 << 14, "torch": 1 << 14, "safetensors": 1 << 13}
_LONGEST_OTHER = 4096
_MOST_SECONDS = 5.0
_MOST_NBYTES = 512 << 20
_NOTED_EVERY = 2.0
_MOST_STARTS = 50
_COVERAGE = re.compile(r"\bcov: (\d+) ft: (\d+)")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it, to spare the disk


class TooSlowError(BaseException):
    """An input took too much processor time. No handler of the code under test catches it."""


class _Options(Protocol):
    seconds: float
    out: Path
    seed: int
    targets: str
    replay: Path | None
    child: str | None


@dataclass
class Session:
    """What one process does with inputs of one target.

    Attributes:
        target: Name of the target.
        run: The target: takes an input, says how far it came, raises where something is wrong.
        out: Folder of the whole run.
        outcomes: How often inputs came how far.
        finds: How often each find was met, by its key.
    """

    target: str
    run: Callable[[bytes], str]
    out: Path
    outcomes: Counter[str] = field(default_factory=Counter)
    finds: Counter[str] = field(default_factory=Counter)

    def try_input(self, content: bytes) -> BaseException | None:
        """Run one input, and keep it where it is a find."""
        from restride.errors import RestrideError

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
        try:
            outcome = self.run(content)
        except RestrideError as error:
            str(error)
            outcome = "refused"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is a find
            self._keep(content, error)
            return error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.outcomes[outcome] += 1
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if grown > _MOST_NBYTES:
            hungry = MemoryError(f"{grown} bytes for one input")
            self._keep(content, hungry)
            return hungry
        return None

    def _keep(self, content: bytes, error: BaseException) -> None:
        key = f"{type(error.__cause__ or error).__name__} at {_place(error)}"
        self.finds[key] += 1
        if self.finds[key] == 1:
            name = f"{self.target}-{zlib.crc32(key.encode()):08x}.json"
            shown = "".join(traceback.format_exception(error, limit=-12))
            write_find(self.out / "finds" / name, self.target, content, key, shown)

    def note(self, seconds: float) -> None:
        """Write down how far it came; the process may end at any moment."""
        value = {
            "seconds": seconds,
            "outcomes": dict(self.outcomes),
            "finds": dict(self.finds),
        }
        path = self.out / f"{self.target}.json"
        path.with_suffix(".new").write_text(json.dumps(value))
        path.with_suffix(".new").replace(path)


def write_find(path: Path, target: str, content: bytes, key: str, shown: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"target": target, "input": content.hex(), "key": key, "error": shown}
    path.write_text(json.dumps(value, indent=1) + "\n")


def _place(error: BaseException) -> str:
    """Where an error comes from: the innermost frame of restride, or of a target."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    ours = [f for f in frames if "/restride/" in f.filename or "fuzz_" in f.filename]
    if not frames:
        return "no place"
    frame = (ours or list(frames))[-1]
    line = "" if isinstance(error, TooSlowError) else f":{frame.lineno}"
    return f"{Path(frame.filename).name}{line} ({frame.name})"


def _load(target: str, atheris: ModuleType | None) -> Callable[[bytes], str]:
    """Import a target, with all of restride instrumented where atheris does it."""
    hook: AbstractContextManager[Any] = nullcontext()
    if atheris is not None:
        hook = atheris.instrument_imports(include=["restride"], exclude=["restride.testing"])
    with hook:
        import restride

        package = Path(restride.__path__[0])
        for path in sorted(package.rglob("*.py")):
            name = path.relative_to(package.parent).with_suffix("").parts
            if not {"cli", "testing", "__main__", "__init__"} & set(name):
                import_module(".".join(name))
        run: Callable[[bytes], str] = getattr(import_module(_TARGETS[target].module), target)
    return run


def _seeds(target: str) -> list[bytes]:
    module = import_module(_TARGETS[target].module)
    if module.__name__ == "fuzz_planner":
        found = module.planner_seeds()
    elif module.__name__ == "fuzz_checkpoints":
        found = module.checkpoint_seeds()
    elif module.__name__ == "fuzz_outputs":
        found = module.output_seeds()
    elif module.__name__ == "fuzz_answers":
        found = module.answer_seeds()
    elif module.__name__ == "fuzz_files":
        found = module.file_seeds()
    elif module.__name__ == "fuzz_drift":
        found = module.drift_seeds()
    elif module.__name__ == "fuzz_commands":
        found = module.command_seeds()
    elif target == "document":
        found = module.DOCUMENT_SEEDS
    else:
        found = module.reader_seeds(target)
    return [content for content in found if len(content) <= _longest(target)]


def _longest(target: str) -> int:
    return _LONGEST_INPUT.get(target, _LONGEST_OTHER)


def _warm(run: Callable[[bytes], str]) -> None:
    """Make what a target starts from, which may take its time."""
    from restride.errors import RestrideError

    with suppress(RestrideError):
        run(b"")


def _guard() -> None:
    """Turn a hang and hunger for memory into exceptions, and warnings as well."""

    def stop(*_: object) -> None:
        raise TooSlowError(f"more than {_MOST_SECONDS:g} s of processor time")

    signal.signal(signal.SIGVTALRM, stop)
    warnings.simplefilter("error")


def _limit_memory() -> None:
    status = Path("/proc/self/status")
    if status.exists():
        now = int(re.findall(r"VmData:\s+(\d+) kB", status.read_text())[0]) << 10
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (now + _MOST_NBYTES, hard))


def child(options: _Options) -> None:
    """Fuzz one target until the time is over."""
    assert options.child is not None
    target = options.child
    atheris = None
    if _TARGETS[target].is_guided:
        with suppress(ImportError):
            atheris = import_module("atheris")
    session = Session(target, _load(target, atheris), options.out)
    corpus = options.out / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    for content in _seeds(target):
        (corpus / f"seed-{zlib.crc32(content):08x}").write_bytes(content)
    _warm(session.run)
    _guard()
    started = time.monotonic()
    state = {"noted": started}

    def run(content: bytes) -> None:
        session.try_input(content)
        now = time.monotonic()
        if now - state["noted"] > _NOTED_EVERY or now - started > options.seconds:
            state["noted"] = now
            session.note(now - started)
            _limit_memory()
        if now - started > options.seconds:
            sys.stderr.flush()
            os._exit(0)  # Neither libFuzzer nor its caller has anything left to do.

    if atheris is None:
        _run_blindly(run, corpus, options)
    else:
        flags = (
            f"-seed={options.seed}",
            f"-max_len={_longest(target)}",
            f"-artifact_prefix={options.out}/died-{target}-",
            *("-rss_limit_mb=0", "-len_control=0", "-timeout=3600", str(corpus)),
        )
        atheris.Setup([sys.argv[0], *flags], run)
        atheris.Fuzz()


def _run_blindly(run: Callable[[bytes], None], corpus: Path, options: _Options) -> None:
    from fuzz_choices import changed_bytes

    random = Random(options.seed)  # noqa: S311 - no secret
    pool = [path.read_bytes() for path in sorted(corpus.iterdir())] or [b""]
    current = options.out / f"died-{options.child}-of"
    while True:
        content = random.choice(pool)
        for _ in range(random.randrange(8)):
            content = changed_bytes(random, content)[: _longest(str(options.child))]
        if random.randrange(4) == 0:
            content = random.randbytes(random.choice((8, 64, 512)))
        current.write_bytes(content)  # libFuzzer does this where the process dies
        run(content)


@dataclass
class Result:
    """What a target came to, over all its processes."""

    target: str
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    finds: Counter[str] = field(default_factory=Counter)
    coverage: str = "-"

    def add(self, noted: dict[str, Any], log: str) -> None:
        self.seconds += noted["seconds"]
        self.outcomes.update(noted["outcomes"])
        self.finds.update(noted["finds"])
        found = _COVERAGE.findall(log)
        self.coverage = " / ".join(found[-1]) if found else self.coverage

    def lines(self) -> list[str]:
        inputs = sum(self.outcomes.values()) + sum(self.finds.values())
        rate = inputs / self.seconds if self.seconds else 0.0
        head = (
            f"{self.target}: {self.seconds:.0f} s, {inputs} inputs, {rate:.1f} a second, "
            f"coverage {self.coverage}, {len(self.finds)} finds"
        )
        ends = (f"    {count:>9} {outcome}" for outcome, count in self.outcomes.most_common())
        finds = (f"    FIND {count} times: {key}" for key, count in self.finds.items())
        return [head, *ends, *finds]


def fuzz(options: _Options) -> int:
    """Run every target for its share of the time, and write the log."""
    names = options.targets.split(",")
    unknown = [name for name in names if name not in _TARGETS]
    if unknown:
        sys.exit(f"no targets: {', '.join(unknown)}; there are {', '.join(_TARGETS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    log = _Log(options.out / "log.txt")
    log.write(f"seed {options.seed}, {options.seconds:g} s, {', '.join(names)}")
    found = 0
    shares = {name: _TARGETS[name].share for name in names}
    for name in names:
        seconds = options.seconds * shares[name] / sum(shares.values())
        result = _fuzz_one(name, seconds, options, log)
        log.write(*result.lines())
        found += len(result.finds)
    log.write(f"{found} finds in all" + (f", in {options.out / 'finds'}" if found else ""))
    return 1 if found else 0


class _Log:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, *lines: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        with self._path.open("a") as file:
            for number, line in enumerate(lines):
                text = line if number else f"{stamp} {line}"
                print(text, flush=True)
                file.write(text + "\n")


def _fuzz_one(name: str, seconds: float, options: _Options, log: _Log) -> Result:
    result = Result(name)
    noted = options.out / f"{name}.json"
    for seed in range(options.seed, options.seed + _MOST_STARTS):
        left = seconds - result.seconds
        if left < _NOTED_EVERY and seed > options.seed:
            break
        noted.unlink(missing_ok=True)
        scratch = tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() else None)
        command = [sys.executable, __file__, "--child", name, "--seconds", f"{left:.1f}"]
        command += ["--seed", str(seed), "--out", str(options.out)]
        environment = {"PYTHONHASHSEED": "0", "RESTRIDE_FUZZ_SCRATCH": scratch}
        said = options.out / f"{name}.stderr"
        try:
            with said.open("wb") as file:
                code = subprocess.run(
                    command, stderr=file, env={**os.environ, **environment}, check=False
                ).returncode
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        text = said.read_text(errors="replace")
        if noted.exists():
            result.add(json.loads(noted.read_text()), text)
        if code == 0:
            (options.out / f"died-{name}-of").unlink(missing_ok=True)
            break
        _keep_death(name, code, text, result, options.out)
        log.write(f"{name}: the process ended with {code}; it is started again")
    return result


def _keep_death(name: str, code: int, said: str, result: Result, out: Path) -> None:
    """A process that died is a find; libFuzzer has written the input that it died of."""
    key = f"the process ended with {code}"
    result.finds[key] += 1
    for path in out.glob(f"died-{name}-*"):
        find = out / "finds" / f"{path.name}.json"
        write_find(find, name, path.read_bytes(), key, said[-4000:])
        path.unlink()


def replay(path: Path) -> int:
    """Run a find again, without instrumentation."""
    find = json.loads(path.read_text())
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as out:
        os.environ.setdefault("RESTRIDE_FUZZ_SCRATCH", out)  # removed with it
        session = Session(find["target"], _load(find["target"], None), Path(out))
        _warm(session.run)
        _guard()
        started = time.process_time()
        error = session.try_input(bytes.fromhex(find["input"]))
        seconds = time.process_time() - started
    if error is None:
        print(f"no find: {[*session.outcomes][-1]} after {seconds:.2f} s")
        return 0
    traceback.print_exception(error)
    print(f"still a find after {seconds:.2f} s: {find['key']}")
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument(
        "--out", type=Path, default=Path("build/fuzzed"), help="log, finds and corpus"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(_TARGETS), help="names, with commas")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a find again")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay)
    if options.child is not None:
        child(options)
        return 0
    return fuzz(options)


if __name__ == "__main__":
    sys.exit(main())
