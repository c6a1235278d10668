"""The real engine as a server of jobs, which is started once for all tests of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SERVER = Path(__file__).parents[3] / "scripts" / "deepspeed_jobs.py"


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., list[str]]]:
    """Run one job of ``scripts/deepspeed_jobs.py``; returns its losses, exact, in hexadecimal."""
    for name in ("torch", "deepspeed", "transformers"):
        pytest.importorskip(name)
    server = subprocess.Popen(
        [sys.executable, SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def run(**job: Any) -> list[str]:
        print(json.dumps(job, default=str), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
        assert answer["ok"], f"{answer['error']}\n{answer.get('trace', '')}"
        return answer["losses"]

    with server:
        yield run
        server.stdin.close()
