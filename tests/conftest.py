"""Profiles, the place of the shared real checkpoints, and the real engine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_COMMON)
settings.register_profile("ci", max_examples=150, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=3000, **_COMMON)
settings.load_profile(
    os.environ.get("RESTRIDE_HYPOTHESIS", "ci" if os.environ.get("CI") else "dev")
)

_ROOT = Path(__file__).resolve().parents[1]


def find_shared() -> Path | None:
    """Folder with the real checkpoints: RESTRIDE_SHARED, or `shared` beside the repository."""
    named = os.environ.get("RESTRIDE_SHARED")
    candidates = [Path(named)] if named else [_ROOT.parent / "shared"]
    return next((path for path in candidates if (path / "checkpoints").is_dir()), None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with `checkpoints/` and `recipes/`; the test is skipped where it is not laid out."""
    found = find_shared()
    if found is None:
        pytest.skip("the shared real checkpoints are not beside the repository")
    return found


@pytest.fixture(scope="session")
def copied() -> Callable[[Path, Path], Path]:
    """Copy a folder that may be read-only, so that a copy may be changed by whoever runs this."""

    def copy(source: Path, folder: Path) -> Path:
        shutil.copytree(source, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
        return folder

    return copy


@pytest.fixture
def kept_while_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system like NFS: a file that is open keeps a name in its folder when it is removed."""
    remove = os.rmdir

    def rmdir(path: str | Path, **options: Any) -> None:
        is_open = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                is_open.append(str(link.readlink()).startswith(f"{path}{os.sep}"))
        if any(is_open):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)


@pytest.fixture(scope="session")
def answer_of() -> Iterator[Callable[..., dict[str, Any]]]:
    """Run one job of ``scripts/deepspeed_jobs.py``, a server that is started once for all tests."""
    for name in ("torch", "deepspeed", "transformers"):
        pytest.importorskip(name)
    server = subprocess.Popen(
        [sys.executable, _ROOT / "scripts" / "deepspeed_jobs.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def ask(**job: Any) -> dict[str, Any]:
        print(json.dumps(job, default=str), file=server.stdin, flush=True)
        return json.loads(server.stdout.readline())

    with server:
        yield ask
        server.stdin.close()


@pytest.fixture(scope="session")
def engine(answer_of: Callable[..., dict[str, Any]]) -> Callable[..., list[str]]:
    """Run one job of the real engine; returns its losses, exact, in hexadecimal."""

    def run(**job: Any) -> list[str]:
        answer = answer_of(**job)
        assert answer["ok"], f"{answer['error']}\n{answer.get('trace', '')}"
        return answer["losses"]

    return run


@pytest.fixture(scope="session")
def convert_as_peer(answer_of: Callable[..., dict[str, Any]]) -> Callable[..., str]:
    """Convert a checkpoint with DeepSpeed's own `ds_to_universal`; returns its error or nothing.

    Without the injected state it refuses the commonest checkpoints, those of data parallelism
    alone.
    """

    def convert(folder: Path, out: Path, *, inject: bool = True) -> str:
        answer = answer_of(peer=[folder / "step", out / "step"], inject=inject)
        return "" if answer["ok"] else answer["error"]

    return convert


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy does what the compiled kernel would do."""
    monkeypatch.setattr("restride.arrays._kernel.KERNEL", None)
