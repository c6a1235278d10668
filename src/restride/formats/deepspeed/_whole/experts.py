"""Experts without ZeRO: the optimizer of each expert-parallel rank, in a file of its own.

``expp_rank_E_mp_rank_TT_optim_states.pt`` holds what the first of the ranks with the same experts
has: the states of all dense parameters, of which every tensor-parallel rank has its shard, and
those of its own experts (deepspeed 0.19.8 `runtime/engine.py`, `_save_moe_checkpoint`). Where
expert-parallel ranks fold tensor-parallel ones, the file of each pair of both that a rank is. An
engine resumes from these files; the model files repeat what the first data-parallel ranks have.
Weights are saved as copies, so that a second name of a parameter has bytes of its own.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from restride.algebra.mesh import Mesh
from restride.checkpoint.catalog import Finding
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.autoep import second_routers
from restride.formats.deepspeed._experts.files import open_experts, require_place
from restride.formats.deepspeed._experts.native import NativeExpert
from restride.formats.deepspeed._settings import is_enabled
from restride.frozen import Frozen
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from restride.checkpoint.values import StoredTensor
    from restride.formats.deepspeed._experts.files import Expert, ExpertFiles
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run

__all__ = [
    "ExpertRanks",
    "expert_optimizers",
    "find_experts",
    "open_optimizers",
    "puts_data_first",
]


class ExpertRanks(Frozen):
    """What is known of the experts of a run.

    Attributes:
        parameters: Tensors of experts by name.
        files: Their weights.
        is_data_first: Whether neighbouring ranks hold the same experts.
    """

    parameters: Mapping[str, Expert]
    files: ExpertFiles
    is_data_first: bool = False

    @property
    def count(self) -> int:
        """Number of expert-parallel ranks; the largest, where layers are on several."""
        return max((expert.rank_count for expert in self.parameters.values()), default=1)

    @property
    def are_single(self) -> bool:
        """Whether they are no stacks: each expert of DeepSpeed's own layer has its own tensors."""
        return any(isinstance(expert, NativeExpert) for expert in self.parameters.values())

    @property
    def are_cut(self) -> bool:
        """Whether tensor-parallel ranks cut the experts."""
        return any(
            isinstance(expert, NativeExpert) and expert.cut is not None
            for expert in self.parameters.values()
        )

    def mesh(self, run: Run) -> Mesh:
        """The ranks of `places`."""
        if self.are_cut:
            return Mesh((("ep", self.count), ("tp", run.tp_size)))
        if run.tp_size == 1:
            return Mesh((("ep", self.count),))
        return Mesh((("dp", len(self.places(run)) // run.tp_size), ("tp", run.tp_size)))

    def places(self, run: Run) -> list[tuple[int, int]]:
        """The expert-parallel and the tensor-parallel rank of each rank that differs from others.

        Expert-parallel ranks are neighbours among all ranks, as tensor-parallel ones are; after as
        many as both have in common, the ranks repeat what others have. Where tensor-parallel ranks
        cut experts, each of them has all expert-parallel ones.
        """
        if self.are_cut:
            return [(ep, tp) for ep in range(self.count) for tp in range(run.tp_size)]
        return [
            (rank % self.count, rank % run.tp_size) for rank in range(lcm(self.count, run.tp_size))
        ]

    def held(self, rank: int, tp: int = 0) -> dict[str, tuple[StoredTensor, ...]]:
        """What a rank has of its experts, those of a stack side by side; if the files are there.

        Args:
            rank: The expert-parallel rank.
            tp: The tensor-parallel one.
        """
        found: dict[str, tuple[StoredTensor, ...]] = {}
        for name, expert in self.parameters.items():
            if isinstance(expert, NativeExpert):
                own = self.files.weight(name) if expert.rank == self._of(expert, rank) else None
                if own is not None and expert.cut is not None:
                    own = self.files.shards(expert)[tp]
                if own is not None and not expert.is_buffer:
                    found[name] = (own,)
                continue
            parts = [self.files.weight(f"{name}.{number}") for number in expert.placement[rank]]
            known = tuple(part for part in parts if part is not None)
            if known and len(known) == len(parts) and len({part.shape for part in known}) == 1:
                found[name] = known
        return found

    def _of(self, expert: NativeExpert, rank: int) -> int:
        """The expert-parallel rank of a layer's own number that one of the largest is."""
        if self.is_data_first:
            return rank * expert.rank_count // self.count
        return rank % expert.rank_count

    def routers(self, names: Iterable[str]) -> dict[str, str]:
        """Second names of routers, and the name that each is stored under as well.

        AutoEP registers the router of a layer once more where transformers looks for it.
        """
        stacked = (
            name for name, own in self.parameters.items() if not isinstance(own, NativeExpert)
        )
        return second_routers(stacked, names)


def puts_data_first(run: Run) -> bool:
    """Whether neighbouring ranks of a run hold the same experts."""
    config = run.models[0].root.get("ds_config")
    return is_enabled(config.get("use_data_before_expert_parallelism") if config else None)


def find_experts(run: Run) -> ExpertRanks | None:
    """Read again what is known of the experts of a run without ZeRO; None where it has none."""
    if not run.folder.expert_optimizers:
        return None
    return ExpertRanks(*open_experts(run), puts_data_first(run))


def expert_optimizers(run: Run, experts: ExpertRanks) -> dict[str, tuple[str, Field]]:
    """The optimizer of every expert-parallel rank that has a file, by its name.

    Args:
        run: The files.
        experts: What is known of the experts.

    Returns:
        The rank in words, and the state; nothing with ZeRO.
    """
    names = run.folder.expert_optimizers
    found: dict[str, tuple[str, Field]] = {}
    for ep, tp in experts.places(run) if names and not run.zeros else ():
        state = run.files.open(names[ep, tp]).get("optimizer") if (ep, tp) in names else None
        if state is not None and state.is_mapping:
            rank = f"ep rank {ep}" + (f", tp rank {tp}" if run.tp_size > 1 else "")
            found[run.folder.below + names[ep, tp]] = rank, state
    return found


def open_optimizers(run: Run, experts: ExpertRanks) -> dict[tuple[int, int], Field] | None:
    """Open the optimizer file of each expert-parallel rank, on each tensor-parallel one.

    Args:
        run: The files. Findings are added to it.
        experts: What is known of the experts.

    Returns:
        The optimizer's dict by expert-parallel and tensor-parallel rank, in the order of the ranks
        of the run; None where there is no such file, or one is missing.

    Raises:
        CorruptError: There are optimizer files of ZeRO as well, nothing describes the experts, or a
            file has the name of another.
        FormatError: A file is none.
        UnsupportedError: Layers of AutoEP have experts on different numbers of ranks.
    """
    names = run.folder.expert_optimizers
    if not names:
        return None
    if run.zeros:
        raise CorruptError(
            f"has optimizer files of ZeRO, and {next(iter(names.values()))} of a run without",
            where=str(run.folder.path),
            remedy="put only the files of one save into the folder",
        )
    first = next(iter(names.values()))
    if not experts.parameters:
        raise CorruptError(
            f"has {first}, and neither ds_autoep_layers nor files of experts",
            where=str(run.folder.path),
            remedy="add the files layer_*_expert_*_model_states.pt",
        )
    counts = sorted({expert.rank_count for expert in experts.parameters.values()})
    if len(counts) > 1 and not experts.are_single:
        # deepspeed 0.19.8 `runtime/engine.py`: "AutoEP checkpointing requires a single EP group"
        raise UnsupportedError(
            f"has {first}, and layers of experts on {' and on '.join(map(str, counts))} ranks: an "
            "engine without ZeRO has files for one number of them",
            where=str(run.folder.path),
        )
    places = experts.places(run)
    for (ep, tp), name in names.items():
        if (ep, tp) not in places:
            also = f" on {run.tp_size} tensor-parallel ones" if run.tp_size > 1 else ""
            message = (
                f"{name} is of a rank that a run with {experts.count} expert-parallel ranks{also} "
                "does not have; it is left out"
            )
            run.findings.append(Finding("warning", "stale-file", message, name))
    missing = [place for place in places if place not in names]
    if missing:
        message = (
            f"{len(missing)} of {len(places)} optimizer files of expert-parallel ranks "
            f"{which(len(missing), 'is', 'are')} "
            f"missing (the first is expp_rank_{missing[0][0]}_mp_rank_{missing[0][1]:02d}_"
            "optim_states.pt); the states are left out"
        )
        details = {"part": "optimizer"}
        where = str(run.folder.path)
        run.findings.append(Finding("error", "missing-file", message, where, details))
        return None
    found: dict[tuple[int, int], Field] = {}
    for ep, tp in places:
        root = run.files.open(names[ep, tp])
        require_place(root, tp=tp, ep=ep)
        found[ep, tp] = root.at("optimizer")
    return found
