"""Describe a universal folder before it is written.

    latest_universal                       name of the folder beside it
    TAG_universal/zero/PARAMETER/fp32.pt   {"param": the whole tensor, and what marks it}
    TAG_universal/zero/PARAMETER/STATE.pt  the same for each state of the optimizer
    TAG_universal/zero/PARAMETER/step.pt   the step, bare
    TAG_universal/zero/optimizer_state.pt  loss scaler, parameter groups
    TAG_universal/mp_rank_TT_model_states.pt

This is the form that DeepSpeed 0.19.8 gives checkpoints of ZeRO-1 and ZeRO-2. ``load_checkpoint``
of an engine whose configuration says ``"checkpoint": {"load_universal": true}`` takes it from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Finding, Region, StateEntry
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.checkpoint.selection import COPIED, Export, Selected
from restride.errors import CorruptError, PlanError, UnsupportedError
from restride.layouts.replicated import replicated
from restride.storage.torch_file import lay_out_torch_file, new_tensor

if TYPE_CHECKING:
    from restride.algebra.layout import Shape
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.companions import CarriedFile, Companions
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Storage, Value

__all__ = ["lay_out"]

_ONE_RANK: Final = Mesh(())
_BYTE: Final = DTYPES["uint8"]
_MASTER: Final = DTYPES["float32"]
_PARAM: Final = "param"
_STEP: Final = "step"
_OPTIMIZER_STATE: Final = "optimizer_state.pt"
_CASTABLE: Final = frozenset({"float32", "bfloat16", "float16", "float64"})


def lay_out(catalog: Catalog, companions: Companions) -> Export:
    """Describe the universal folder of a checkpoint.

    Args:
        catalog: What the checkpoint holds.
        companions: What goes with the tensors.

    Returns:
        Files in the order of the model. A parameter without a master copy (a frozen one, another
        name of a tied one) has its weight, widened. Buffers are in the model files, and only there.

    Raises:
        CorruptError: The checkpoint is not whole.
        UnsupportedError: A name of a tensor or state cannot be the name of a folder or file.

    Cost:
        O(tensors * states).
    """
    for finding in catalog.findings:
        if finding.severity == "error":
            raise CorruptError(
                f"the checkpoint is not whole: {finding.message}",
                where=catalog.root,
                remedy="`restride check` lists everything that is missing",
            )
    writer = _Writer(catalog, companions)
    writer.add_all()
    output = Output(tuple(writer.files), tuple(writer.tensors))
    return Export(output, tuple(writer.sources), tuple(writer.findings))


class _Writer:
    def __init__(self, catalog: Catalog, companions: Companions) -> None:
        self._catalog = catalog
        self._companions = companions
        self._top = f"{companions.tag}_universal"
        root = Path(catalog.root)
        self._numbers = {str(root / file.name): n for n, file in enumerate(catalog.files)}
        self.files: list[OutputFile] = []
        self.tensors: list[OutputTensor] = []
        self.sources: list[Selected] = []
        self.findings: list[Finding] = []

    def add_all(self) -> None:
        for tensor in self._catalog.tensors:
            if tensor.kind == "parameter":
                self._add_parameter(tensor)
        self._add_value(f"{self._top}/zero/{_OPTIMIZER_STATE}", self._companions.optimizer)
        for file in self._companions.files:
            if file.value is None:
                self._add_copy(file)
            else:
                self._add_value(f"{self._top}/{file.name}", file.value)
        latest = self._top.encode()
        self.files.append(OutputFile("latest_universal", len(latest), ((0, latest),)))

    def _add_parameter(self, tensor: TensorEntry) -> None:
        where = f"tensor {tensor.name!r}"
        shape = tensor.layout.full_shape
        for state, entry in tensor.states.items():
            if state == _STEP and not entry.layout.full_shape:
                self._add_array(tensor, state, entry, tensor.name, entry.dtype)
            elif entry.layout.full_shape != shape:
                message = (
                    f"{where}: its state {state!r} of shape {entry.layout.full_shape} has no place "
                    "in a universal folder"
                )
                self.findings.append(Finding("warning", "not-carried", message, where))
            elif state != "weight":
                self._add_array(tensor, state, entry, tensor.name, entry.dtype)
        for state, number in self._companions.scalars.get(tensor.name, {}).items():
            self._add_value(self._path(tensor.name, state), number)
        weight = tensor.states.get("weight")
        names = tensor.aliases if "fp32" in tensor.states else (tensor.name, *tensor.aliases)
        if weight is None or not names:
            return
        if weight.dtype.name not in _CASTABLE:
            message = f"{where}: a weight of {weight.dtype} has no master copy to be restored from"
            self.findings.append(Finding("warning", "not-carried", message, where))
            return
        for name in names:
            self._add_array(tensor, "weight", weight, name, _MASTER)

    def _add_array(
        self, tensor: TensorEntry, state: str, entry: StateEntry, name: str, dtype: DType
    ) -> None:
        """Add the file of one state, under the tensor's own name or another one of it."""
        shape = entry.layout.full_shape
        array = new_tensor("0", dtype, self._shape(tensor, shape))
        content: dict[Value, Value] = {}
        if name == tensor.name and tensor.states.keys() - {"weight"}:
            content.update(self._companions.marks.get(name, {}).items())
        content[_PARAM] = array
        written = "fp32" if state == "weight" else state
        layout = lay_out_torch_file(self._path(name, written), array if state == _STEP else content)
        if array.storage.nbytes:
            region = Region(len(self.files), layout.storages[0][1])
            whole = replicated(shape, mesh=_ONE_RANK)
            key = f"{name}/{written}"
            self.tensors.append(OutputTensor(key, dtype, whole, (region,)))
            self.sources.append(Selected(key, tensor.name, state, entry, dtype))
        self.files.append(layout.file)

    def _shape(self, tensor: TensorEntry, shape: Shape) -> Shape:
        if shape != tensor.layout.full_shape:
            return shape
        return self._companions.shapes.get(tensor.name, shape)

    def _add_value(self, name: str, value: Value) -> None:
        """Add a file whose tensors are those of a source file."""
        layout = lay_out_torch_file(name, value)
        for storage, start in layout.storages:
            if storage.nbytes:
                number = self._source(storage)
                source = Region(number, storage.start_nbytes)
                self._add_bytes(f"{name}/{storage.key}", storage.nbytes, source, start)
        self.files.append(layout.file)

    def _add_copy(self, file: CarriedFile) -> None:
        nbytes = self._catalog.files[file.source].nbytes
        name = f"{self._top}/{file.name}"
        self._add_bytes(name, nbytes, Region(file.source, 0), 0)
        self.files.append(OutputFile(name, nbytes))

    def _add_bytes(self, key: str, nbytes: int, source: Region, start: int) -> None:
        """Copy a run of bytes into the file that is added next."""
        layout = replicated((nbytes,), mesh=_ONE_RANK)
        self.tensors.append(OutputTensor(key, _BYTE, layout, (Region(len(self.files), start),)))
        entry = StateEntry(_BYTE, layout, (source,))
        self.sources.append(Selected(key, key, COPIED, entry, _BYTE))

    def _source(self, storage: Storage) -> int:
        number = self._numbers.get(storage.file)
        if number is None:
            raise PlanError(f"{storage.file} is no file of the checkpoint")
        return number

    def _path(self, name: str, state: str) -> str:
        """Name of a file below the output; names in a checkpoint are somebody else's."""
        for part, what in ((name, "folder"), (state, "file")):
            if part in {"", ".", ".."} or not {"/", "\\", "\0"}.isdisjoint(part):
                raise UnsupportedError(
                    f"{part!r} cannot be the name of a {what} in a universal folder",
                    where=f"tensor {name!r}",
                    remedy="rename it, or convert with --to safetensors",
                )
        if name == _OPTIMIZER_STATE:
            raise UnsupportedError(
                "a universal folder keeps this name for itself", where=f"tensor {name!r}"
            )
        return f"{self._top}/zero/{name}/{state}.pt"
