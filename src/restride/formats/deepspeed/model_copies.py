"""The model files that go into a universal folder: copies of the source's, or made for an engine.

An engine of ZeRO-3 looks for ``zero_pp_rank_0_mp_rank_TT_model_states.pt``, one of any other stage
for ``mp_rank_TT_model_states.pt`` (deepspeed 0.19.8 `runtime/engine.py`, `_get_all_ckpt_names`). It
takes counters, schedulers and the client's state from them; the weights are in the folders of the
parameters. Where the source was trained in the other kind, the file is made of the source's: the
weights and the frozen fragments change places, everything else is as it was.
"""

from __future__ import annotations

from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.selection import select_weights
from restride.checkpoint.values import OrderedDictValue, SizeValue, StoredTensor
from restride.errors import CorruptError
from restride.formats.deepspeed._experts.native import expert_name
from restride.formats.deepspeed._experts.native_cut import on_tensor_ranks
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._settings import is_round_robin, round_robin_order
from restride.formats.deepspeed._writing.maps import universal_info
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._experts.autoep import ExpertParameter
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._run import Run
    from restride.storage.torch_output import OutputArray, TorchOutput

__all__ = ["ModelCopies"]

_INFO: Final = "universal_checkpoint_info"
_EXPERT_LAYERS: Final = "ds_autoep_layers"
_OLD_EXPERT_LAYERS: Final = "autoep_layers"
_EXPERT_PATTERNS: Final = "expert_parameter_patterns"
_EXPERT_PATTERN: Final = r"\.experts\.w[123]$"
# What is told of a layer of experts where its number of ranks no longer counts.
_EXPERT_FIELDS: Final = (
    "moe_layer_id",
    "module_path",
    "expert_key_prefix",
    "num_experts",
    "num_local_experts",
    "ep_size",
)


class ModelCopies:
    """Writes the model files of a universal folder.

    Args:
        run: The model files of the source.
        catalog: What the checkpoint holds.
        training: What goes with its tensors.
        experts: Stacked parameters of mixture-of-experts layers, by name.
        has_native: Whether there are experts of DeepSpeed's own layers; the files then speak of all
            of them, as if one rank had them.
    """

    def __init__(
        self,
        run: Run,
        catalog: Catalog,
        training: Training,
        experts: Mapping[str, ExpertParameter],
        *,
        has_native: bool = False,
    ) -> None:
        self._run = run
        self._catalog = catalog
        self._training = training
        self._experts = experts
        self._native: dict[str, Layout] = {}
        if has_native:
            tensors = on_tensor_ranks(catalog).tensors
            self._native = {t.name: t.layout for t in tensors if expert_name(t.name)}
        self._owned = {name for group in training.groups for name in group.names}

    def write(self, output: TorchOutput, top: str, *, is_partitioned: bool) -> None:
        """Add the files that an engine looks for.

        Args:
            output: Files so far.
            top: Folder to write to.
            is_partitioned: Whether it is to be an engine of ZeRO-3.

        Raises:
            UnsupportedError: A weight cannot be written.
            CorruptError: There is no weight of a parameter that nothing trains.
        """
        if self._run.is_partitioned == is_partitioned:
            for model in self._run.all_models:
                self._copy(output, top, model)
            return
        arrays = dict(self._weights(output, only_frozen=is_partitioned))
        for model in self._run.models:
            if is_partitioned:
                self._write_partitioned(output, top, model, arrays)
            else:
                self._write_whole(output, top, model, arrays)

    def _weights(
        self, output: TorchOutput, *, only_frozen: bool
    ) -> Iterator[tuple[str, OutputArray]]:
        """Announce the weights that change places, cut as the source's ranks cut them.

        So do buffers of ZeRO-3, of which every rank has a copy: they are compared as they are read.
        """
        layouts = {
            tensor.name: tensor.layout
            for tensor in self._catalog.tensors
            if (tensor.kind == "parameter" or not only_frozen)
            and tensor.name not in self._experts
            and not (only_frozen and tensor.name in self._owned)
        }
        wanted = tuple(t for t in self._catalog.tensors if t.name in layouts)
        for selected in select_weights(replace(self._catalog, tensors=wanted)):
            yield selected.tensor, output.array(selected, layouts[selected.tensor])

    def _copy(self, output: TorchOutput, top: str, model: ModelFile) -> None:
        """Copy a file byte for byte, or with what it has to say in a universal folder."""
        name = f"{top}/{PurePosixPath(model.name).name}"
        stored = model.root.get(_INFO)
        told = self._told(model, is_partitioned=self._run.is_partitioned)
        if self._run.is_of_pipeline and model.optimizer is not None:
            entries = self._entries(model, is_partitioned=False)
            output.add(FileDraft(name), {**entries, "module": None})
        elif self._run.is_of_pipeline and model.root.get("param_shapes") is None:
            output.add(FileDraft(name), _named(model))
        elif model.optimizer is not None or self._native:
            output.add(FileDraft(name), self._entries(model, is_partitioned=False))
        elif told is None or (stored is not None and stored.value == told):
            output.copy_file(name, str(self._run.root / model.name))
        else:
            output.add(FileDraft(name), {**_items(model.root), _INFO: told})

    def _write_partitioned(
        self, output: TorchOutput, top: str, model: ModelFile, arrays: Mapping[str, OutputArray]
    ) -> None:
        """Write the file of the first data-parallel rank, as if there were no other."""
        draft = FileDraft(f"{top}/zero_pp_rank_0_mp_rank_{model.tp:02d}_model_states.pt")
        empty: dict[DType, StoredTensor] = {}

        def in_module(name: str, stored: StoredTensor) -> Value:
            if name in model.buffer_names or not prod(stored.shape):
                return stored
            dtype = stored.storage.dtype
            if dtype not in empty:
                empty[dtype] = draft.buffer(dtype, 0)
            return empty[dtype]

        frozen = {
            tensor.name: tensor.layout.shard_shape(model.tp)
            for tensor in self._catalog.tensors
            if tensor.kind == "parameter" and not self._is_owned(tensor, model.tp)
        }
        fragments: dict[Value, Value] = {}
        for name, shape in frozen.items():
            if name not in model.weights:
                raise CorruptError(
                    "no parameter group trains it, so that it is frozen, and the module lacks it",
                    where=f"{model.name}: tensor {name!r}",
                )
            flat = draft.buffer(model.weights[name].storage.dtype, prod(shape))
            if name in arrays:
                draft.put(flat, arrays[name], model.tp)
            fragments[name] = flat
        output.add(
            draft,
            {
                **self._entries(model, is_partitioned=True),
                "module": _module(model, in_module),
                "frozen_param_shapes": _shapes(frozen),
                "frozen_param_fragments": _ordered(fragments),
                "dp_world_size": 1,
            },
        )

    def _write_whole(
        self, output: TorchOutput, top: str, model: ModelFile, arrays: Mapping[str, OutputArray]
    ) -> None:
        """Write the file of all data-parallel ranks, with the weights as they are trained."""
        draft = FileDraft(f"{top}/mp_rank_{model.tp:02d}_model_states.pt")
        made: dict[str, Value] = {
            name: draft.tensor(array, model.tp) for name, array in arrays.items()
        }
        for tensor in self._catalog.tensors:
            made.update((alias, made[tensor.name]) for alias in tensor.aliases)
        entries = self._entries(model, is_partitioned=False)

        def in_module(name: str, stored: StoredTensor) -> Value:
            # What no file has a weight of has an empty tensor here, and no place there.
            return made.get(name, stored if name in model.weights else None)

        module = _module(model, in_module)
        output.add(draft, {**entries, "module": module, "frozen_param_fragments": None})

    def _entries(self, model: ModelFile, *, is_partitioned: bool) -> dict[Value, Value]:
        """All that a file says, with the groups of the optimizer in the order of its kind."""
        is_dealt_out = not is_partitioned and is_round_robin(model.root.get("ds_config"))
        tp_size = self._run.tp_size // self._run.stage_count
        stage, tp = divmod(model.tp, tp_size)
        groups = [self._members(names, tp) for names in self._groups(stage)]
        if is_dealt_out:
            groups = [
                {name: members[name] for name in self._dealt_out(members)} for members in groups
            ]
        told = self._told(model, is_partitioned=is_partitioned)
        return {
            **_items(model.root),
            "optimizer": None,
            "param_shapes": [_shapes(members) for members in groups],
            "shared_params": {} if model.tp else self._aliases(),
            **({} if told is None else {_INFO: told}),
        }

    def _aliases(self) -> dict[Value, Value]:
        """Second names, which only the first rank of all knows of."""
        return {alias: tensor.name for tensor in self._catalog.tensors for alias in tensor.aliases}

    def _groups(self, stage: int) -> Iterator[tuple[str, ...]]:
        pipeline = self._training.pipeline
        groups = self._training.groups if pipeline is None else pipeline.stages[stage].groups
        yield from (group.names for group in groups)

    def _members(self, names: tuple[str, ...], tp: int) -> dict[str, Shape]:
        """Parameters of a group that a rank has elements of, with their shapes on it."""
        layouts = {tensor.name: tensor for tensor in self._catalog.tensors}
        return {
            name: self._shard_shape(layouts[name], tp)
            for name in names
            if name in layouts and self._is_owned(layouts[name], tp)
        }

    def _dealt_out(self, members: Mapping[str, Shape]) -> list[str]:
        ranks = ExpertRanks(self._run, self._experts)
        count = ranks.partition_count([*members], self._run.models[0].name)
        return round_robin_order([*members], count)

    def _shard_shape(self, tensor: TensorEntry, tp: int) -> Shape:
        """Of experts, the file speaks for the first expert-parallel rank."""
        if tensor.name in self._native:
            return self._native[tensor.name].shard_shape(tp)
        return tensor.layout.shard_shape(0 if tensor.name in self._experts else tp)

    def _is_owned(self, tensor: TensorEntry, tp: int) -> bool:
        """Whether the optimizer of a rank trains a parameter: no frozen and no empty one."""
        return tensor.name in self._owned and prod(self._shard_shape(tensor, tp)) > 0

    def _told(self, model: ModelFile, *, is_partitioned: bool) -> dict[Value, Value] | None:
        """What a universal folder has to say anew: of experts (as the peer says it), of the cut.

        Of single experts the source says what each rank has, under the names that it has there.
        Where it says nothing of the cut, what a user told is written down for who reads it next.
        """
        root = model.root
        if (self._native or self._catalog.is_cut_told) and self._run.tp_size > 1:
            return universal_info(
                {
                    tensor.name: self._native.get(tensor.name, tensor.layout)
                    for tensor in self._catalog.tensors
                    if tensor.kind == "parameter"
                },
                self._training.described,
                has_maps=self._training.has_maps,
            )
        layers = root.get(_EXPERT_LAYERS) or root.get(_OLD_EXPERT_LAYERS)
        if layers is None:
            return None
        info = root.get(_INFO)
        listed: list[Value] = [
            {key: entry.at(key).value for key in _EXPERT_FIELDS if entry.get(key)}
            for entry in layers.elements()
        ]
        return {
            **(_items(info) if info else {}),
            _EXPERT_PATTERNS: [f".*{_EXPERT_PATTERN}" if is_partitioned else _EXPERT_PATTERN],
            _EXPERT_LAYERS: layers.value if is_partitioned else listed,
        }


def _named(model: ModelFile) -> dict[Value, Value]:
    """What a pipeline stage with ZeRO would have said: `BF16_Optimizer` leaves the shapes out."""
    shapes: list[Value] = [_shapes(members) for members in model.param_shapes or ()]
    return {**_items(model.root), "module": None, "optimizer": None, "param_shapes": shapes}


def _module(model: ModelFile, weight: Callable[[str, StoredTensor], Value]) -> OrderedDictValue:
    """The state dict of the module in its own order, with other tensors in it or without them."""
    stored = model.root.at("module")
    entries = {
        key: weight(str(key), value) if isinstance(value, StoredTensor) else value
        for key, value in _items(stored).items()
    }
    module = _ordered(
        {
            key: value
            for key, value in entries.items()
            if value is not None or key not in model.dtypes
        }
    )
    if isinstance(stored.value, OrderedDictValue):
        module.state = stored.value.state
    return module


def _items(mapping: Field) -> dict[Value, Value]:
    """Entries of a mapping; one whose value is None is an entry too."""
    return {key: entry.value for key, entry in mapping.items()}


def _ordered(entries: Mapping[Value, Value]) -> OrderedDictValue:
    made = OrderedDictValue()
    made.update(entries)
    return made


def _shapes(shapes: Mapping[str, Shape]) -> OrderedDictValue:
    return _ordered({name: SizeValue(shape) for name, shape in shapes.items()})
