"""Compare the steps of the parameters of each group: under ZeRO one number counts for all.

Where every parameter has files of its own, some may be of another save, with the same shapes. So
may the model files be: under ZeRO-3 no weight in them tells of it, but the engine counts its steps
there, and its scheduler has the learning rate.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.storage.ranges import FilePool
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog, StateEntry

__all__ = ["step_findings"]

_STEP: Final = "step"
_PLAIN_STEP: Final = re.compile(r"state\.\d+\.step|base_optimizer_state_step")
# Without ZeRO the engine takes a step before the first one, and what was made of its files has it.
_MOST_AHEAD: Final = 1
_LARGEST: Final = 1 << 63
_FORMATS: Final = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def step_findings(catalog: Catalog) -> Iterator[Finding]:
    """Compare the steps of parameters with each other, and with those that the engine counted.

    Without ZeRO torch's optimizers count for every parameter by itself, and pass over those that
    got no gradient: then there is nothing to compare.

    Args:
        catalog: The checkpoint.

    Yields:
        One error for each group whose parameters have several steps. A warning where the optimizer
        cannot be of the save that the model files are of, and a note where it may have begun later.

    Raises:
        ExecutionError: A file cannot be read.

    Cost:
        A few bytes of each place in a file that has a step.
    """
    states = {t.name: t.states[_STEP] for t in catalog.tensors if _STEP in t.states}
    found: list[dict[object, list[str]]] = []
    groups = list(_groups(catalog))
    with FilePool() as pool:
        reader = _Reader(catalog, pool)
        for number, (names, _) in enumerate(groups):
            stored = {name: reader.read(states[name]) for name in names if name in states}
            by_step: dict[object, list[str]] = {}
            for name, step in stored.items():
                if step is not None:
                    by_step.setdefault(step, []).append(name)
            if len(by_step) > 1:
                yield _different(number, by_step)
            found.append(by_step)
    if groups and all(len(by_step) <= 1 for by_step in found):
        steps = [step for by_step in found for step in by_step]
        yield from _of_another_save(catalog, steps, [group for _, group in groups])


def _groups(catalog: Catalog) -> Iterator[tuple[Sequence[str], Mapping[str, object]]]:
    """Each group with the names of its parameters, where an optimizer of ZeRO counts for all."""
    model, optimizer = (_dict(catalog.values.get(key)) for key in ("model", "optimizer"))
    zero = _dict(_dict(model.get("ds_config")).get("zero_optimization"))
    groups = optimizer.get("param_groups")
    if not zero.get("stage") or not isinstance(groups, list):
        return
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if isinstance(names, list):
            yield [name for name in names if isinstance(name, str)], group


def _of_another_save(
    catalog: Catalog, found: Sequence[object], groups: Sequence[Mapping[str, object]]
) -> Iterator[Finding]:
    """Hold steps and learning rates of the optimizer against what the model files say of them."""
    model, optimizer = (_dict(catalog.values.get(key)) for key in ("model", "optimizer"))
    plain = (value for key, value in optimizer.items() if _PLAIN_STEP.fullmatch(key))
    steps = _numbers([*found, *plain])
    (taken,) = _numbers([model.get("global_steps")]) or (None,)
    (skipped,) = _numbers([model.get("skipped_steps")]) or (0,)
    if steps and taken is not None:
        step, engine_step = max(steps), taken - skipped
        says = (
            f"the optimizer took {step:.15g} steps, by the model files (global_steps less "
            f"skipped_steps) it was {engine_step:.15g}: they are of different saves, or"
        )
        if step > engine_step + _MOST_AHEAD:
            why = "an engine counted the step of a universal folder several times"
            yield Finding("warning", "step-mismatch", f"{says} {why}")
        elif step < engine_step:
            yield Finding("note", "step-mismatch", f"{says} the optimizer began anew at some time")
    rates = _dict(model.get("lr_scheduler")).get("_last_lr")
    last = sorted(_numbers(rates if isinstance(rates, list) else ()))
    own = sorted(_numbers([group.get("lr") for group in groups]))
    if len(last) == len(own) == len(groups) and last != own:
        rate, other = next(pair for pair in zip(own, last, strict=True) if pair[0] != pair[1])
        message = (
            f"the learning rate is {rate} in the optimizer and {other} in the scheduler of the "
            "model files: they are of different saves, or it was set anew after the last step"
        )
        yield Finding("warning", "step-mismatch", message)


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _numbers(values: Iterable[object]) -> list[float]:
    found = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return [float(v) for v in found if abs(v) < _LARGEST]


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
