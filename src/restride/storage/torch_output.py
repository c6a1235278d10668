"""Files of ``torch.save`` that are about to be written, and what their tensors are read from.

A writer of a format says what an array is (`TorchOutput.array`: a state of a tensor, and how the
output cuts it), makes a draft of each file, and puts the shards of arrays into it: as tensors of
their own, or into flat buffers that several arrays share. Where a shard then stands is known when
the file is laid out. Tensors of source files in a value are carried over with their bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field
from msgspec.structs import replace

from restride.algebra.coverage import require_covered
from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Region, Regions, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.checkpoint.selection import COPIED, Export, Selected
from restride.errors import PlanError, RestrideError
from restride.layouts.replicated import replicated
from restride.storage.torch_file import (
    lay_out_torch_file,
    name_inside,
    new_tensor,
    place_torch_content,
    torch_content,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import Catalog, Finding
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Storage, StoredTensor, Value
    from restride.storage.torch_file import TorchContent, TorchFileLayout

__all__ = ["FileDraft", "OutputArray", "TorchOutput"]

_ONE_RANK: Final = Mesh(())
_BYTE: Final = DTYPES["uint8"]


class OutputArray(Struct, eq=False):
    """One state of one tensor in the output.

    Attributes:
        selected: What it is, and where it is read from.
        layout: How the output cuts it.
        regions: Where the shard of each rank stands; filled in as files are added.
    """

    selected: Selected
    layout: Layout
    regions: Regions


class FileDraft(Struct):
    """A file whose tensors are being collected.

    Attributes:
        name: Name below the root of the output.
        made: Type and shape of each tensor that was made for it.
        placed: (key of the storage, array, rank, byte of the storage) of each shard in it.
    """

    name: str
    made: list[tuple[DType, Shape]] = field(default_factory=list)
    placed: list[tuple[str, OutputArray, int, int]] = field(default_factory=list)

    def tensor(self, array: OutputArray, rank: int) -> StoredTensor:
        """Make a tensor of the shard of one rank, in a storage of its own."""
        made = self.buffer(array.selected.dtype, *array.layout.shard_shape(rank))
        self.put(made, array, rank)
        return made

    def buffer(self, dtype: DType, *shape: int) -> StoredTensor:
        """Make a tensor that is zero wherever nothing is put into it."""
        self.made.append((dtype, shape))
        return new_tensor(str(len(self.made)), dtype, shape)

    def put(self, buffer: StoredTensor, array: OutputArray, rank: int, start: int = 0) -> None:
        """Put the shard of one rank into a buffer, from one of its elements on."""
        start_nbytes = start * buffer.storage.dtype.itemsize_nbytes
        self.placed.append((buffer.storage.key, array, rank, start_nbytes))


class TorchOutput:
    """Collects the files of an output.

    Args:
        catalog: The source.
    """

    def __init__(self, catalog: Catalog) -> None:
        root = Path(catalog.root)
        self._numbers = {str(root / file.name): n for n, file in enumerate(catalog.files)}
        self._nbytes = {str(root / file.name): file.nbytes for file in catalog.files}
        self._files: list[OutputFile] = []
        self._arrays: list[OutputArray] = []
        self._copies: list[tuple[OutputTensor, Selected]] = []
        self._proved: set[Layout] = set()
        self._literals: dict[bytes, bytes] = {}
        self._contents: dict[Hashable, TorchContent] = {}
        self._layouts: dict[Hashable, TorchFileLayout] = {}

    def array(self, selected: Selected, layout: Layout) -> OutputArray:
        """Announce an array.

        Args:
            selected: What it is, its key in the output and the dtype to write.
            layout: How the output cuts it.

        Raises:
            CoverageError: The layout has a hole, or a shard has an address that nothing fills.
        """
        if layout not in self._proved:
            try:
                require_covered(layout)
            except RestrideError as error:
                raise error.located(f"tensor {selected.tensor!r} in the output") from None
            self._proved.add(layout)
        array = OutputArray(selected, layout, Regions.nowhere(layout.rank_count))
        self._arrays.append(array)
        return array

    def add(self, draft: FileDraft, value: Value, *, alike: Hashable = None) -> None:
        """Add a file that holds `value`, whose new tensors were made by `draft`.

        Args:
            draft: The file.
            value: What it holds.
            alike: Key of files whose values are equal if their drafts made equal tensors. They
                differ in names and in what is put into the tensors, and are laid out once: there is
                a file for each state of a parameter, or for each of thousands of ranks.

        Raises:
            PlanError: A tensor of the draft is not in the value, or a tensor of the value is in no
                file of the source.
            UnsupportedError: The value has a part that no file can have.
        """
        layout = self._laid_out(draft, value, alike)
        number = len(self._files)
        starts: dict[str, int] = {}
        for storage, start in layout.storages:
            if not storage.file:
                starts[storage.key] = start
            elif storage.nbytes:
                self._copy(f"{draft.name}/{storage.key}", storage, Region(number, start))
        for key, array, rank, start in draft.placed:
            if key not in starts:
                raise PlanError(
                    f"tensor {array.selected.tensor!r} was made and is not in the value",
                    where=draft.name,
                )
            if array.layout.shard_numel(rank):
                array.regions.put(rank, number, starts[key] + start)
        self._files.append(self._shared(layout.file))

    def add_file(self, name: str, content: bytes) -> None:
        """Add a file of known bytes."""
        self._files.append(OutputFile(name, len(content), ((0, content),)))

    def copy_file(self, name: str, path: str) -> None:
        """Add a copy of a file of the source, byte for byte.

        Raises:
            PlanError: It is no file of the catalog.
        """
        nbytes = self._nbytes.get(path, 0)
        self._copy_bytes(name, nbytes, self._place(path, 0), Region(len(self._files), 0))
        self._files.append(OutputFile(name, nbytes))

    def finish(self, findings: tuple[Finding, ...] = ()) -> Export:
        """Return all of it.

        Raises:
            PlanError: A shard of an array is in no file, or two are in one place.
        """
        arrays = [array for array in self._arrays if array.layout.full_numel]
        tensors = [
            OutputTensor(array.selected.key, array.selected.dtype, array.layout, array.regions)
            for array in arrays
        ]
        sources = [array.selected for array in arrays]
        return Export(
            Output(tuple(self._files), (*tensors, *(tensor for tensor, _ in self._copies))),
            (*sources, *(selected for _, selected in self._copies)),
            findings,
        )

    def _laid_out(self, draft: FileDraft, value: Value, alike: Hashable) -> TorchFileLayout:
        if alike is None:
            return lay_out_torch_file(draft.name, value)
        label = name_inside(draft.name)
        key = alike, tuple(draft.made)
        known = self._layouts.get((*key, len(label)))
        if known is None:
            content = self._contents.get(key)
            if content is None:
                content = self._contents[key] = torch_content(draft.name, value)
            known = place_torch_content(draft.name, content)
            self._layouts[*key, len(label)] = known
        return replace(known, file=replace(known.file, name=draft.name, label=label))

    def _shared(self, file: OutputFile) -> OutputFile:
        """The file, with the literals of earlier ones: ranks by the thousand say the same."""
        known = self._literals
        literals = ((start, known.setdefault(content, content)) for start, content in file.literals)
        return replace(file, literals=tuple(literals))

    def _copy(self, key: str, storage: Storage, target: Region) -> None:
        self._copy_bytes(
            key, storage.nbytes, self._place(storage.file, storage.start_nbytes), target
        )

    def _copy_bytes(self, key: str, nbytes: int, source: Region, target: Region) -> None:
        layout = replicated((nbytes,), mesh=_ONE_RANK)
        entry = StateEntry(_BYTE, layout, (source,))
        self._copies.append(
            (
                OutputTensor(key, _BYTE, layout, (target,)),
                Selected(key, key, COPIED, entry, _BYTE),
            )
        )

    def _place(self, path: str, start_nbytes: int) -> Region:
        number = self._numbers.get(path)
        if number is None:
            raise PlanError(f"{path} is no file of the checkpoint")
        return Region(number, start_nbytes)
