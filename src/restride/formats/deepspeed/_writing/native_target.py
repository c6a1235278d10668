"""The experts of DeepSpeed's own MoE layers, placed for the ranks of a target.

A layer is built for a number of expert-parallel ranks, and every rank calls its own experts
``deepspeed_experts.0`` and so on. Tensor-parallel ranks hold them whole, or cut them
(`_experts.native_cut`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field
from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.groups import MOST_GROUP_NUMEL
from restride.formats.deepspeed._experts.native import expert_name, held_by
from restride.formats.deepspeed._experts.native_cut import are_cut, held_before, require_saved
from restride.formats.deepspeed._experts.native_groups import ExpertOrder
from restride.formats.deepspeed._hash_order import set_order
from restride.formats.deepspeed._rank_blocks import gathered, in_block
from restride.formats.deepspeed._spread import spread_cut_experts, spread_experts
from restride.formats.deepspeed.expert_settings import any_of, is_data_first, native_rank_count
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.frozen import Frozen
from restride.layouts.replicated import replicated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._spread import Spread

__all__ = ["NativeLayer", "PlacedNative", "on_one_rank", "place_native", "shows"]

_PARTITIONED_WEIGHTS: Final = 3
_GRADIENTS: Final = 2


class NativeLayer(Frozen):
    """One layer.

    Attributes:
        number: Number in the names of the expert files.
        prefix: What the names of its experts begin with.
        count: Number of experts.
        names: Tensors of each expert, in the order of its module.
    """

    number: int
    prefix: str
    count: int
    names: tuple[tuple[str, ...], ...]


class PlacedNative(Frozen):
    """All layers of experts, and the ranks of the target that hold them.

    Attributes:
        layers: In the order of the model.
        layouts: Which expert-parallel rank holds each tensor of an expert, by name.
        before: Expert-parallel ranks of the source, of each layer.
        after: Those of the target.
        spreads: Which ranks hold which experts, and which share them: for each number of ranks that
            layers are on, in the order that the engine has its groups in.
        target: The ranks.
        cuts: How the tensor-parallel ranks cut each tensor; empty where experts are whole.
        sizes: Elements that a rank of the source has of each tensor; empty where it has all.
    """

    layers: tuple[NativeLayer, ...]
    layouts: Mapping[str, Layout]
    before: Mapping[str, int]
    after: Mapping[str, int]
    spreads: Mapping[int, Spread]
    target: DeepSpeedTarget
    cuts: Mapping[str, Layout] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def aliases(self) -> Mapping[str, str]:
        """None: no parameter has a second name that the engine does not count as shared."""
        return {}

    @property
    def group_name(self) -> str:
        """What DeepSpeed calls the ranks."""
        return f"ep_size_{self.target.ep}"

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks cut the experts."""
        return bool(self.cuts)

    @property
    def order(self) -> ExpertOrder:
        """The experts as parameter groups have them."""
        counts = {layer.prefix: layer.count for layer in self.layers}
        names = frozenset(self.layouts)
        return ExpertOrder(counts, names, self.before, self.after, [*self.spreads])

    def retold(self, training: Training, *, most: int = MOST_GROUP_NUMEL) -> Training:
        """The training with the parameter groups that an engine of the target has.

        Args:
            training: That of the source.
            most: Elements that a group has at most on a rank.

        Raises:
            UnsupportedError: As for `ExpertOrder.retold`.
        """
        full = {name: layout.full_numel for name, layout in self.layouts.items()}
        after = [full]
        if self.is_cut:
            after = [
                {name: cut.shard_numel(tp) for name, cut in self.cuts.items()}
                for tp in range(self.target.tp)
            ]
        groups = self.order.retold(training.groups, self.sizes or full, after, most=most)
        return replace(training, groups=groups)

    def without_second_names(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The tensors of the source, by name: there are no second names."""
        return dict(tensors)

    def entries(
        self,
        rank: int,  # noqa: ARG002 - as for AutoEP
        described: Mapping[Value, Value] | None = None,  # noqa: ARG002
    ) -> dict[Value, Value]:
        """What the model file of a rank says of the experts."""
        return {"num_experts": [layer.count for layer in self.layers], "ds_autoep_layers": None}

    def copies(self, name: str, ranks: Sequence[int], mesh: Mesh) -> Layout:
        """How files have a tensor that are each of one rank."""
        spread = self.spread_of(name)
        return gathered(self.layouts[name], [spread.place(rank)[0] for rank in ranks], mesh)

    def spread_of(self, name: str) -> Spread:
        """Which ranks hold the experts of a tensor's layer, and which share them."""
        parts = expert_name(name)
        return self.spreads[self.after[parts[0]] if parts else self.target.ep]

    def expert_rank(self, rank: int) -> int:
        """The expert-parallel rank that a rank is, of the largest number of them."""
        return self._expert_rank(self.spreads[self.target.ep].place(rank)[0])

    def tensor_layouts(self) -> Mapping[str, Layout]:
        """How the tensor-parallel ranks hold what the first of them has of experts."""
        mesh, first = self.target.tp_mesh, range(self.target.tp if self.is_cut else 1)
        return {
            name: self.cuts.get(name) or replicated(layout.full_shape, mesh=mesh)
            for name, layout in self.layouts.items()
            if any(layout.shard_numel(rank) for rank in first)
        }

    def local_name(self, name: str, cutter: int) -> str:
        """What a rank calls one of its tensors."""
        parts = expert_name(name) if name in self.layouts else None
        if parts is None:
            return name
        prefix, number, rest = parts
        held = self.order.counts[prefix] // self.after[prefix]
        return f"{prefix}.{number - self._expert_rank(cutter) * held}.{rest}"

    def _expert_rank(self, cutter: int) -> int:
        return cutter // self.target.tp if self.is_cut else cutter


def place_native(
    catalog: Catalog,
    training: Training,
    target: DeepSpeedTarget,
    cuts: Mapping[str, Layout],
) -> PlacedNative | None:
    """Place the experts of DeepSpeed's own layers, or return None where there are none.

    Args:
        catalog: The source.
        training: What goes with its tensors.
        target: The ranks.
        cuts: How its tensor-parallel ranks hold each tensor; nothing is asked where there is one.

    Raises:
        CorruptError: Experts of a layer are missing, or no number says how many ranks had them.
        UnsupportedError: The experts do not divide, or DeepSpeed cannot resume from such a
            checkpoint.
    """
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    layers = tuple(_layers(tensors, catalog.root))
    if not layers:
        return None
    names = [name for layer in layers for own in layer.names for name in own]
    cut = {name: cuts[name] for name in names} if target.tp > 1 else {}
    if cut and not are_cut(catalog, cut):
        cut = {}
    data_first = is_data_first(training)
    _require_possible(catalog, target)
    before = _ranks_before(training, layers, tensors, catalog.root)
    after = before if target.is_ep_kept else dict.fromkeys(before, target.ep)
    spread = spread_cut_experts if cut else spread_experts
    spreads: dict[int, Spread] = {}
    for size in _in_order({*after.values()}, catalog.root):
        own = replace(target, ep=size)
        require_saved(own, is_cut=bool(cut), is_data_first=data_first, where=catalog.root)
        spreads[size] = spread(own, is_data_first=data_first)
    layouts = dict(_layouts(layers, tensors, target, cut, after))
    frozen = [name for name in layouts if tensors[name].is_frozen]
    if frozen and target.zero >= _GRADIENTS and target.ep > 1:
        raise UnsupportedError(
            f"is frozen, and DeepSpeed resumes all ranks with the frozen experts of the first "
            f"with ZeRO-{target.zero}",
            where=f"tensor {frozen[0]!r}",
            remedy="choose --zero 1, or --ep 1",
        )
    held = {name: held_before(tensors[name]) for name in names}
    return PlacedNative(layers, layouts, before, after, spreads, target, cut, held)


def _in_order(sizes: Collection[int], where: str) -> list[int]:
    """The numbers of ranks that layers are on, as the engine has their groups in order."""
    by_name = {f"ep_size_{size}": size for size in sorted(sizes)}
    return [by_name[name] for name in set_order([*by_name], where)]


def _layouts(
    layers: Sequence[NativeLayer],
    tensors: Mapping[str, TensorEntry],
    target: DeepSpeedTarget,
    cuts: Mapping[str, Layout],
    ranks: Mapping[str, int],
) -> Iterator[tuple[str, Layout]]:
    """Which ranks hold each tensor of an expert: expert-parallel ones, and those that cut it."""
    for layer in layers:
        count = ranks[layer.prefix]
        mesh, both = Mesh((("ep", count),)), Mesh((("ep", count), ("tp", target.tp)))
        if layer.count % count:
            sizes = [n for n in range(1, layer.count + 1) if layer.count % n == 0]
            raise UnsupportedError(
                f"{layer.count} experts do not divide over {count} expert-parallel ranks",
                where=f"layer {layer.prefix!r}",
                remedy=f"choose --ep {any_of(sizes)}",
            )
        held = layer.count // count
        for number, names in enumerate(layer.names):
            for name in names:
                if cuts:
                    yield name, in_block(cuts[name], both, number // held * target.tp)
                else:
                    yield name, held_by(tensors[name].layout.full_shape, mesh, [number // held])


def on_one_rank(catalog: Catalog, training: Training) -> Training | None:
    """The training of an engine in which every rank has all experts of DeepSpeed's own layers.

    Returns:
        None where there are no such layers.

    Raises:
        CorruptError: Experts of a layer are missing.
        UnsupportedError: Nothing says in which order such an engine has them.
    """
    placed = place_native(catalog, training, DeepSpeedTarget(tp=1, dp=1, zero=1), {})
    return None if placed is None else placed.retold(training)


def shows(catalog: Catalog, placed: PlacedNative) -> bool:
    """Whether files of a source show that experts are whole, or cut, as they are in a target."""
    if placed.target.tp == 1:
        return True
    is_several = dict(catalog.mesh.axes).get("tp", 1) > 1
    return is_several and are_cut(catalog, {}) == placed.is_cut


def _require_possible(catalog: Catalog, target: DeepSpeedTarget) -> None:
    """What the engine itself refuses, or cannot be told of in files."""
    if target.zero == _PARTITIONED_WEIGHTS:
        # deepspeed 0.19.8 `runtime/engine.py`, `_validate_zero3_moe_compatibility`
        raise UnsupportedError(
            "has experts of DeepSpeed's own MoE layer, which DeepSpeed does not train with ZeRO-3",
            where=catalog.root,
            remedy="choose --zero 0, 1 or 2",
        )


def _layers(tensors: Mapping[str, TensorEntry], where: str) -> Iterator[NativeLayer]:
    """The layers, in the order of the model."""
    experts: dict[str, dict[int, list[str]]] = {}
    for name in tensors:
        parts = expert_name(name)
        if parts is not None:
            experts.setdefault(parts[0], {}).setdefault(parts[1], []).append(name)
    for number, (prefix, own) in enumerate(experts.items()):
        if sorted(own) != [*range(len(own))]:
            missing = next(n for n in range(len(own)) if n not in own)
            raise CorruptError(
                f"has no expert {missing}, and has expert {max(own)}",
                where=f"{where}: layer {prefix!r}",
            )
        names = tuple(tuple(own[expert]) for expert in range(len(own)))
        yield NativeLayer(number, prefix, len(own), names)


def _ranks_before(
    training: Training,
    layers: Sequence[NativeLayer],
    tensors: Mapping[str, TensorEntry],
    where: str,
) -> dict[str, int]:
    """Expert-parallel ranks of the source, of each layer: as groups say, or as experts are held."""
    said: dict[str, int] = {}
    for group in training.groups:
        size = native_rank_count(group)
        for name in group.names if size is not None else ():
            parts = expert_name(name)
            if parts and size and said.setdefault(parts[0], size) != size:
                raise CorruptError(
                    f"parameter groups have experts of {parts[0]!r} on {said[parts[0]]} ranks and "
                    f"on {size}",
                    where=where,
                )
    largest = max(said.values(), default=1)
    before: dict[str, int] = {}
    for layer in layers:
        axes = dict(tensors[layer.names[0][0]].layout.mesh.axes)
        count = said.get(layer.prefix, axes.get("ep", largest))
        before[layer.prefix] = count
        if layer.count % count or axes.get("ep", count) != count:
            held = f"are on {axes['ep']}" if "ep" in axes else "do not divide over them"
            raise CorruptError(
                f"a parameter group is of {count} expert-parallel ranks, and the {layer.count} "
                f"experts of {layer.prefix!r} {held}",
                where=where,
            )
    return before
