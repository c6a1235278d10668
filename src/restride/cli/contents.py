"""The content of a checkpoint, as a page and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from restride.algebra.serial import layout_to_json
from restride.cli.findings import finding_to_json
from restride.cli.output import Column
from restride.cli.picture import format_shape
from restride.cli.sizes import format_count, format_size
from restride.cli.words import describe_layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.cli.output import Page

__all__ = [
    "catalog_to_json",
    "show_headline",
    "show_summary",
    "show_tensors",
]


def catalog_to_json(catalog: Catalog) -> dict[str, object]:
    """Everything that `restride info` shows, for machines."""
    return {
        "format": catalog.format,
        "mesh": dict(catalog.mesh.axes),
        "files": {file.name: file.nbytes for file in catalog.files},
        "tensors": {tensor.name: _tensor_to_json(tensor) for tensor in catalog.tensors},
        "values": sorted(catalog.values),
        "findings": [finding_to_json(finding) for finding in catalog.findings],
    }


def show_headline(page: Page, path: str, catalog: Catalog) -> None:
    """Write which checkpoint it is, in one line."""
    writers = ""
    if catalog.mesh.axes:
        writers = f", written by {format_count(catalog.mesh.size, 'rank')} ({catalog.mesh})"
    page.line(f"{path}: {catalog.format}{writers}", "bold")


def show_summary(page: Page, catalog: Catalog) -> None:
    """Write what is in the checkpoint, in two lines."""
    kinds = Counter(tensor.kind for tensor in catalog.tensors)
    counts = [format_count(kinds[kind], kind) for kind in ("parameter", "buffer") if kinds[kind]]
    numel = sum(tensor.layout.full_numel for tensor in catalog.tensors)
    nbytes = sum(file.nbytes for file in catalog.files)
    page.line(
        f"{' and '.join(counts) or 'no tensors'}, {format_count(numel, 'element')}, in "
        f"{format_count(len(catalog.files), 'file')} of {format_size(nbytes)}"
    )
    page.line(f"states: {'; '.join(_states(catalog)) or 'none'}")


def _states(catalog: Catalog) -> Iterator[str]:
    """States that have the same dtype in the same number of tensors, together."""
    counts = Counter(
        (state, str(entry.dtype))
        for tensor in catalog.tensors
        for state, entry in tensor.states.items()
    )
    groups: dict[tuple[str, int], list[str]] = {}
    for (state, dtype), count in counts.items():
        groups.setdefault((dtype, count), []).append(state)
    for (dtype, count), states in groups.items():
        some = "" if count == len(catalog.tensors) else f" of {format_count(count, 'tensor')}"
        yield f"{', '.join(states)} ({dtype}){some}"


def show_tensors(page: Page, catalog: Catalog) -> None:
    """Write one line for each tensor."""
    if not catalog.tensors:
        return
    columns = [Column("tensor"), Column("shape"), Column("dtype"), Column("layout")]
    page.line()
    page.table(columns, [_tensor_row(tensor) for tensor in catalog.tensors])
    tied = [tensor for tensor in catalog.tensors if tensor.aliases]
    if tied:
        page.line()
    for tensor in tied:
        page.line(f"{', '.join(tensor.aliases)} is tied to {tensor.name}")


def _dtype(tensor: TensorEntry) -> str:
    """The dtype that was trained in, or that of the first state there is."""
    weight = tensor.states.get("weight")
    if weight is None and tensor.trained_dtype is not None:
        return str(tensor.trained_dtype)
    entry = weight or next(iter(tensor.states.values()), None)
    return str(entry.dtype) if entry is not None else "-"


def _tensor_row(tensor: TensorEntry) -> list[str]:
    notes = [describe_layout(tensor.layout)]
    notes += ["frozen"] if tensor.is_frozen else []
    notes += ["buffer"] if tensor.kind == "buffer" else []
    return [
        tensor.name,
        format_shape(tensor.layout.full_shape),
        _dtype(tensor),
        ", ".join(notes),
    ]


def _tensor_to_json(tensor: TensorEntry) -> dict[str, object]:
    return {
        "kind": tensor.kind,
        "shape": list(tensor.layout.full_shape),
        "dtype": _dtype(tensor),
        "states": {
            state: {"dtype": str(entry.dtype), "shape": list(entry.layout.full_shape)}
            for state, entry in tensor.states.items()
        },
        "layout": layout_to_json(tensor.layout),
        "frozen": tensor.is_frozen,
        "aliases": list(tensor.aliases),
    }
