"""Copies that differ, as a table: layers that drifted alike are one row."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, cast

from msgspec import Struct, field

from restride.cli.output import Column
from restride.cli.sizes import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Finding
    from restride.cli.output import Page

__all__ = ["KIND", "show_drift"]

KIND: Final = "replica-drift"

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
# Other findings that explain why copies differ: then nothing is to be decided between them.
_MIXED: Final = frozenset(
    {"step-mismatch", "settings-mismatch", "run-mismatch", "master-mismatch", "other-rank"}
)
_DAMAGED: Final = frozenset({"checksum-differs", "manifest-digest"})
_TOLD: Final = "told-cut"


class _Group(Struct):
    """Arrays whose names differ in numbers only, and whose copies differ between the same ranks."""

    ranks: str
    written: str
    tensors: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    state_counts: set[int] = field(default_factory=set)
    largest: tuple[float, str] | None = None

    def add(self, details: Mapping[str, object]) -> None:
        tensor, state = str(details["tensor"]), str(details["state"])
        different, numel = (cast("int", details[key]) for key in ("different_numel", "numel"))
        states = self.tensors.setdefault(tensor, {})
        # One array may have several pairs of ranks at the same coordinates: parts of its elements.
        before = states.get(state, (0, 0))
        states[state] = before[0] + different, before[1] + numel
        self.state_counts.add(cast("int", details["state_count"]))
        gap = details["largest"]
        if gap is not None:
            size = float(cast("float | str", gap))
            if self.largest is None or size > self.largest[0]:
                self.largest = size, state

    def cells(self) -> list[str]:
        names = list(self.tensors)
        counts = [count for states in self.tensors.values() for count in states.values()]
        states = {len(states) for states in self.tensors.values()}
        largest = "-" if self.largest is None else f"{self.largest[0]:.3g} ({self.largest[1]})"
        return [
            names[0] if len(names) == 1 else _skeleton(names[0]),
            str(len(names)),
            self.ranks,
            f"{_span(states)} of {_span(self.state_counts)}",
            f"{_span({n for n, _ in counts})} of {_span({n for _, n in counts})}",
            largest,
        ]


def show_drift(page: Page, findings: Iterable[Finding]) -> None:
    """Write the table of copies that differ, and what can be done; nothing where none does.

    Args:
        page: Where to write.
        findings: All of them; those of another kind are for other lines.
    """
    everything = list(findings)
    drifts = [finding for finding in everything if finding.kind == KIND]
    if not drifts:
        return
    groups = _grouped(drifts)
    tensors = {str(finding.details["tensor"]) for finding in drifts}
    arrays = {(finding.details["tensor"], finding.details["state"]) for finding in drifts}
    is_decided = any(group.written for group in groups)
    page.line(
        f"{drifts[0].severity}: ranks hold different copies in {format_count(len(arrays), 'array')}"
        f" of {format_count(len(tensors), 'tensor')} [{KIND}]",
        "warn" if is_decided else "bad",
    )
    columns = [
        Column("tensor"),
        Column("tensors", is_number=True),
        Column("ranks"),
        Column("states"),
        Column("different elements"),
        Column("largest difference"),
    ]
    rows = [group.cells() for group in groups]
    if is_decided:
        columns.append(Column("written"))
        rows = [[*row, group.written] for row, group in zip(rows, groups, strict=True)]
    page.table(columns, rows)
    if not is_decided:
        for sentence in _advice(groups, rows, everything):
            page.line(sentence)


def _grouped(drifts: Sequence[Finding]) -> list[_Group]:
    groups: dict[tuple[str, str, str], _Group] = {}
    for finding in drifts:
        details = finding.details
        ranks = _ranks(details)
        written = _written(details)
        key = _skeleton(str(details["tensor"])), ranks, written
        groups.setdefault(key, _Group(ranks, written)).add(details)
    return list(groups.values())


def _ranks(details: Mapping[str, object]) -> str:
    """What tells the two ranks apart: the other coordinates say which part of the array it was."""
    first, other = cast("list[dict[str, int]]", details["coordinates"])
    axes = [axis for axis in first if first[axis] != other[axis]]
    if not axes:
        return f"{_at(first, first)}, twice"
    return f"{_at(first, axes)} and {_at(other, axes)}"


def _written(details: Mapping[str, object]) -> str:
    decided = str(details.get("decided", ""))
    if decided != "first":
        return decided
    first, other = cast("list[dict[str, int]]", details["coordinates"])
    axes = [axis for axis in first if first[axis] != other[axis]]
    return f"first ({_at(first, axes or first)})"


def _at(coordinates: Mapping[str, int], axes: Iterable[str]) -> str:
    return ",".join(f"{axis}={coordinates[axis]}" for axis in axes)


def _skeleton(name: str) -> str:
    """The name with its layer numbers left open."""
    return _NUMBER.sub("*", name)


def _span(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _advice(
    groups: Sequence[_Group], rows: Sequence[Sequence[str]], findings: Sequence[Finding]
) -> Iterator[str]:
    mixed = next((finding for finding in findings if finding.kind in _MIXED), None)
    if mixed is not None:
        yield (
            f"The files are of different saves or ranks ({mixed.kind} above): put those of one "
            "save into the folder, under their own names, before anything is decided between "
            "copies."
        )
        return
    damaged = next((finding for finding in findings if finding.kind in _DAMAGED), None)
    if damaged is not None:
        yield (
            f"A file changed after it was written ({damaged.kind} above): copy it again before "
            "anything is decided between copies."
        )
        return
    if any(finding.kind == _TOLD for finding in findings):
        yield (
            "That these are copies is what was told of the cut: if ranks hold parts of them, "
            "correct --source-config or --source-rules instead."
        )
    choices = list(dict.fromkeys(choice for group in groups for choice in _choices(group)))
    one = f"{' or '.join(choices)} for that of one rank, " if choices else ""
    yield (
        "Each rank went on with a copy of its own: `restride convert` refuses until it is told "
        "which one counts."
    )
    yield (
        f"--replicas COPY takes {one}first for that of the lowest rank, mean for their mean, and "
        "with --to deepspeed own, for each rank to keep its own; "
        f"--replicas '{rows[0][0]}=COPY' is for some tensors only."
    )


def _choices(group: _Group) -> Iterator[str]:
    if " and " in group.ranks:
        yield from group.ranks.split(" and ")
