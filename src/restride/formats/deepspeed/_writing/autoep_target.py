"""The layers of experts that AutoEP made, placed for the ranks of a target."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.values import keyed
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.groups import regrouped
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._spread import spread_experts
from restride.formats.deepspeed.expert_settings import any_of, is_data_first
from restride.formats.deepspeed.maps import MAP_VERSION
from restride.formats.deepspeed.placements import to_expert_map, to_expert_placement
from restride.frozen import Frozen
from restride.layouts.gathered import experts
from restride.layouts.replicated import replicated
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._spread import Spread
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["ExpertLayer", "PlacedExperts", "place_stacked"]

_WEIGHTS: Final = ("w1", "w2", "w3")
_MATRICES: Final = 3
_GRADIENTS: Final = 2
_PARTITIONED_WEIGHTS: Final = 3
_PATTERN: Final = r".*\.experts\.w[123]$"
_VERSION: Final = 0.4
# Children of a layer that AutoEP makes; any other one may be a second name of the router.
_OWN_CHILDREN: Final = frozenset({"router", "experts", "shared_experts", "shared_experts_gate"})


class ExpertLayer(Frozen):
    """One mixture-of-experts layer.

    Attributes:
        stored: What the source says of it.
        number: Number in the names of the expert files.
        path: Name of the layer in the model.
        prefix: Name of its stacked parameters, but for the last part.
        count: Number of experts.
    """

    stored: Mapping[str, Value]
    number: int
    path: str
    prefix: str
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stacked parameters."""
        return tuple(f"{self.prefix}.{weight}" for weight in _WEIGHTS)


class PlacedExperts(Frozen):
    """All layers of experts, and the ranks of the target that hold them.

    Attributes:
        layers: In the order of the model.
        layouts: How the expert-parallel ranks hold each stacked parameter, by name.
        stored: For each layer what its file entries say of that: placement and affine maps.
        spread: Which ranks hold which experts, and which share them.
        target: The ranks.
        aliases: Second names of the parameters of routers: name that is no parameter's to name that
            is. The engine does not count them as shared.
        described: What `universal_checkpoint_info` of the source says beside all this.
    """

    layers: tuple[ExpertLayer, ...]
    layouts: Mapping[str, Layout]
    stored: tuple[Mapping[str, Value], ...]
    spread: Spread
    target: DeepSpeedTarget
    aliases: Mapping[str, str]
    described: Mapping[str, Value]

    @property
    def group_name(self) -> str:
        """What DeepSpeed calls the ranks."""
        return f"ep_size_{self.target.ep}"

    def retold(self, training: Training) -> Training:
        """The training with the parameter groups that an engine of the target has."""
        numels = {name: layout.full_numel for name, layout in self.layouts.items()}
        before = self.layers[0].stored.get("ep_size")
        if not isinstance(before, int) or before < 1:
            raise CorruptError(
                f"ep_size of layer {self.layers[0].path!r} is {before!r}",
                where=training.ranks[0].where,
            )
        groups = regrouped(training.groups, numels, before=before, after=self.target.ep)
        return replace(training, groups=tuple(groups))

    def copies(self, name: str, ranks: Sequence[int], mesh: Mesh) -> Layout:
        """How files have a stacked parameter that are each of one rank."""
        shape = self.layouts[name].full_shape
        held = shape[0] // self.target.ep
        cutters = map(self.expert_rank, ranks)
        placement = [range(cutter * held, (cutter + 1) * held) for cutter in cutters]
        return experts(shape, mesh=mesh, placement=placement)

    def spread_of(self, name: str) -> Spread:  # noqa: ARG002 - as for single experts
        """Which ranks hold a stacked parameter, and which share it: all are spread alike."""
        return self.spread

    def expert_rank(self, rank: int) -> int:
        """The expert-parallel rank that a rank is."""
        return self.spread.place(rank)[0]

    def tensor_layouts(self) -> Mapping[str, Layout]:
        """How the tensor-parallel ranks hold what one rank has of each stack: none cuts it."""
        mesh = self.target.tp_mesh
        return {
            name: replicated(layout.shard_shape(0), mesh=mesh)
            for name, layout in self.layouts.items()
        }

    def local_name(self, name: str, cutter: int) -> str:  # noqa: ARG002 - as for single experts
        """What an expert-parallel rank calls a parameter: a stack has one name on all."""
        return name

    def without_second_names(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The tensors of the source, by name, but for the second names of routers."""
        return {
            name: replace(tensor, aliases=tuple(a for a in tensor.aliases if a not in self.aliases))
            for name, tensor in tensors.items()
            if name not in self.aliases
        }

    def entries(
        self, rank: int, described: Mapping[Value, Value] | None = None
    ) -> dict[Value, Value]:
        """What the model file of a rank says of the experts.

        Args:
            rank: The rank.
            described: What `universal_checkpoint_info` says of all parameters, with tensor
                parallelism.
        """
        layers: list[Value] = [
            keyed({**layer.stored, **stored, **self._rank_entry(layer, rank)})
            for layer, stored in zip(self.layers, self.stored, strict=True)
        ]
        return {
            "num_experts": [layer.count for layer in self.layers],
            "ds_autoep_layers": layers,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": _VERSION,
                **keyed(self.described),
                **(described or {}),
                "expert_parameter_patterns": [_PATTERN],
                "ds_autoep_layers": layers,
            },
        }

    def _rank_entry(self, layer: ExpertLayer, rank: int) -> dict[str, Value]:
        """One layer, as deepspeed 0.19.8 `runtime/engine.py`, `_save_moe_checkpoint` says it."""
        cutter, partition = self.spread.place(rank)
        local = layer.count // self.target.ep
        is_partitioned = self.target.zero == _PARTITIONED_WEIGHTS
        return {
            "num_local_experts": local,
            "ep_size": self.target.ep,
            "checkpoint_format": "zero3_partitioned" if is_partitioned else "per_expert_files",
            "checkpoint_format_version": 1 if is_partitioned else None,
            "ep_group_name": self.group_name,
            "ep_rank": cutter,
            "expert_data_parallel_rank": partition,
            "expert_data_parallel_world_size": self.spread.partitions,
            "global_expert_start": cutter * local,
            "global_expert_end": (cutter + 1) * local,
        }


def place_stacked(catalog: Catalog, training: Training, target: DeepSpeedTarget) -> PlacedExperts:
    """Place the layers of experts of a training on the ranks of a target.

    Args:
        catalog: What the checkpoint holds.
        training: What goes with the tensors; it has such layers.
        target: The ranks.

    Raises:
        FormatError, CorruptError: What is said of the layers is wrong.
        UnsupportedError: The experts do not divide, or DeepSpeed cannot resume from such a
            checkpoint.
        ExecutionError: A file cannot be read.
    """
    data_first = is_data_first(training)
    _require_foldable(target, is_data_first=data_first, where=catalog.root)
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    layers = tuple(_layers(training, target, tensors))
    _refuse_frozen(training, target, layers)
    placed = {
        name: experts(tensors[name].layout.full_shape, mesh={"ep": target.ep})
        for layer in layers
        for name in layer.names
    }
    spread = spread_experts(target, is_data_first=data_first)
    aliases = dict(_aliases(catalog, training, layers, tensors))
    stored = tuple(_stored(layers, placed))
    return PlacedExperts(layers, placed, stored, spread, target, aliases, training.described)


def _require_foldable(target: DeepSpeedTarget, *, is_data_first: bool, where: str) -> None:
    """Refuse what the engine does.

    deepspeed 0.19.8 `module_inject/auto_ep_folding.py`, `validate_folding_global`.

    """
    if target.tp == 1:
        return
    if target.ep == 1:
        raise UnsupportedError(
            f"has experts of AutoEP, which {target.tp} tensor-parallel ranks need expert-parallel "
            "ones for",
            where=where,
            remedy="choose --ep 2 or more, or --tp 1",
        )
    if is_data_first:
        raise UnsupportedError(
            "is of a run with use_data_before_expert_parallelism, which DeepSpeed does not take "
            "with AutoEP on tensor-parallel ranks",
            where=where,
            remedy="choose --tp 1",
        )


def _stored(
    layers: tuple[ExpertLayer, ...], layouts: Mapping[str, Layout]
) -> Iterator[Mapping[str, Value]]:
    """Placement and maps of each layer; equal ones are made, and written, once."""
    known: dict[Layout, tuple[Value, Value]] = {}
    for layer in layers:
        for name in layer.names:
            layout = layouts[name]
            if layout not in known:
                known[layout] = to_expert_placement(layout), to_expert_map(layout)  # type: ignore[assignment]  # plain values
        maps: dict[Value, Value] = {name: known[layouts[name]][1] for name in layer.names}
        yield {
            "expert_placement": known[layouts[layer.names[0]]][0],
            "affine_maps": {"version": MAP_VERSION, "params": maps},
        }


def _layers(
    training: Training, target: DeepSpeedTarget, tensors: Mapping[str, TensorEntry]
) -> Iterator[ExpertLayer]:
    for number, stored in enumerate(training.experts):
        said = Field(dict(stored.items()), f"{training.ranks[0].where}: ds_autoep_layers[{number}]")
        layer = ExpertLayer(
            stored,
            said.at("moe_layer_id").integer(),
            said.at("module_path").text(),
            said.at("expert_key_prefix").text(),
            said.at("num_experts").integer(at_least=1),
        )
        for name in layer.names:
            shape = tensors[name].layout.full_shape if name in tensors else ()
            if len(shape) != _MATRICES or shape[0] != layer.count:
                raise CorruptError(
                    f"says there are {layer.count} experts, {name!r} "
                    f"{f'has shape {shape}' if name in tensors else 'is not there'}",
                    where=said.where,
                )
        if layer.count % target.ep:
            sizes = [n for n in range(1, layer.count + 1) if layer.count % n == 0]
            raise UnsupportedError(
                f"{layer.count} experts do not divide over {target.ep} expert-parallel ranks",
                where=f"layer {layer.path!r}",
                remedy=f"choose --ep {any_of(sizes)}",
            )
        yield layer


def _refuse_frozen(
    training: Training, target: DeepSpeedTarget, layers: tuple[ExpertLayer, ...]
) -> None:
    """DeepSpeed saves frozen experts of one rank for all (ZeRO-2), or not at all (ZeRO-3)."""
    trained = {name for group in training.groups for name in group.names}
    frozen = [name for layer in layers for name in layer.names if name not in trained]
    if frozen and target.zero >= _GRADIENTS:
        raise UnsupportedError(
            f"is frozen, and DeepSpeed cannot resume frozen experts with ZeRO-{target.zero}",
            where=f"tensor {frozen[0]!r}",
            remedy="choose --zero 1",
        )


def _aliases(
    catalog: Catalog,
    training: Training,
    layers: tuple[ExpertLayer, ...],
    tensors: Mapping[str, TensorEntry],
) -> Iterator[tuple[str, str]]:
    """Find the second names of routers, under which transformers looks for them.

    The module names their parameters twice, and files have the second ones as copies, or not at
    all. Something of that name which is not the same is a tensor of its own.
    """
    trained = {name for group in training.groups for name in group.names}
    with FilePool() as pool:
        for name in training.order:
            for layer in layers:
                head, _, rest = name.removeprefix(f"{layer.path}.").partition(".")
                router = f"{layer.path}.router.{rest}"
                if (
                    name.startswith(f"{layer.path}.")
                    and head not in _OWN_CHILDREN
                    and router in tensors
                    and name not in trained
                    and _is_same(catalog, pool, tensors.get(name), tensors[router])
                ):
                    yield name, router


def _is_same(
    catalog: Catalog, pool: FilePool, copy: TensorEntry | None, router: TensorEntry
) -> bool:
    """Whether a tensor is another one's copy, bit for bit, or is stored nowhere."""
    if copy is None:
        return True
    entries = copy.states.get("weight"), router.states.get("weight")
    if entries[0] is None or entries[1] is None or entries[0].layout != entries[1].layout:
        return False
    contents: list[bytearray] = []
    for entry in entries:
        region = entry.regions[0] if entry is not None else None
        if entry is None or region is None or entry.dtype != entries[0].dtype:
            return False
        contents.append(bytearray(prod(entry.layout.shard_shape(0)) * entry.dtype.itemsize_nbytes))
        file = str(Path(catalog.root) / catalog.files[region.file].name)
        pool.read_exact(file, region.start_nbytes, contents[-1])
    return contents[0] == contents[1]
