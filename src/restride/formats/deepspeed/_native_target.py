"""The experts of DeepSpeed's own MoE layers, placed for the ranks of a target.

A layer is built for a number of expert-parallel ranks, and every rank calls its own experts
``deepspeed_experts.0`` and so on. The groups of the optimizer have them in the order of the model,
so that an engine with other ranks has other experts between those of two layers; and it splits the
groups by size anew (`_expert_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from restride.algebra.mesh import Mesh
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._expert_groups import MOST_GROUP_NUMEL, joined_groups, split_group
from restride.formats.deepspeed._native_experts import expert_name, held_by
from restride.formats.deepspeed._spread import spread_experts
from restride.formats.deepspeed.expert_settings import any_of, is_data_first, native_rank_count
from restride.formats.deepspeed.target import DeepSpeedTarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, TensorEntry
    from restride.checkpoint.training import ParameterGroup, Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._spread import Spread

__all__ = ["NativeLayer", "PlacedNative", "on_one_rank", "place_native"]

_PARTITIONED_WEIGHTS: Final = 3
_GRADIENTS: Final = 2


@dataclass(frozen=True, slots=True)
class NativeLayer:
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


@dataclass(frozen=True, slots=True)
class PlacedNative:
    """All layers of experts, and the ranks of the target that hold them.

    Attributes:
        layers: In the order of the model.
        layouts: Which expert-parallel rank holds each tensor of an expert, by name.
        before: Expert-parallel ranks of the source.
        spread: Which ranks hold which experts, and which share them.
        target: The ranks.
        aliases: None: no parameter has a second name that the engine does not count as shared.
    """

    layers: tuple[NativeLayer, ...]
    layouts: Mapping[str, Layout]
    before: int
    spread: Spread
    target: DeepSpeedTarget
    aliases: Mapping[str, str]

    @property
    def group_name(self) -> str:
        """What DeepSpeed calls the ranks."""
        return f"ep_size_{self.target.ep}"

    def retold(self, training: Training, *, most: int = MOST_GROUP_NUMEL) -> Training:
        """The training with the parameter groups that an engine of the target has.

        Args:
            training: That of the source.
            most: Elements that a group has at most on a rank.

        Raises:
            UnsupportedError: Nothing says how an engine with other expert-parallel ranks orders
                them.
        """
        if self.before == self.target.ep:
            return training
        numels = {name: layout.full_numel for name, layout in self.layouts.items()}
        # The bounds between groups are those of what one rank has.
        local = [
            replace(
                group,
                names=self._first(group.names),
                listed=None if group.listed is None else self._first(group.listed),
            )
            for group in training.groups
        ]
        groups: list[ParameterGroup] = []
        for group in joined_groups(local, numels, 1, most=most):
            names = self._moved(group.names)
            listed = None if group.listed is None else self._moved(group.listed)
            moved = replace(group, names=names, listed=listed)
            after = self.target.ep
            parts = split_group(moved, numels, 1, before=self.before, after=after, most=most)
            for part in parts:
                all_names = tuple(self._everywhere(part.names, after))
                listed = part.listed and tuple(self._everywhere(part.listed, after))
                groups.append(replace(part, names=all_names, listed=listed))
        return replace(training, groups=tuple(groups))

    def _first(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of some names that the first rank of the source has."""
        return tuple(
            name
            for name, parts in ((name, self._parts(name)) for name in names)
            if parts is None or parts[1] < self._count(parts[0]) // self.before
        )

    def _moved(self, names: Sequence[str]) -> tuple[str, ...]:
        """What the first rank of the target has, where that of the source has these."""
        found: list[str] = []
        seen: set[str] = set()
        for prefix, block in groupby(names, lambda name: (self._parts(name) or ("",))[0]):
            own = [*block]
            if not prefix:
                found.extend(own)
                continue
            known = [parts[1:] for name in own if (parts := self._parts(name))]
            numbers = [number for number, _ in known]
            if prefix in seen or numbers != sorted(numbers) or len({*known}) < len(known):
                raise UnsupportedError(
                    f"a parameter group does not have all experts of {prefix!r} one after the "
                    "other: how an engine with other expert-parallel ranks orders them is not "
                    "known",
                    remedy=f"choose --ep {self.before}",
                )
            moved = self._regrouped(prefix, known)
            seen.add(prefix)
            found += [f"{prefix}.{number}.{rest}" for number, rest in moved]
        return tuple(found)

    def _regrouped(self, prefix: str, known: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """What the first rank of the target has of a layer, where that of the source has these.

        Experts may be trained in other parts, as long as every rank has the same at the same
        places: model files have the names of the first one, which speak for all.

        Raises:
            UnsupportedError: They have not.
        """
        count = self._count(prefix)
        before, after = count // self.before, count // self.target.ep
        full = [
            (number + first, rest) for first in range(0, count, before) for number, rest in known
        ]
        ranks = [
            [(number - first, rest) for number, rest in full if first <= number < first + after]
            for first in range(0, count, after)
        ]
        other = next((rank for rank, own in enumerate(ranks) if own != ranks[0]), None)
        if other is not None:
            raise UnsupportedError(
                f"a parameter group has other tensors of the experts of {prefix!r} that rank "
                f"{other} of {self.target.ep} holds than of those of rank 0, whose names speak for "
                "all ranks in DeepSpeed's files: parts of them are frozen",
                remedy=f"choose --ep {any_of(sorted({1, self.before}))}",
            )
        return ranks[0]

    def _everywhere(self, names: Iterable[str], ranks: int) -> Iterator[str]:
        """What all ranks have, where the first one has these: one rank after the other."""
        for prefix, block in groupby(names, lambda name: (self._parts(name) or ("",))[0]):
            own = [*block]
            held = self._count(prefix) // ranks if prefix else 0
            for rank in range(ranks if prefix else 1):
                for name in own:
                    parts = self._parts(name)
                    number = "" if parts is None else parts[1] + rank * held
                    yield name if parts is None else f"{prefix}.{number}.{parts[2]}"

    def _parts(self, name: str) -> tuple[str, int, str] | None:
        """Layer, number and rest of the name of an expert's tensor."""
        return expert_name(name) if name in self.layouts else None

    def _count(self, prefix: str) -> int:
        return next(layer.count for layer in self.layers if layer.prefix == prefix)

    def without_second_names(self, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The tensors of the source, by name: there are no second names."""
        return dict(tensors)

    def entries(
        self,
        rank: int,  # noqa: ARG002 - as for AutoEP
        names: Iterable[str] = (),  # noqa: ARG002
        described: Mapping[Value, Value] | None = None,  # noqa: ARG002
    ) -> dict[Value, Value]:
        """What the model file of a rank says of the experts."""
        return {"num_experts": [layer.count for layer in self.layers], "ds_autoep_layers": None}

    def copies(self, name: str, cutters: Sequence[int], mesh: Mesh) -> Layout:
        """How files have a tensor that are each of one expert-parallel rank."""
        parts = expert_name(name)
        owner = parts[1] // (self._count(parts[0]) // self.target.ep) if parts else 0
        ranks = [place for place, cutter in enumerate(cutters) if cutter == owner]
        return held_by(self.layouts[name].full_shape, mesh, ranks)

    def local_name(self, name: str, cutter: int) -> str:
        """What an expert-parallel rank calls one of its tensors."""
        parts = self._parts(name)
        if parts is None:
            return name
        prefix, number, rest = parts
        return f"{prefix}.{number - cutter * (self._count(prefix) // self.target.ep)}.{rest}"


def place_native(
    catalog: Catalog, training: Training, target: DeepSpeedTarget
) -> PlacedNative | None:
    """Place the experts of DeepSpeed's own layers, or return None where there are none.

    Raises:
        CorruptError: Experts of a layer are missing, or no number says how many ranks had them.
        UnsupportedError: The experts do not divide, or DeepSpeed cannot resume from such a
            checkpoint.
    """
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    layers = tuple(_layers(tensors, catalog.root))
    if not layers:
        return None
    _require_possible(catalog, target)
    mesh = Mesh((("ep", target.ep),))
    layouts: dict[str, Layout] = {}
    for layer in layers:
        if layer.count % target.ep:
            sizes = [n for n in range(1, layer.count + 1) if layer.count % n == 0]
            raise UnsupportedError(
                f"{layer.count} experts do not divide over {target.ep} expert-parallel ranks",
                where=f"layer {layer.prefix!r}",
                remedy=f"choose --ep {any_of(sizes)}",
            )
        held = layer.count // target.ep
        for number, names in enumerate(layer.names):
            for name in names:
                layouts[name] = held_by(tensors[name].layout.full_shape, mesh, [number // held])
    frozen = [name for name in layouts if tensors[name].is_frozen]
    if frozen and target.zero >= _GRADIENTS and target.ep > 1:
        raise UnsupportedError(
            f"is frozen, and DeepSpeed resumes all ranks with the frozen experts of the first "
            f"with ZeRO-{target.zero}",
            where=f"tensor {frozen[0]!r}",
            remedy="choose --zero 1, or --ep 1",
        )
    before = _ranks_before(training, layers, catalog.root)
    spread = spread_experts(target, is_data_first=is_data_first(training))
    return PlacedNative(layers, layouts, before, spread, target, {})


def on_one_rank(catalog: Catalog, training: Training) -> Training | None:
    """The training of an engine in which every rank has all experts of DeepSpeed's own layers.

    Returns:
        None where there are no such layers.

    Raises:
        CorruptError: Experts of a layer are missing.
        UnsupportedError: Nothing says in which order such an engine has them.
    """
    placed = place_native(catalog, training, DeepSpeedTarget(tp=1, dp=1, zero=1))
    return None if placed is None else placed.retold(training)


def _require_possible(catalog: Catalog, target: DeepSpeedTarget) -> None:
    """What the engine itself refuses, or cannot be told of in files."""
    if target.zero == _PARTITIONED_WEIGHTS:
        # deepspeed 0.19.8 `runtime/engine.py`, `_validate_zero3_moe_compatibility`
        raise UnsupportedError(
            "has experts of DeepSpeed's own MoE layer, which DeepSpeed does not train with ZeRO-3",
            where=catalog.root,
            remedy="choose --zero 0, 1 or 2",
        )
    if target.tp > 1:
        raise UnsupportedError(
            "has experts of DeepSpeed's own MoE layer, which cannot be written for "
            f"{target.tp} tensor-parallel ranks: whether these cut experts is in the model alone",
            where=catalog.root,
            remedy="choose --tp 1",
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


def _ranks_before(training: Training, layers: Sequence[NativeLayer], where: str) -> int:
    """Expert-parallel ranks of the source."""
    before = native_rank_count(training)
    odd = next((layer for layer in layers if layer.count % before), None)
    if odd is not None:
        raise CorruptError(
            f"a parameter group is of {before} expert-parallel ranks, over which the {odd.count} "
            f"experts of {odd.prefix!r} do not divide",
            where=where,
        )
    return before
