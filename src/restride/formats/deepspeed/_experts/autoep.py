"""AutoEP: experts stacked in one parameter, placed on expert-parallel ranks, saved one per file.

A layer's ``experts.w1`` is one tensor of all experts; every expert-parallel rank holds some of
them, side by side in its shard. The weights are saved as ``experts.w1.7`` in the file of expert 7;
master weights and moments are in the flat partitions of a parameter group of their own, which the
ranks with the same experts share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra.mesh import Mesh
from restride.algebra.signature import same_layout
from restride.errors import CorruptError, LayoutError, UnsupportedError
from restride.formats.deepspeed.maps import from_affine_map_field, require_map_version
from restride.formats.deepspeed.placements import read_placement
from restride.frozen import Frozen
from restride.layouts.gathered import experts
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.algebra.layout import Layout, Shape
    from restride.formats.deepspeed._fields import Field

__all__ = ["ExpertParameter", "read_experts", "second_routers"]

_WEIGHTS: Final = ("w1", "w2", "w3")
_MOST_EXPERTS: Final = 1 << 16

_Placement: TypeAlias = tuple[tuple[int, ...], ...]


class ExpertParameter(Frozen):
    """One stacked parameter of one mixture-of-experts layer.

    Attributes:
        name: Name of the stacked parameter.
        expert_count: Number of experts.
        layer: Number of the layer in the names of the expert files.
        placement: For each expert-parallel rank its experts, in the order of its shard.
        stored_map: Affine map, where the checkpoint has one.
        where: File and path, for errors.
    """

    name: str
    expert_count: int
    layer: int
    placement: _Placement
    stored_map: Field | None
    where: str

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks that cut an expert: none does."""
        return 1

    @property
    def rank_count(self) -> int:
        """Number of expert-parallel ranks."""
        return len(self.placement)

    def held_shape(self, shape: Shape, rank: int) -> Shape:
        """Shape on a rank of what the first rank has in this shape."""
        return (len(self.placement[rank]), *shape[1:])

    def name_on(self, rank: int) -> str:  # noqa: ARG002 - as for single experts
        """Full name of what a rank calls by this name."""
        return self.name

    def layout(self, expert_shape: Shape) -> Layout:
        """Describe how the stacked parameter is placed.

        Args:
            expert_shape: Shape of one expert.

        Raises:
            CorruptError: The placement is none, or the stored map says something else.
        """
        mesh = Mesh((("ep", self.rank_count),))
        shape = (self.expert_count, *expert_shape)
        try:
            layout = experts(shape, mesh=mesh, placement=self.placement)
        except LayoutError as error:
            raise error.located(self.where) from error
        if self.stored_map is not None:
            stored = from_affine_map_field(self.stored_map, mesh)
            if stored.full_shape != shape or not same_layout(stored, layout):
                raise CorruptError(
                    "the affine map and the expert placement disagree", where=self.stored_map.where
                )
        return layout


def read_experts(stored: Field | None) -> dict[str, ExpertParameter]:
    """Read the mixture-of-experts layers of a checkpoint, by the name of each stacked parameter.

    Raises:
        FormatError: The description has another type than it must have.
        CorruptError: It contradicts itself.
        UnsupportedError: It is of a version from the future.
    """
    found: dict[str, ExpertParameter] = {}
    for entry in stored.elements() if stored else ():
        prefix = entry.at("expert_key_prefix").text()
        layer = entry.at("moe_layer_id").integer()
        count = entry.at("num_experts").integer(at_least=1)
        placement = _placement(entry, count)
        maps = _maps(entry.get("affine_maps"))
        for weight in _WEIGHTS:
            name = f"{prefix}.{weight}"
            if name in found:
                raise CorruptError(f"describes {name!r} a second time", where=entry.where)
            found[name] = ExpertParameter(
                name, count, layer, placement, maps.get(name), entry.where
            )
    return found


def second_routers(stacked: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Second names of routers, and the name that each is stored under as well.

    AutoEP registers the router of a layer once more where transformers looks for it.

    Args:
        stacked: Names of the stacked parameters.
        names: Names in the module.

    Examples:
        >>> second_routers(["mlp.experts.w1"], ["mlp.router.gate.weight", "mlp.gate.gate.weight"])
        {'mlp.gate.gate.weight': 'mlp.router.gate.weight'}
    """
    known = dict.fromkeys(names)
    layers = {name.rsplit(".", 2)[0] for name in stacked}
    found: dict[str, str] = {}
    for name in known:
        for layer in layers:
            child, _, rest = name.removeprefix(f"{layer}.").partition(".")
            router = f"{layer}.router.{rest}"
            if name.startswith(f"{layer}.") and child != "router" and router in known:
                found[name] = router
    return found


def _placement(entry: Field, count: int) -> _Placement:
    ranks = entry.at("ep_size").integer(at_least=1)
    if count > _MOST_EXPERTS:
        raise CorruptError(
            f"says there {which(count, 'is', 'are')} {counted(count, 'expert')}", where=entry.where
        )
    stored = entry.get("expert_placement")
    local = entry.at("num_local_experts").integer()
    if stored is None:
        if local * ranks != count:
            raise CorruptError(
                f"{ranks} ranks with {local} experts each do not make {count}", where=entry.where
            )
        return tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ranks))
    placed, placement = read_placement(stored)
    if (placed, len(placement)) != (count, ranks):
        raise CorruptError(
            f"is for {placed} experts on {len(placement)} ranks, the layer has {count} on {ranks}",
            where=stored.where,
        )
    held = {expert for row in placement for expert in row}
    if held != set(range(count)) or any(len(set(row)) < len(row) for row in placement):
        raise CorruptError(
            f"does not place each of {count} experts, at most once on a rank", where=stored.where
        )
    _check_files_name_experts(placement, local, stored)
    return placement


def _check_files_name_experts(placement: _Placement, local: int, stored: Field) -> None:
    """Files are numbered by rank and place in the shard; that must be the number of the expert."""
    numbered = tuple(
        tuple(range(rank * local, rank * local + len(held))) for rank, held in enumerate(placement)
    )
    if placement != numbered:
        raise UnsupportedError(
            "places experts out of order; the numbers in the names of the expert files are then "
            "not those of the experts",
            where=stored.where,
            remedy="save the checkpoint with neighbouring experts on each rank",
        )


def _maps(stored: Field | None) -> dict[str, Field]:
    if stored is None:
        return {}
    require_map_version(stored)
    return dict(stored.at("params").items())
