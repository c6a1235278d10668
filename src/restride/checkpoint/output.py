"""Files to be written, described before the first byte is.

A writer of a format turns what is wanted into an `Output`: how long each file is, which bytes of
it are fixed (headers, an index), and where the shards of each tensor stand. Whoever moves the bytes
needs no more, so no executor knows a format. Bytes that nobody claims are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import force_setattr, replace

from restride.checkpoint.catalog import Region, Regions
from restride.errors import PlanError
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.dtypes import DType

__all__ = ["Output", "OutputFile", "OutputTensor"]


class OutputFile(Frozen):
    """One file to be written.

    Attributes:
        name: Path below the root of the output, with forward slashes.
        nbytes: Size in bytes.
        literals: (first byte, content) of the parts that are fixed, with blanks for the label.
        label: What the file is called inside. Files that differ in nothing else share the literals.
        label_places: For each literal, where in it the label stands; empty where there is no label.

    Raises:
        PlanError: The name would leave the root, or a literal does not fit into the file.
    """

    name: str
    nbytes: int
    literals: tuple[tuple[int, bytes], ...] = ()
    label: str = ""
    label_places: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if "\0" in self.name or "\\" in self.name or not {"", ".", ".."}.isdisjoint(parts):
            raise PlanError(f"{self.name!r} is no path below the root of the output")
        if self.nbytes < 0:
            raise PlanError(f"a file of {self.nbytes} bytes was planned", where=self.name)

    def spelled(self) -> Iterator[tuple[int, bytes]]:
        """Yield (first byte, content) of the parts that are fixed, as they are to be written."""
        if not self.label_places:
            yield from self.literals
            return
        label = self.label.encode()
        for (start, literal), places in zip(self.literals, self.label_places, strict=True):
            content = bytearray(literal)
            for place in places:
                content[place : place + len(label)] = label
            yield start, bytes(content)


class OutputTensor(Frozen):
    """One array to be written.

    Attributes:
        name: Name under which the format stores it.
        dtype: Type of the stored elements.
        layout: How the format cuts it.
        regions: Place of each rank's shard, in rank order; None where the rank holds no element.
            `Region.file` is an index into `Output.files`. Kept as `Regions`.

    Raises:
        PlanError: There is not one region for each rank of the layout, or a shard with elements
            has no place.
    """

    name: str
    dtype: DType
    layout: Layout
    regions: Sequence[Region | None]

    def __post_init__(self) -> None:
        force_setattr(self, "regions", Regions.of(self.regions))
        if len(self.regions) != self.layout.rank_count:
            raise PlanError(
                f"regions of {counted(len(self.regions), 'rank')} are given, the layout has "
                f"{self.layout.rank_count}",
                where=f"tensor {self.name!r}",
            )
        for rank, region in enumerate(self.regions):
            if region is None and self.shard_nbytes(rank):
                raise PlanError(
                    f"a shard of {self.shard_nbytes(rank)} bytes has no place",
                    where=f"tensor {self.name!r}, rank {rank}",
                )

    def shard_nbytes(self, rank: int) -> int:
        """Bytes that the shard of `rank` takes in its file.

        Raises:
            LayoutError: The rank is not on the mesh.
        """
        numel = self.layout.shard_numel(rank)
        if self.layout.unit_bits is None:
            return numel * self.dtype.itemsize_nbytes
        return -(-numel * self.layout.unit_bits // 8)


class Output(Frozen):
    """A set of files to be written.

    Attributes:
        files: Files, in the order in which they are numbered.
        tensors: What stands in them.

    Raises:
        PlanError: Two files have one name, a region names no file or leaves it, or two parts of a
            file overlap.

    Cost:
        O(n log n) in the number of literals and shards.
    """

    files: tuple[OutputFile, ...]
    tensors: tuple[OutputTensor, ...] = ()

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError("two files of one output have this name", where=twice)
        for file, parts in zip(self.files, self._parts(), strict=True):
            _require_apart(file, parts)

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(file.nbytes for file in self.files)

    @classmethod
    def joined(cls, outputs: Iterable[Output]) -> Output:
        """Put several outputs into one directory; files are numbered through.

        Raises:
            PlanError: As for `Output` itself.
        """
        files: list[OutputFile] = []
        tensors: list[OutputTensor] = []
        for output in outputs:
            first = len(files)
            files.extend(output.files)
            tensors.extend(
                replace(
                    tensor,
                    regions=[
                        region and Region(region.file + first, region.start_nbytes)
                        for region in tensor.regions
                    ],
                )
                for tensor in output.tensors
            )
        return cls(tuple(files), tuple(tensors))

    def gaps(self) -> Iterator[tuple[OutputFile, int, int]]:
        """Yield (file, first byte, end) of what is in no part: a new file has zeros there."""
        for file, parts in zip(self.files, self._parts(), strict=True):
            end = 0
            for start, stop, _ in (*parts, (file.nbytes, file.nbytes, "")):
                if start > end:
                    yield file, end, start
                end = stop

    def _parts(self) -> list[list[tuple[int, int, str]]]:
        """(first byte, end, what) of the fixed parts and shards of each file, in order."""
        parts: list[list[tuple[int, int, str]]] = [
            [(start, start + len(literal), "a fixed part") for start, literal in file.literals]
            for file in self.files
        ]
        for tensor in self.tensors:
            what = f"tensor {tensor.name!r}"  # once for all of a thousand shards
            for number, start, stop in self._shards(tensor):
                parts[number].append((start, stop, what))
        for content in parts:
            content.sort()
        return parts

    def _shards(self, tensor: OutputTensor) -> Iterator[tuple[int, int, int]]:
        """(file, first byte, end) of each shard of a tensor that has bytes."""
        for rank, region in enumerate(tensor.regions):
            nbytes = tensor.shard_nbytes(rank)
            if region is None or not nbytes:
                continue
            if not 0 <= region.file < len(self.files):
                raise PlanError(
                    f"file {region.file} of {len(self.files)} was planned for it",
                    where=f"tensor {tensor.name!r}, rank {rank}",
                )
            yield region.file, region.start_nbytes, region.start_nbytes + nbytes


def _require_apart(file: OutputFile, parts: list[tuple[int, int, str]]) -> None:
    """Check that sorted parts lie inside the file, and none inside another."""
    end, before = 0, "the start of the file"
    for start, stop, what in parts:
        if start < end:
            raise PlanError(
                f"{what} starts at byte {start}, before the end of {before} at byte {end}",
                where=file.name,
            )
        end, before = stop, what
    if end > file.nbytes:
        raise PlanError(
            f"{before} ends at byte {end}, the file has {file.nbytes} bytes", where=file.name
        )
