"""What files say of expert-parallel ranks that fold tensor-parallel ones: AutoEP with AutoTP.

An engine compares it with its own ranks before it loads a file (deepspeed 0.19.8
`checkpoint/autoep_universal.py`, `validate_folding_metadata`). Expert-parallel ranks are neighbours
among all ranks, and none of them cuts an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.formats.deepspeed._writing.native_target import PlacedNative

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restride.checkpoint.training import Training
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.experts import Placed
    from restride.formats.deepspeed._writing.writing import Writing

__all__ = [
    "FOLDING",
    "expert_folding",
    "expert_places",
    "model_folding",
    "optimizer_folding",
]

FOLDING: Final = "folding"
_VERSION: Final = 1
_PARTITIONED_WEIGHTS: Final = 3


def model_folding(placed: Placed, rank: int, names: Iterable[str]) -> dict[Value, Value]:
    """What a model file says: nothing where no experts fold other ranks.

    Args:
        placed: The experts.
        rank: The rank that writes it.
        names: Names in its module.
    """
    target = placed.target
    if not _is_folded(placed):
        return {}
    families: dict[Value, Value] = {name: _family(name, is_model=True) for name in names}
    own = _entry(placed, rank, "dense", "dense_dp", rank // target.tp, target.dp)
    return {FOLDING: {**own, "param_families": families}}


def optimizer_folding(writing: Writing, rank: int) -> dict[Value, Value]:
    """What the optimizer file of a rank says: nothing where no experts fold other ranks."""
    placed, target = writing.experts, writing.target
    if placed is None or not _is_folded(placed):
        return {}
    partition = rank // target.tp
    own = _entry(placed, rank, "zero_optimizer_state", "per_family", partition, target.dp)
    if target.zero != _PARTITIONED_WEIGHTS:
        own["param_families"] = dict(_families(writing.training, placed, rank))
    return {FOLDING: own}


def expert_places(placed: Placed) -> dict[tuple[int, int], int]:
    """The first rank of each expert-parallel and tensor-parallel one, in the order of the ranks."""
    target = placed.target
    found: dict[tuple[int, int], int] = {}
    for rank in range(target.dp * target.tp):
        found.setdefault((placed.expert_rank(rank), rank % target.tp), rank)
    return found


def expert_folding(placed: Placed, expert_rank: int, tp: int) -> dict[Value, Value]:
    """What the file of an expert says that a tensor-parallel rank writes."""
    target = placed.target
    if not _is_folded(placed):
        return {}
    world = range(target.dp * target.tp)
    rank = next(n for n in world if (n % target.ep, n % target.tp) == (expert_rank, tp))
    spread = placed.spread_of("")
    _, partition = spread.place(rank)
    return {FOLDING: _entry(placed, rank, "routed_expert", "edp", partition, spread.partitions)}


def _is_folded(placed: Placed) -> bool:
    """Whether expert-parallel ranks fold tensor-parallel ones: those of stacks do."""
    return placed.target.tp > 1 and not isinstance(placed, PlacedNative)


def _entry(
    placed: Placed, rank: int, family: str, group: str, partition: int, count: int
) -> dict[Value, Value]:
    target = placed.target
    return {
        "version": _VERSION,
        "tp_size": target.tp,
        "tp_rank": rank % target.tp,
        "ep_size": target.ep,
        "ep_rank": placed.expert_rank(rank),
        "etp_size": 1,
        "etp_rank": 0,
        "zero_partition_group": group,
        "zero_partition_rank": partition,
        "zero_partition_count": count,
        "dispatch_strategy": "route_full_partition_dispatch",
        "shared_expert_placement": "tp_sharded",
        "family": family,
    }


def _families(training: Training, placed: Placed, rank: int) -> Iterable[tuple[Value, Value]]:
    """For each trained parameter, which ranks share it."""
    target = placed.target
    for group in training.groups:
        for name in group.names:
            family = _family(name, is_model=False)
            partition, count = rank // target.tp, target.dp
            if family == "routed_expert":
                spread = placed.spread_of(name)
                (_, partition), count = spread.place(rank), spread.partitions
            yield (
                name,
                {
                    "family": family,
                    "zero_partition_group": "edp" if family == "routed_expert" else "dense_dp",
                    "zero_partition_rank": partition,
                    "zero_partition_count": count,
                },
            )


def _family(name: str, *, is_model: bool) -> str:
    """The family of a parameter, by its name, as the engine tells it."""
    if ".experts." in name and not is_model:
        return "routed_expert"
    if ".router." in name:
        return "router_gate_replicated"
    return "shared_expert" if ".shared_experts" in name else "dense"
