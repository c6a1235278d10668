"""Kill conversions at random moments, resume them, and compare every byte with one that was not.

    python scripts/kill_conversions.py [--kills 200] [--processes N] [--seed 0] [--source CKPT]
        [--folder DIR]

Each output is converted with ``resume`` and killed (SIGKILL) after a random time, again and again
until one run gets to its end; then it must equal an uninterrupted conversion, and nothing may be
left beside it. Before that, nothing may be under its name. The process forks for each run, so that
a kill costs no start of an interpreter. Exits with 1 at the first difference.

With several processes each of them is killed at a moment of its own, or not at all, the first one
too. Those that were killed are started again at once, as a launcher does that restarts one of them;
or all are killed and started anew, as one does that restarts all, and then by another number of
processes now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from restride import api
from restride.errors import RestrideError
from restride.executors import blocks, manifests, resuming
from restride.testing.command_line import SAMPLE

TARGETS = ({}, {"to": "universal"}, {"to": "deepspeed"})
SMALL = {"states": "all", "workers": 2, "sync_nbytes": 16384, "budget_nbytes": 2 << 20}
FAILED = 3
# So that small arrays have several blocks, and parts begin inside of them.
BLOCK_NBYTES = 4096


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(source: Path, out: Path, options: dict[str, object]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            api.convert(source, out, resume=True, **SMALL, **options)
            code = 0
        except RestrideError as error:
            if "process" not in options:
                raise
            # Others died: that is an end, and the next run goes on.
            code, told = FAILED, f"{out}: process {options['process']}: {error}\n"
            if os.environ.get("VERBOSE"):
                sys.stderr.write(told)
        finally:
            os._exit(code)
    return child


def run_and_kill(source: Path, out: Path, options: dict[str, object], seconds: float) -> bool:
    """Whether the run got to its end before it was killed."""
    child = start(source, out, options)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"{out}: a run failed")
    return os.WIFEXITED(status)


class Several:
    """Processes that write one output together."""

    def __init__(
        self, source: Path, out: Path, options: dict[str, object], count: int, rng: random.Random
    ) -> None:
        self.source, self.out, self.options = source, out, {**options, "wait_seconds": 3.0}
        self.rng = rng
        self.count = count
        self.children: dict[int, int] = {}
        self.codes: dict[int, int] = {}

    def start(self, number: int) -> None:
        options = {**self.options, "process": (number, self.count)}
        self.children[number] = start(self.source, self.out, options)

    def run(self, seconds: float) -> tuple[bool, int]:
        """Start all and kill some; return whether the first got to its end, and the kills."""
        for number in range(self.count):
            self.start(number)
        kills = 0
        restarts = self.rng.random() < 0.5
        for _ in range(1 + self.rng.randrange(3) if restarts else 1):
            victims, more = self.kill_some(seconds)
            kills += more
            for victim in victims if restarts else ():
                if self.codes.pop(victim, 0) == -signal.SIGKILL:
                    self.start(victim)
        if not restarts:
            kills += sum(self.kill(number) for number in list(self.children))
        for number in list(self.children):
            self.reap(number)
        if any(code not in {0, FAILED, -signal.SIGKILL} for code in self.codes.values()):
            sys.exit(f"{self.out}: a run ended with {self.codes}")
        return self.codes.get(0) == 0, kills

    def kill_some(self, seconds: float) -> tuple[list[int], int]:
        """Kill one or more, each at a moment of its own; return which, and how many lived."""
        victims = self.rng.sample(range(self.count), self.rng.randint(1, self.count))
        moments = sorted((self.rng.random() * 1.5 * seconds, victim) for victim in victims)
        begun, kills = time.monotonic(), 0
        for moment, victim in moments:
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            kills += self.kill(victim)
        return victims, kills

    def kill(self, number: int) -> int:
        """1 where it was still running."""
        if number not in self.children:
            return 0
        os.kill(self.children[number], signal.SIGKILL)
        self.reap(number)
        return int(self.codes[number] == -signal.SIGKILL)

    def reap(self, number: int) -> None:
        _, status = os.waitpid(self.children.pop(number), 0)
        self.codes[number] = os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, default=SAMPLE)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    a = parser.parse_args()
    for module in (blocks, manifests, resuming):
        module.BLOCK_NBYTES = BLOCK_NBYTES
    rng = random.Random(a.seed)  # noqa: S311 - moments, not secrets
    kills = outputs = resumed = 0
    if a.folder:
        a.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        references, seconds = [], []
        for number, options in enumerate(TARGETS):
            whole = Path(folder, f"whole{number}")
            for _ in range(2):  # the first one imports and warms up
                started = time.perf_counter()
                api.convert(a.source, whole, force=True, **SMALL, **options)
                took = time.perf_counter() - started
            seconds.append(took)
            references.append(tree(whole))
        while kills < a.kills:
            which = outputs % len(TARGETS)
            out = Path(folder, f"out{outputs}")
            is_done = False
            while not is_done and kills < a.kills:
                if a.processes > 1:
                    count = a.processes if rng.random() < 0.7 else rng.randint(1, a.processes)
                    several = Several(a.source, out, TARGETS[which], count, rng)
                    is_done, more = several.run(seconds[which])
                    kills += more
                else:
                    is_done = run_and_kill(
                        a.source, out, TARGETS[which], rng.random() * 1.2 * seconds[which]
                    )
                    kills += not is_done
                if out.exists() and tree(out) != references[which]:
                    sys.exit(f"{out}: something else is under the final name")
            report = api.convert(a.source, out, resume=True, **SMALL, **TARGETS[which])
            resumed += report.resumed_nbytes
            if tree(out) != references[which] or list(Path(folder).glob("*.partial")):
                sys.exit(f"{out}: not the same after {kills} kills")
            shutil.rmtree(out)
            outputs += 1
    print(json.dumps({"kills": kills, "outputs": outputs, "resumed_nbytes": resumed}))


if __name__ == "__main__":
    main()
