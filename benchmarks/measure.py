"""Run one command and say what it took: time, memory, bytes through read and write calls.

The kernel adds the I/O of a reaped child to its parent, so a process of our own that starts the
command sees the whole tree in `/proc/self/io`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True)
class Usage:
    """What a command and its children took."""

    wall_s: float
    cpu_s: float
    peak_nbytes: int
    read_nbytes: int
    written_nbytes: int


def measure(command: list[str], environment: dict[str, str] | None = None) -> Usage:
    """Run `command` in a fresh process tree; its output goes to stderr only if it fails.

    Modules are compiled once and kept, as where a package is installed, whatever the shell says.
    """
    kept = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE}
    done = subprocess.run(
        [sys.executable, __file__, *command],
        check=True,
        capture_output=True,
        text=True,
        env={**kept, **(environment or {})},
    )
    return Usage(**json.loads(done.stdout.splitlines()[-1]))


def touch_memory(nbytes: int) -> None:
    """Have the machine get so much memory, and free it for who comes next."""
    subprocess.run([sys.executable, "-c", f"import numpy; numpy.ones({nbytes}, 'u1')"], check=True)


def read_again(folder: Path) -> None:
    """Have the page cache hold all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def _io() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["rchar"]), int(fields["wchar"])


def main() -> None:
    read, written = _io()
    start = time.perf_counter()
    done = subprocess.run(
        sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    wall = time.perf_counter() - start
    if done.returncode:
        sys.stderr.buffer.write(done.stdout[-4000:])
        sys.exit(done.returncode)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    read_after, written_after = _io()
    result = Usage(
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_nbytes=usage.ru_maxrss * 1024,
        read_nbytes=read_after - read,
        written_nbytes=written_after - written,
    )
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
