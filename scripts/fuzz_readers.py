"""Fuzz the readers for a long time, guided by coverage: anything but our own errors is a find.

    pip install atheris
    python scripts/fuzz_readers.py pickle -max_total_time=600
    python scripts/fuzz_readers.py torch CORPUS -max_total_time=600
    python scripts/fuzz_readers.py safetensors -max_total_time=600

What follows the name of the reader goes to libFuzzer: a folder for the corpus, which is kept, and
options. Without a folder the corpus is thrown away. A find is written to ``crash-*`` and raised.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import atheris

with atheris.instrument_imports(include=["restride"]):
    from restride.errors import RestrideError
    from restride.formats.safetensors import read_catalog
    from restride.storage.pickle_vm import Limits, read_pickle
    from restride.storage.torch_zip import open_torch_zip
    from restride.testing.hostile import callers, hostile_pickles
    from restride.testing.hostile_safetensors import hostile_safetensors, valid_safetensors
    from restride.testing.hostile_torch import hostile_torch_files, valid_torch_file
    from restride.testing.torch_files import torch_file

if TYPE_CHECKING:
    from collections.abc import Callable

# Small, so that an input that reaches a limit does not slow down the others.
_LIMITS = Limits(work=20_000, expanded=20_000)


def fuzz_pickle(content: bytes) -> None:
    read_pickle(content, limits=_LIMITS)


def fuzz_torch(content: bytes) -> None:
    # Half of the inputs are pickles in a right file: no mutation gets through a zip file otherwise.
    whole = content[1:] if content[:1] == b"Z" else torch_file(content[1:], {"0": bytes(24)})
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(whole)
        file.flush()
        opened = open_torch_zip(file.name, limits=_LIMITS)
        if any(s.start_nbytes + s.nbytes > len(whole) for s in opened.storages.values()):
            raise IndexError("a storage reaches out of its file")


def fuzz_safetensors(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        read_catalog(file.name)


def seeds(reader: str) -> list[bytes]:
    """Inputs to start from: valid files, and everything that the test kit knows to be hostile."""
    pickles = [case.content for case in hostile_pickles()] + list(callers("true").values())
    if reader == "pickle":
        return pickles
    if reader == "torch":
        files = [valid_torch_file(), *(case.content for case in hostile_torch_files())]
        return [b"Z" + content for content in files] + [b"P" + content for content in pickles]
    return [valid_safetensors(), *(case.content for case in hostile_safetensors())]


READERS: dict[str, Callable[[bytes], None]] = {
    "pickle": fuzz_pickle,
    "torch": fuzz_torch,
    "safetensors": fuzz_safetensors,
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in READERS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(READERS)} [CORPUS] [libFuzzer options]")
    reader, options = sys.argv[1], sys.argv[2:]

    def run(content: bytes) -> None:
        try:
            READERS[reader](content)
        except RestrideError as error:
            str(error)

    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "seeds")
        start.mkdir()
        for number, content in enumerate(seeds(reader)):
            if len(content) < 1 << 16:
                (start / str(number)).write_bytes(content)
        if all(option.startswith("-") for option in options):
            corpus = Path(folder, "corpus")
            corpus.mkdir()
            options.append(str(corpus))
        atheris.Setup([sys.argv[0], *options, str(start)], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
