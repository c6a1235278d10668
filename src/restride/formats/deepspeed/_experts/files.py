"""The files of single experts: ``layer_L_expert_E_mp_rank_00_model_states.pt``.

AutoEP's layers are described in the model file. The files of DeepSpeed's own layers describe
themselves.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.autoep import ExpertParameter, read_experts
from restride.formats.deepspeed._experts.group_order import said_rank_counts
from restride.formats.deepspeed._experts.native import NativeExpert, is_native
from restride.formats.deepspeed._experts.native_layers import native_experts
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._run import Run
    from restride.storage.torch_zip import TorchFiles

__all__ = ["Expert", "ExpertFiles", "files_written_twice", "open_experts", "require_place"]

Expert: TypeAlias = ExpertParameter | NativeExpert

_FOLDING: Final = "folding"
_FOLDING_VERSION: Final = 1


def open_experts(run: Run) -> tuple[dict[str, Expert], ExpertFiles]:
    """Open the expert files of a run, and find out what they are the experts of.

    Args:
        run: The files. Findings are added to it.

    Returns:
        Tensors of experts by name, in the order of the model; and their files.

    Raises:
        CorruptError: Two files are of one expert, or what is said of them is wrong.
        FormatError: A file is none.
        UnsupportedError: Nothing describes the experts, or not in a way that is understood.
    """
    root = run.models[0].root
    layers = root.get("ds_autoep_layers") or root.get("autoep_layers")
    opened = _opened(run)
    if layers:
        _check_folding(run, root)
    experts: dict[str, Expert] = {**read_experts(layers)}
    if opened and not experts:
        first = {place: next(iter(own.values())) for place, own in opened.items()}
        if not is_native(first) or root.get("num_experts") is None:
            raise UnsupportedError(
                f"has {run.folder.experts[0].name} and no ds_autoep_layers, and the names in it "
                "are not those of DeepSpeed's own MoE layer: nothing says what experts these are",
                where=str(run.folder.path),
                remedy="checkpoints of AutoEP and of deepspeed.moe.layer.MoE can be read",
            )
        experts |= native_experts(run, opened, _rank_counts(run))
    return experts, ExpertFiles(run, experts, {n: [*own.values()] for n, own in opened.items()})


class ExpertFiles:
    """Weights of experts by layer and number.

    Args:
        run: The files. Findings are added to it.
        experts: Tensors of experts by name.
        opened: What the files hold, by layer and expert.

    Attributes:
        extras: By file, entries that are no weights of the described experts.
    """

    def __init__(
        self,
        run: Run,
        experts: Mapping[str, Expert],
        opened: Mapping[tuple[int, int], Sequence[Field]],
    ) -> None:
        self._run = run
        self.extras: dict[str, dict[str, Field]] = {}
        self._copies: dict[str, list[StoredTensor]] = {}
        wanted = {
            name
            for expert in experts.values()
            for name in (
                [expert.name]
                if isinstance(expert, NativeExpert)
                else [f"{expert.name}.{number}" for number in range(expert.expert_count)]
            )
        }
        for content in chain.from_iterable(opened.values()):
            for key, entry in content.items():
                if key in wanted and isinstance(entry.value, StoredTensor):
                    self._copies.setdefault(key, []).append(entry.value)
                elif key != _FOLDING:  # the ranks that wrote the file
                    self.extras.setdefault(content.where, {})[key] = entry
        self._weights = {key: copies[0] for key, copies in self._copies.items()}

    def weight(self, name: str) -> StoredTensor | None:
        """Return a tensor of one expert, such as ``...experts.w1.7``, or None."""
        return self._weights.get(name)

    def shards(self, expert: NativeExpert) -> list[StoredTensor]:
        """Return what each tensor-parallel rank has of an expert that they cut.

        Raises:
            CorruptError: A file of the expert is without it.
        """
        known = self._copies.get(expert.name, [])
        if len(known) != expert.tp_size:
            raise CorruptError(
                f"is in {len(known)} of {expert.tp_size} files of its expert",
                where=f"{self._run.folder.path}: tensor {expert.name!r}",
            )
        return known

    def copies(self, expert: ExpertParameter) -> list[list[StoredTensor]]:
        """Return every copy of a stack: tensor-parallel ranks write files of the same experts.

        Raises:
            CorruptError: An expert has more files than another one.
        """
        names = [f"{expert.name}.{number}" for number in range(expert.expert_count)]
        counts: dict[int, str] = {}
        for name in names:
            counts.setdefault(len(self._copies[name]), name)
        if len(counts) > 1:
            raise CorruptError(
                f"{counts[max(counts)]!r} is in {max(counts)} files, "
                f"{counts[min(counts)]!r} in {min(counts)}",
                where=str(self._run.folder.path),
                remedy="put all files of one save into the folder",
            )
        return [[self._copies[name][copy] for name in names] for copy in range(max(counts))]

    def weights(self, expert: Expert) -> list[StoredTensor] | None:
        """Return the weight of each expert of a stack in order, or None where some are missing."""
        names = [expert.name]
        if isinstance(expert, ExpertParameter):
            names = [f"{expert.name}.{number}" for number in range(expert.expert_count)]
        missing = [name for name in names if name not in self._weights]
        if not missing:
            return [self._weights[name] for name in names]
        message = (
            f"{len(missing)} of {len(names)} experts of tensor {expert.name!r} "
            f"{which(len(missing), 'is', 'are')} in no file (the first is {missing[0]!r}, expected "
            f"in a file layer_{expert.layer}_expert_*); its weights are left out"
        )
        if isinstance(expert, NativeExpert):
            message = (
                f"tensor {expert.name!r} is in no file (expected in "
                f"layer_{expert.layer}_expert_{expert.number}_mp_rank_00_model_states.pt); its "
                "weights are left out"
            )
        self._run.findings.append(
            Finding("error", "missing-file", message, f"tensor {expert.name!r}")
        )
        return None


def files_written_twice(opened: TorchFiles) -> Iterator[Finding]:
    """Tell of files that two ranks wrote at one time."""
    for path in opened.written_twice():
        message = (
            "two ranks wrote the file at one time, as DeepSpeed lets ranks do that hold the same "
            "experts (0.19.8, experts folded into tensor parallelism); every part of it below "
            "16 MiB is as one of them wrote it, and where they held the same, nothing is lost"
        )
        yield Finding("warning", "written-twice", message, Path(path).name)


def _opened(run: Run) -> dict[tuple[int, int], dict[int, Field]]:
    """The files of each expert; only tensor-parallel ranks may write several."""
    opened: dict[tuple[int, int], dict[int, Field]] = {}
    for file in run.folder.experts:
        stale = ""
        if run.is_partitioned:
            stale = "an expert, and under ZeRO-3 the optimizer files have those"
        elif file.tp >= run.tp_size > 1:
            stale = f"a rank that a run with tp={run.tp_size} does not have"
        if stale:
            message = f"{file.name} is of {stale}; it is left out"
            run.findings.append(Finding("warning", "stale-file", message, file.name))
            continue
        known = opened.setdefault((file.layer, file.expert), {})
        if known and run.tp_size == 1:
            raise CorruptError(
                f"layer {file.layer}, expert {file.expert} has two files, one is {file.name}",
                where=str(run.folder.path),
            )
        known[file.tp] = run.files.open(file.name)
        require_place(known[file.tp], tp=file.tp)
    return opened


def _check_folding(run: Run, root: Field) -> None:
    """Expert-parallel ranks may fold tensor-parallel ones where the files say how.

    They are neighbours among all ranks then, and none of them cuts an expert (deepspeed 0.19.8
    `module_inject/auto_ep_folding.py`, `runtime/engine.py`, `_make_autoep_folding_metadata`).

    Raises:
        CorruptError: It is said of other ranks.
        UnsupportedError: Nothing says it, or in a way that is not understood.
    """
    if run.tp_size == 1:
        return
    stored = root.get(_FOLDING)
    if stored is None:
        raise UnsupportedError(
            f"has experts on {run.tp_size} tensor-parallel ranks, and no {_FOLDING!r}: nothing "
            "says which of them hold which",
            where=str(run.folder.path),
            remedy="checkpoints of AutoEP with AutoTP, and those without tensor parallelism can "
            "be read",
        )
    version, cut = stored.at("version").integer(), stored.at("etp_size").integer(at_least=1)
    if version != _FOLDING_VERSION or cut != 1:
        raise UnsupportedError(
            f"is of version {version}, with {cut} ranks that cut each expert; version "
            f"{_FOLDING_VERSION} is understood, with whole experts",
            where=stored.where,
        )
    said = stored.at("tp_size").integer()
    if said != run.tp_size:
        raise CorruptError(
            f"is of {said} tensor-parallel ranks, there are {run.tp_size}", where=stored.where
        )
    ranks = stored.at("ep_size").integer(at_least=1)
    for model in run.models:
        require_place(model.root, tp=model.tp)
    for (dp, tp), own in run.partitioned.items():
        require_place(own.root, tp=tp, dp=dp, ep=run.rank(dp, tp) % ranks)
    for (dp, tp), zero in run.zeros.items():
        require_place(zero.root, tp=tp, dp=dp, ep=run.rank(dp, tp) % ranks)


def require_place(root: Field, *, tp: int, ep: int | None = None, dp: int | None = None) -> None:
    """Hold what a file says of its rank against its name, where it says it.

    Args:
        root: Content of the file.
        tp: The tensor-parallel rank of its name.
        ep: The expert-parallel rank of its name, if that has one, or of the rank that it names.
        dp: The data-parallel rank of its name, if that has one.

    Raises:
        CorruptError: It is of another rank.
    """
    stored = root.get(_FOLDING)
    for key, named in (("tp_rank", tp), ("ep_rank", ep), ("zero_partition_rank", dp)):
        said = stored.get(key) if stored is not None else None
        if said is not None and named is not None and said.integer() != named:
            raise CorruptError(
                f"is {said.integer()}, the file has the name of {named}",
                where=said.where,
                remedy="put the files of one save into the folder, under the names that they had",
            )


def _rank_counts(run: Run) -> tuple[int, ...]:
    """Expert-parallel ranks of DeepSpeed's own layers: by the groups, or by the files of ranks."""
    said = said_rank_counts(_param_groups(run))
    if not said and run.folder.expert_optimizers:
        return (1 + max(ep for ep, _ in run.folder.expert_optimizers),)
    return said


def _param_groups(run: Run) -> Iterator[Field]:
    for zero in run.zeros.values():
        yield from zero.param_groups
    for model in run.models:
        if model.optimizer is not None and model.optimizer.is_mapping:
            groups = (model.optimizer.get("optimizer_state_dict") or model.optimizer).get(
                "param_groups"
            )
            yield from groups.elements() if groups else ()
