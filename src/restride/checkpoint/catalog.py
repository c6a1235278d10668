"""The content of a checkpoint without its bytes. Called *Metadata* in PyTorch's DCP.

A reader turns a checkpoint into a `Catalog`; nothing of a tensor is loaded. Every state of every
tensor has its own layout, since the files cut them differently (a weight over tensor-parallel
ranks, its moments over data-parallel ranks as well), and for every rank of that layout the file
and byte where its shard starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import field

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.dtypes import DType

__all__ = [
    "Catalog",
    "FileEntry",
    "Finding",
    "Region",
    "Severity",
    "StateEntry",
    "TensorEntry",
    "TensorKind",
]

Severity: TypeAlias = Literal["error", "warning", "note"]
TensorKind: TypeAlias = Literal["parameter", "buffer"]


class FileEntry(Frozen):
    """One file of a checkpoint.

    Attributes:
        name: Path below the root of the checkpoint, with forward slashes.
        nbytes: Size in bytes when the catalog was made.
        stamp: When it was written, when anything about it was changed, and its number, as the
            system told when its header was read; None where nobody asked.
    """

    name: str
    nbytes: int
    stamp: tuple[int, int, int] | None = None


class Region(Frozen):
    """Where one shard stands in a file.

    Attributes:
        file: Index into `Catalog.files`.
        start_nbytes: Byte of the file where shard index 0 stands.
    """

    file: int
    start_nbytes: int


class StateEntry(Frozen):
    """One array that belongs to a tensor: its weight, its master copy, a moment, a step.

    Attributes:
        dtype: Type of the stored elements.
        layout: How the array is cut. Its shape is the tensor's, but for scalars such as ``step``.
        regions: Place of each rank's shard, in rank order; None where the rank holds no element.
    """

    dtype: DType
    layout: Layout
    regions: tuple[Region | None, ...]


class TensorEntry(Frozen):
    """One tensor of the model with everything the checkpoint stores for it.

    Attributes:
        name: Name as the model has it.
        kind: Parameters are trained and may have optimizer states; buffers are not.
        layout: How the model-parallel ranks cut it: what people mean by its layout.
        states: Arrays by state name: ``weight`` as trained, ``fp32`` for the master copy,
            optimizer states under the optimizer's own names.
        is_frozen: Whether it is a parameter without gradient.
        aliases: Other names of the same tensor (tied weights).
        trained_dtype: Type that the parameter is trained in, where it is known. It matters where
            no weight is stored (ZeRO-3): then the weight is the master copy, rounded to this.
    """

    name: str
    kind: TensorKind
    layout: Layout
    states: Mapping[str, StateEntry]
    is_frozen: bool = False
    aliases: tuple[str, ...] = ()
    trained_dtype: DType | None = None


class Finding(Frozen):
    """Something a reader or a check noticed.

    Attributes:
        severity: An error means the checkpoint must not be used as it is.
        kind: Stable identifier for machines, such as ``"replica-drift"``.
        message: One sentence that says where and what, with the numbers.
        where: Tensor, state or file; may be empty.
        details: More numbers for machines; plain JSON values.
    """

    severity: Severity
    kind: str
    message: str
    where: str = ""
    details: Mapping[str, object] = field(default_factory=dict)


class Catalog(Frozen):
    """Everything in a checkpoint but the bytes of its tensors.

    Attributes:
        format: Name of the format and variant, such as ``"deepspeed zero-1"``.
        root: Directory (or file) that was opened.
        files: Files that hold tensors.
        mesh: The ranks that wrote it.
        tensors: Entries in the order of the model.
        values: What is not a tensor, as inert plain values by name.
        findings: What the reader noticed and did not have to refuse.
        tied: What the reader was told of layers that share a module, where names depend on it: for
            the key of each module, the layers that use it.
        is_cut_told: Whether the reader went by what it was told of the tensor-parallel cut.
    """

    format: str
    root: str
    files: tuple[FileEntry, ...]
    mesh: Mesh
    tensors: tuple[TensorEntry, ...]
    values: Mapping[str, object]
    findings: tuple[Finding, ...] = ()
    tied: Mapping[str, tuple[int, ...]] | None = None
    is_cut_told: bool = False
