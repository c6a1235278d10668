"""What all parts of the writer share: the source, the target, and the files collected so far."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from msgspec import field

from restride.checkpoint.selection import Selected
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._pipeline.place import StageDraft
from restride.formats.deepspeed._settings import is_bf16, is_round_robin, uses_bf16_optimizer
from restride.formats.deepspeed._spread import spread_dense
from restride.formats.deepspeed._writing.maps import universal_info
from restride.formats.deepspeed._writing.native_target import PlacedNative
from restride.frozen import Frozen
from restride.layouts.scaled import scaled_state
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import Catalog, Finding, StateEntry, TensorEntry
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.training import ModelRank, ParameterGroup, Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._pipeline.place import StagePlace
    from restride.formats.deepspeed._spread import Spread
    from restride.formats.deepspeed._writing.experts import Placed
    from restride.formats.deepspeed.target import DeepSpeedTarget
    from restride.storage.torch_output import OutputArray, TorchOutput

__all__ = ["FP32", "WEIGHT", "Writing", "config_of", "optimizer_key"]

WEIGHT = "weight"
FP32 = "fp32"


class Writing(Frozen, dict=True):
    """One conversion into DeepSpeed's sharded form.

    Attributes:
        catalog: The source.
        training: What goes with its tensors.
        target: What is written for.
        layouts: How the tensor-parallel ranks of the target cut each tensor, by name.
        weights: The weight of each tensor as it is trained: stored, or the master copy to be
            rounded once.
        tensors: Tensors of the source by name.
        output: Files so far.
        experts: Layers of experts that expert-parallel ranks share, where there are any.
        stage: The stage of a pipeline that this is of; then ranks, groups and tensors are its own.
        findings: What the user should know; parts add to it.
    """

    catalog: Catalog
    training: Training
    target: DeepSpeedTarget
    layouts: Mapping[str, Layout]
    weights: Mapping[str, Selected]
    tensors: Mapping[str, TensorEntry]
    output: TorchOutput
    experts: Placed | None = None
    stage: StagePlace | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def config(self) -> Field | None:
        """``ds_config`` of the source, where there is one."""
        return config_of(self.training)

    @cached_property
    def universal_info(self) -> dict[Value, Value] | None:
        """What all model files say of the cut, where tensor-parallel ranks cut anything.

        Raises:
            UnsupportedError: A layout has no words in DeepSpeed's format.
        """
        if self.stage is not None:
            return self.stage.info
        if self.target.tp == 1:
            return None
        experts = {} if self.experts is None else self.experts.tensor_layouts()
        parameters = {
            name: experts.get(name) or self.layouts[name]
            for name, tensor in self.tensors.items()
            # Of single experts, those that the first rank has: others have them under these names.
            if tensor.kind == "parameter" and (name in experts or not self.is_expert(name))
        }
        training = self.training
        # AutoTP makes maps. Models with DeepSpeed's own experts bring their tensor parallelism.
        has_maps = training.has_maps and (
            bool(training.described) or not isinstance(self.experts, PlacedNative)
        )
        return universal_info(parameters, training.described, has_maps=has_maps)

    @property
    def is_lean(self) -> bool:
        """Whether the padding is cut off the master weights: by all classes but BF16_Optimizer."""
        return not uses_bf16_optimizer(self.config, self.target.zero)

    @property
    def is_elastic(self) -> bool:
        """Whether the source lacks hyperparameters, so that the files are without them."""
        return not all(group.settings for group in self.training.groups)

    @property
    def is_round_robin(self) -> bool:
        """Whether the engine deals parameters of ZeRO-1/2 out to its partitions in turn."""
        return self.is_lean and is_round_robin(self.config)

    def source_rank(self, dp: int, tp: int, *, dp_size: int) -> ModelRank:
        """The rank of the source that speaks for a rank of the target."""
        return self.training.ranks[self.source_number(dp, tp, dp_size=dp_size)]

    def source_number(self, dp: int, tp: int, *, dp_size: int) -> int:
        """Number of that rank."""
        return self.training.number_of_rank(dp=dp, dp_size=dp_size, mp=tp, mp_size=self.target.tp)

    def shard_shape(self, name: str, cutter: int) -> Shape:
        """Shape of a tensor on a tensor-parallel rank of the target; of experts on a cutter."""
        return self.layouts[name].shard_shape(cutter)

    def is_expert(self, name: str) -> bool:
        """Whether a tensor is of experts: those of a layer, stacked, or of one of them."""
        return self.experts is not None and name in self.experts.layouts

    def spread(self, name: str) -> Spread:
        """Which ranks hold the shards of a parameter, and which share each of them."""
        if self.experts is not None and name in self.experts.layouts:
            return self.experts.spread_of(name)
        return spread_dense(self.target)

    def group_spread(self, number: int, group: ParameterGroup) -> Spread:
        """The same for a group of which all parameters are spread alike.

        Raises:
            UnsupportedError: They are not.
        """
        spreads = dict.fromkeys(self.spread(name) for name in group.names)
        if len(spreads) > 1:
            raise UnsupportedError(
                f"parameter group {number} has experts beside other parameters, which "
                f"ZeRO-{self.target.zero} does not take",
                where=self.catalog.root,
                remedy="choose --zero 3",
            )
        return next(iter(spreads), spread_dense(self.target))

    def members(self, group: ParameterGroup, cutter: int) -> dict[str, Shape]:
        """Parameters of a group on a cutter of its spread, with their shapes there.

        The optimizer does not own what has no element on this rank.
        """
        shapes = {name: self.shard_shape(name, cutter) for name in group.names}
        return {name: shape for name, shape in shapes.items() if prod(shape)}

    def is_held(self, name: str, tp: int) -> bool:
        """Whether a rank has a tensor: all have, but for single experts."""
        return not self.is_expert(name) or prod(self._shard_on(name, tp)) > 0

    def name_on(self, name: str, tp: int) -> str:
        """What the first data-parallel one of some ranks calls a tensor: experts by their place."""
        if self.experts is None or not self.is_expert(name):
            return name
        return self.experts.local_name(name, self.experts.spread_of(name).place(tp)[0])

    def cutter(self, group: ParameterGroup, tp: int) -> int:
        """The cutter of a group that the first data-parallel one of some ranks is."""
        if self.experts is None or not group.names or not self.is_expert(group.names[0]):
            return tp
        return self.experts.spread_of(group.names[0]).place(tp)[0]

    def _shard_on(self, name: str, tp: int) -> Shape:
        """Shape of a tensor on the first data-parallel one of some ranks."""
        placed = self.experts
        if placed is None or self.target is not placed.target or not self.is_expert(name):
            return self.shard_shape(name, tp)
        return self.shard_shape(name, placed.spread_of(name).place(tp)[0])

    def is_owned(self, name: str, tp: int) -> bool:
        """Whether the optimizer of a rank trains a parameter: not a frozen or an empty one."""
        return not self.tensors[name].is_frozen and prod(self._shard_on(name, tp)) > 0

    def state(self, tensor: TensorEntry, state: str, layout: Layout) -> OutputArray:
        """Announce an optimizer state (or master copy) of a tensor, cut by `layout`.

        Raises:
            UnsupportedError: The source does not have it, or the target stores the tensor scaled
                and how this state follows is not known.
        """
        scaled = scaled_state(layout, state, f"tensor {tensor.name!r}")
        return self.array(self.selected(tensor, state), scaled)

    def array(self, selected: Selected, layout: Layout) -> OutputArray:
        """Announce an array, cut by `layout` over the ranks of the stage, or of the run."""
        if self.stage is not None:
            layout = self.stage.placed(layout, selected.entry.layout)
        return self.output.array(selected, layout)

    def draft(self, name: str) -> FileDraft:
        """Begin a file."""
        return FileDraft(name) if self.stage is None else StageDraft(name, place=self.stage)

    @property
    def model_ranks(self) -> int:
        """Model-parallel ranks of the target: the tensor-parallel ones of all stages."""
        return self.target.tp * (self.stage.count if self.stage else 1)

    def model_rank(self, tp: int) -> int:
        """Number of a tensor-parallel rank among them."""
        return tp + (self.stage.number * self.target.tp if self.stage else 0)

    def selected(self, tensor: TensorEntry, state: str) -> Selected:
        """Where a state is read from.

        Raises:
            UnsupportedError: The source does not have it.
        """
        entry = self.entry(tensor, state)
        source = state if state in tensor.states else WEIGHT
        return Selected(f"{tensor.name}/{state}", tensor.name, source, entry, entry.dtype)

    def entry(self, tensor: TensorEntry, state: str) -> StateEntry:
        """A state of the source; weights that are trained in float32 are their own master copies.

        Raises:
            UnsupportedError: The source does not have it.
        """
        entry = tensor.states.get(state)
        if entry is None and state == FP32:
            entry = tensor.states.get(WEIGHT)
            if entry is not None and entry.dtype.name != "float32":
                raise UnsupportedError(
                    f"has a weight of {entry.dtype.name} and no master copy in float32",
                    where=f"tensor {tensor.name!r}",
                    remedy="convert a checkpoint that has its optimizer, or the weights alone "
                    "with --to safetensors",
                )
        if entry is None:
            raise UnsupportedError(
                f"has no state {state!r}, which other parameters of its group have",
                where=f"tensor {tensor.name!r}",
                remedy="save the checkpoint after a step in which every parameter had a gradient",
            )
        return entry

    def model_name(self, tp: int, dp: int | None = None) -> str:
        """File of the weights of a rank; of one data-parallel rank under ZeRO-3."""
        partition = "" if dp is None else f"zero_pp_rank_{dp}_"
        return f"{self.training.tag}/{partition}mp_rank_{self.model_rank(tp):02d}_model_states.pt"

    def optimizer_name(self, tp: int, dp: int) -> str:
        """File of the optimizer of a rank; its prefix follows the engine's own configuration."""
        config = self.config
        is_prefixed = self.dtype.name == "bfloat16" if config is None else is_bf16(config)
        mp = self.model_rank(tp)
        prefix = "bf16_" if is_prefixed else ""
        return f"{self.training.tag}/{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"

    @property
    def dtype(self) -> DType:
        """Type that the weights are trained in."""
        return self.training.dtype

    def require_known(self) -> None:
        """Refuse a training whose groups name what the catalog does not have.

        Raises:
            CorruptError: A parameter of a group is no tensor of the catalog, or has no layout.
        """
        for number, group in enumerate(self.training.groups):
            for name in group.names:
                if name not in self.tensors or name not in self.layouts:
                    raise CorruptError(
                        f"parameter group {number} has {name!r}, which no file has",
                        where=self.catalog.root,
                    )


def config_of(training: Training) -> Field | None:
    """``ds_config`` of a training, where its files have one."""
    first = training.ranks[0]
    stored = first.values.get("ds_config")
    return None if stored is None else Field(stored, f"{first.where}: ds_config")


def optimizer_key(state: str) -> str:
    """Name of a state as the optimizer has it.

    The reader renames what an optimizer calls as the catalog calls the weights.
    """
    own = state.removeprefix("optimizer_")
    return own if own in {FP32, WEIGHT} else state
