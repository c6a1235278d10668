"""Compare the steps of the parameters of each group: under ZeRO one number counts for all.

Where every parameter has files of its own, some may be of another save, with the same shapes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.storage.ranges import FilePool
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.checkpoint.catalog import Catalog, StateEntry

__all__ = ["step_findings"]

_STEP: Final = "step"
_FORMATS: Final = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def step_findings(catalog: Catalog) -> Iterator[Finding]:
    """Compare the steps that are tensors.

    Without ZeRO torch's optimizers count for every parameter by itself, and pass over those that
    got no gradient: then there is nothing to compare.

    Args:
        catalog: The checkpoint.

    Yields:
        One error for each group whose parameters have several steps.

    Raises:
        ExecutionError: A file cannot be read.

    Cost:
        A few bytes of each place in a file that has a step.
    """
    states = {t.name: t.states[_STEP] for t in catalog.tensors if _STEP in t.states}
    with FilePool() as pool:
        reader = _Reader(catalog, pool)
        for number, names in enumerate(_groups(catalog)):
            steps = {name: reader.read(states[name]) for name in names if name in states}
            by_step: dict[object, list[str]] = {}
            for name, step in steps.items():
                if step is not None:
                    by_step.setdefault(step, []).append(name)
            if len(by_step) > 1:
                yield _different(number, by_step)


def _groups(catalog: Catalog) -> Iterator[Sequence[str]]:
    """Names of the parameters of each group, where an optimizer of ZeRO counts for all of them."""
    model, optimizer = (catalog.values.get(key) for key in ("model", "optimizer"))
    if not isinstance(model, dict) or not isinstance(optimizer, dict):
        return
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    groups = optimizer.get("param_groups")
    if not isinstance(zero, dict) or not zero.get("stage") or not isinstance(groups, list):
        return
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if isinstance(names, list):
            yield [name for name in names if isinstance(name, str)]


def _different(number: int, by_step: dict[object, list[str]]) -> Finding:
    first, *others = sorted(by_step.items(), key=lambda found: -len(found[1]))
    (step, names), (common, rest) = others[0], first
    more = f" and {len(names) - 1} more" if names[1:] else ""
    message = (
        f"tensor {names[0]!r}{more}: the step is {step}, in group {number} of the optimizer that "
        f"of {counted(len(rest), 'parameter')} such as {rest[0]!r} is {common}: the files are of "
        "different saves"
    )
    details = {"group": number, "steps": {str(key): found for key, found in by_step.items()}}
    return Finding("error", "step-mismatch", message, f"tensor {names[0]!r}", details)


class _Reader:
    def __init__(self, catalog: Catalog, pool: FilePool) -> None:
        self._catalog = catalog
        self._pool = pool
        self._known: dict[tuple[int, int], object] = {}

    def read(self, entry: StateEntry) -> object:
        """The step as the first rank that has it; None where it is no number."""
        region = next((region for region in entry.regions if region is not None), None)
        form = _FORMATS.get(entry.dtype.name)
        if region is None or form is None or entry.layout.full_numel != 1:
            return None
        place = region.file, region.start_nbytes
        if place not in self._known:
            buffer = bytearray(struct.calcsize(form))
            file = str(Path(self._catalog.root) / self._catalog.files[region.file].name)
            self._pool.read_exact(file, region.start_nbytes, buffer)
            (self._known[place],) = struct.unpack(form, buffer)
        return self._known[place]
