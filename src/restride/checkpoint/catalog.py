"""The content of a checkpoint without its bytes. Called *Metadata* in PyTorch's DCP.

A reader turns a checkpoint into a `Catalog`; nothing of a tensor is loaded. Every state of every
tensor has its own layout, since the files cut them differently (a weight over tensor-parallel
ranks, its moments over data-parallel ranks as well), and for every rank of that layout the file
and byte where its shard starts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, overload

from msgspec import field
from msgspec.structs import force_setattr

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.dtypes import DType

__all__ = [
    "Catalog",
    "FileEntry",
    "Finding",
    "Region",
    "Regions",
    "Severity",
    "StateEntry",
    "TensorEntry",
    "TensorKind",
]

Severity: TypeAlias = Literal["error", "warning", "note"]
TensorKind: TypeAlias = Literal["parameter", "buffer"]

# Among bytes of files, the first one of a shard that is in none.
_NOWHERE: Final = -1 << 63


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


class Regions(Sequence[Region | None]):
    """The places of a shard on every rank, or None; two numbers each.

    A thousand ranks have a part of every array: as objects they would take six times the memory.

    Args:
        regions: The places, in rank order.

    Examples:
        >>> places = Regions((Region(2, 64), None))
        >>> places[0], places[1]
        (Region(file=2, start_nbytes=64), None)
        >>> places == Regions(places) == (Region(2, 64), None)
        True
    """

    __slots__ = ("_numbers",)

    def __init__(self, regions: Iterable[Region | None] = ()) -> None:
        self._numbers: array[int] = array("q")
        for region in regions:
            self._numbers.extend(
                (0, _NOWHERE) if region is None else (region.file, region.start_nbytes)
            )

    @classmethod
    def of(cls, regions: Iterable[Region | None]) -> Regions:
        """The places in this form; what is in it already stays as it is."""
        return regions if isinstance(regions, cls) else cls(regions)

    @classmethod
    def nowhere(cls, rank_count: int) -> Regions:
        """No place yet, to be filled in by who makes the files."""
        regions = cls()
        regions._numbers = array("q", (0, _NOWHERE)) * rank_count
        return regions

    def put(self, rank: int, file: int, start_nbytes: int) -> None:
        """Say where the shard of one rank is: not when anybody has them who counts on them."""
        self._numbers[2 * rank] = file
        self._numbers[2 * rank + 1] = start_nbytes

    @property
    def held_count(self) -> int:
        """Ranks that hold something."""
        return len(self) - self._numbers[1::2].count(_NOWHERE)

    def __len__(self) -> int:
        return len(self._numbers) // 2

    @overload
    def __getitem__(self, rank: int, /) -> Region | None: ...
    @overload
    def __getitem__(self, rank: slice, /) -> tuple[Region | None, ...]: ...
    def __getitem__(self, rank: int | slice, /) -> Region | tuple[Region | None, ...] | None:
        place = range(len(self))[rank]
        if isinstance(place, range):
            return tuple([self[one] for one in place])
        file, start_nbytes = self._numbers[2 * place : 2 * place + 2]
        return None if start_nbytes == _NOWHERE else Region(file, start_nbytes)

    def __iter__(self) -> Iterator[Region | None]:
        numbers = iter(self._numbers)
        for file, start_nbytes in zip(numbers, numbers, strict=True):
            yield None if start_nbytes == _NOWHERE else Region(file, start_nbytes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Regions):
            return bool(self._numbers == other._numbers)
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class StateEntry(Frozen):
    """One array that belongs to a tensor: its weight, its master copy, a moment, a step.

    Attributes:
        dtype: Type of the stored elements.
        layout: How the array is cut. Its shape is the tensor's, but for scalars such as ``step``.
        regions: Place of each rank's shard, in rank order; None where the rank holds no element.
            Kept as `Regions`.
    """

    dtype: DType
    layout: Layout
    regions: Sequence[Region | None]

    def __post_init__(self) -> None:
        force_setattr(self, "regions", Regions.of(self.regions))


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
