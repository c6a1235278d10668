"""Tell one lie in a right checkpoint, and list those that change what is read without a word.

    python scripts/fuzz_lies.py deepspeed --count 700
    python scripts/fuzz_lies.py universal --count 400 --seed 1

`fuzz.py` cannot judge them: a file that has other numbers may be right. A person can. Every lie is
one decoded value of one file that is changed; a checkpoint that `check` finds an error in or warns
of, or that is refused, is counted and not shown.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from fuzz_checkpoints import bases_of, scratch
from fuzz_choices import changed, parts_of
from restride import api
from restride.checkpoint.values import StoredTensor
from restride.comparison import diff
from restride.errors import RestrideError
from restride.testing.saved_values import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuzz_checkpoints import Base
    from restride.comparison import DiffReport

_SHOWN_LEN = 160


def tell(random: Random, base: Base, folder: Path) -> list[str]:
    """Write the checkpoint with one lie; return what it is, or nothing where it cannot be told."""
    name = random.choice([name for name in base.files if name.endswith(".pt")])
    right = base.value(name)
    value = changed(random, right)
    lies = [f"{name}{lie}" for lie in differences(right, value)]
    for other in base.files:
        path = folder / other
        path.parent.mkdir(parents=True, exist_ok=True)
        if other != name:
            path.symlink_to(base.root / other)
            continue
        try:
            save_file(path, value)
        except (TypeError, ValueError, OverflowError, KeyError):
            return []
    return lies


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two values differ; what did not change is the same object."""
    if a is b:
        return
    parts = parts_of(a), parts_of(b)
    alike = type(a) is type(b) and parts[0] and len(parts[0]) == len(parts[1])
    if not alike or (isinstance(a, dict) and [*a] != [*b]):
        yield f"{where}: {_shown(a)} -> {_shown(b)}"
        return
    keys = [*a] if isinstance(a, dict) else range(len(parts[0]))
    for key, one, two in zip(keys, *parts, strict=True):
        yield from differences(one, two, f"{where}[{key!r}]")


def _shown(value: Any) -> str:
    if isinstance(value, StoredTensor):
        place = f"from {value.storage_base} of {value.storage.key}"
        return f"{value.storage.dtype} {value.shape} by {value.strides} {place}"
    return repr(value)[:_SHOWN_LEN]


def judged(base: Base, folder: Path) -> tuple[str, DiffReport | None]:
    """What is said of the checkpoint; and how it differs where nothing is."""
    try:
        found = api.check(folder).findings
        if any(finding.severity == "error" for finding in found):
            return "an error is found", None
        different = diff(base.root, folder)
    except RestrideError:
        return "refused", None
    if different.verdict == "same":
        return "harmless", None
    known = {f.message for f in api.check(base.root).findings if f.severity == "warning"}
    if any(f.severity == "warning" and f.message not in known for f in found):
        return "a warning is found", None
    return "without a word", different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("deepspeed", "universal"))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bases, counts = bases_of(options.kind), Counter[str]()
    for number in range(options.count):
        random = Random(f"{options.seed} {number}")  # noqa: S311 - no secret
        base = random.choice(bases)
        folder = Path(tempfile.mkdtemp(dir=scratch()))
        lies = tell(random, base, folder)
        verdict, different = judged(base, folder) if lies else ("no lie", None)
        counts[verdict] += 1
        if different is not None:
            print(f"{number}: {base.root.name}/{'; '.join(lies)}")
            for one in different.differences[:2]:
                print(f"    {one.tensor}/{one.state}: {one.shapes} {one.dtypes}")
            for array in (*different.only_a[:2], *different.only_b[:2]):
                print(f"    only one has {'/'.join(array)}")
        shutil.rmtree(folder)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    shutil.rmtree(scratch())
    return 0


if __name__ == "__main__":
    sys.exit(main())
