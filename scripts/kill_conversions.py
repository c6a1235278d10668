"""Kill conversions at random moments, resume them, and compare every byte with one that was not.

    python scripts/kill_conversions.py [--kills 200] [--seed 0] [--source CKPT] [--folder DIR]

Each output is converted with ``resume`` and killed (SIGKILL) after a random time, again and again
until one run gets to its end; then it must equal an uninterrupted conversion, and nothing may be
left beside it. Before that, nothing may be under its name. The process forks for each run, so that
a kill costs no start of an interpreter. Exits with 1 at the first difference.
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
from restride.testing.command_line import SAMPLE

TARGETS = ({}, {"to": "universal"}, {"to": "deepspeed"})
SMALL = {"states": "all", "workers": 2, "sync_nbytes": 16384, "budget_nbytes": 2 << 20}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_and_kill(source: Path, out: Path, options: dict[str, object], seconds: float) -> bool:
    """Whether the run got to its end before it was killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            api.convert(source, out, resume=True, **SMALL, **options)
            code = 0
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"{out}: a run failed")
    return os.WIFEXITED(status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", type=Path, default=SAMPLE)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    a = parser.parse_args()
    rng = random.Random(a.seed)  # noqa: S311 - moments, not secrets
    kills = outputs = resumed = 0
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
