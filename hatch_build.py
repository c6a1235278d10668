"""Compile the kernel while the package is built, if there is a compiler.

A wheel with the kernel says for which platform it is, and fits every Python 3; one without is for
any. An editable install puts the library beside its source. A compiler that is missing or fails is
a warning: the package does everything without the kernel, only more slowly.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = "restride/arrays"
LIBRARY = "librestride.so"
# No -march=native: the library chooses among vectors when it runs, on machines not known here.
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")


class CustomBuildHook(BuildHookInterface):
    """Called by hatchling, for wheels and for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the tree where the install is editable, into the wheel otherwise."""
        folder = Path(self.root, "src", FOLDER)
        self._scratch = tempfile.TemporaryDirectory()
        built = Path(self._scratch.name, LIBRARY)
        is_editable = version == "editable"
        if is_editable:
            # What was built before may be of another source.
            folder.joinpath(LIBRARY).unlink(missing_ok=True)
        try:
            compile_kernel(sorted(folder.glob("_kernel*.c")), built)
        except OSError as error:
            self.app.display_warning(f"restride is built without its kernel: {error}")
            return
        if is_editable:
            # Renamed, not written over: a process may be running the old one.
            beside = folder / f".{LIBRARY}.{os.getpid()}"
            shutil.copyfile(built, beside)
            beside.replace(folder / LIBRARY)
        else:
            build_data["force_include"][str(built)] = f"{FOLDER}/{LIBRARY}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled for the wheel."""
        del version, build_data, artifact_path
        self._scratch.cleanup()


def compile_kernel(sources: list[Path], target: Path) -> None:
    """Compile with ``CC`` and ``CFLAGS``, or the first compiler on the path.

    Raises:
        OSError: There is no compiler, or it fails.
    """
    if sys.platform == "win32":
        raise OSError("it is built on Linux and macOS only")
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    compiler = shlex.split(os.environ.get("CC", "")) or ([found] if found else [])
    if not compiler:
        raise OSError("there is no C compiler on the path, and CC names none")
    more = shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *FLAGS, *more, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode or not target.exists():
        said = (done.stderr or done.stdout).strip()[-500:]
        raise OSError(f"{shlex.join(command)} failed with {done.returncode}: {said}")


def platform() -> str:
    """Tag of this machine, without a promise about its C library that nobody has checked."""
    tags = list(platform_tags())
    return next((tag for tag in tags if tag.startswith("linux_")), tags[0])
