"""What the user should know of a conversion into sharded form: what differs, what is lost."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import RestrideError
from restride.formats.deepspeed._fields import Field, shown
from restride.formats.deepspeed._momentum import states_kept_whole, trains_by_muon
from restride.formats.deepspeed._settings import zero_setting
from restride.formats.deepspeed._values import JsonWriter, read_bytes
from restride.formats.deepspeed._writing.native_target import PlacedNative, shows
from restride.formats.deepspeed.expert_settings import any_of
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from restride.checkpoint.catalog import TensorEntry
    from restride.checkpoint.training import ModelRank, Training
    from restride.formats.deepspeed._values import Json
    from restride.formats.deepspeed._writing.writing import Writing

__all__ = ["findings_of", "rank_findings"]

_BATCH_KEYS: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
_GRADIENTS: Final = 2
_PARTITIONED_WEIGHTS: Final = 3
_MOST_KEYS: Final = 8
# Of numbers beyond it nothing is computed, and Python does not print the largest.
_LARGEST: Final = 1 << 62


def findings_of(writing: Writing, chosen: Sequence[int] | None = None) -> Iterator[Finding]:
    """Tell of settings that do not fit the target, and of values that not all ranks share.

    Args:
        writing: The conversion.
        chosen: For each rank of a pipeline, the number of the one that speaks for it.
    """
    yield from _stage(writing)
    yield from _experts(writing)
    yield from _batch(writing)
    if writing.target.zero <= _GRADIENTS and writing.is_round_robin:
        message = (
            "round_robin_gradients is on in ds_config: the buffers are written in that order for "
            f"{writing.target.dp} data-parallel ranks, and the engine that resumes must have it on"
        )
        yield Finding("note", "round-robin", message)
    yield from _muon(writing)
    yield from _ranks(writing) if chosen is None else _stage_ranks(writing, chosen)


def _muon(writing: Writing) -> Iterator[Finding]:
    """What the engine must not be configured otherwise for: it would not notice."""
    groups = [group for group in writing.training.groups if trains_by_muon(group)]
    zero = writing.target.zero
    if not groups or zero in {0, _PARTITIONED_WEIGHTS}:
        return
    if any(states_kept_whole(group, writing.config, zero) for group in groups):
        message = (
            "Muon's momentum is written whole on every rank that has a part of the parameter: "
            "resume without offload_optimizer, and without BF16_Optimizer"
        )
        yield Finding("note", "muon-momentum", message)
    else:
        message = (
            "Muon's momentum is written cut like the weights, as ds_config in the files says "
            "offload_optimizer or asks for BF16_Optimizer: resume with the same"
        )
        yield Finding("note", "muon-momentum", message)


def _stage_ranks(writing: Writing, chosen: Sequence[int]) -> Iterator[Finding]:
    """The same for the ranks of a pipeline: the modules of stages are not to be compared."""
    ranks = tuple(replace(rank, module={}) for rank in writing.training.ranks)
    yield from rank_findings(replace(writing.training, ranks=ranks), chosen)


def _stage(writing: Writing) -> Iterator[Finding]:
    stored = zero_setting(writing.config, "stage")
    if stored is not None and stored.value != writing.target.zero:
        message = (
            f"ds_config in the files says ZeRO stage {shown(stored.value)}, as the source was "
            f"trained: resume with stage {writing.target.zero}"
        )
        yield Finding("note", "config-stage", message)
    section = writing.config.get("tensor_parallel") if writing.config else None
    size = section.get("autotp_size") if section and section.is_mapping else None
    if size is not None and size.value != writing.target.tp:
        message = (
            f"ds_config in the files says autotp_size {shown(size.value)}, as the source was "
            f"trained: resume with {writing.target.tp}"
        )
        yield Finding("note", "config-tp", message)
    empty = [t.name for t in writing.catalog.tensors if _is_empty(t)]
    if empty and writing.target.zero == _PARTITIONED_WEIGHTS:
        message = (
            f"an engine of ZeRO-3 stops in its first step where a parameter has no element, as "
            f"{empty[0]!r} (seen with deepspeed 0.19.8): choose --zero 1 or 2, or resume with a "
            "model without it"
        )
        yield Finding("warning", "empty-parameter", message, f"tensor {empty[0]!r}")


def _is_empty(tensor: TensorEntry) -> bool:
    return tensor.kind == "parameter" and not tensor.layout.full_numel


def _experts(writing: Writing) -> Iterator[Finding]:
    section = writing.config.get("expert_parallel") if writing.config else None
    size = section.get("autoep_size") if section and section.is_mapping else None
    if writing.experts is not None and size is not None and size.value != writing.target.ep:
        message = (
            f"ds_config in the files says autoep_size {shown(size.value)}, as the source was "
            f"trained: resume with {writing.target.ep}"
        )
        yield Finding("note", "config-ep", message)
    placed = writing.experts
    if isinstance(placed, PlacedNative) and placed.before != placed.after:
        sizes = sorted({*placed.before.values()})
        message = (
            f"layers of experts were built with ep_size={any_of(sizes)}: resume with a model whose "
            f"layers have ep_size={writing.target.ep}"
        )
        yield Finding("note", "config-ep", message)
    if isinstance(placed, PlacedNative) and len(placed.spreads) > 1:
        names = ", ".join(f"ep_size_{size}" for size in placed.spreads)
        message = (
            f"groups of experts are in the order {names}, which processes have that are started "
            f"with PYTHONHASHSEED=0 and Python {sys.version_info.major}.{sys.version_info.minor}: "
            "resume with both, as the engine takes groups by their places and does not compare "
            "their names"
        )
        yield Finding("warning", "hash-seed", message)
    if isinstance(placed, PlacedNative) and not shows(writing.catalog, placed):
        said = "are cut by" if placed.is_cut else "are whole on"
        message = (
            f"experts {said} the {placed.target.tp} tensor-parallel ranks: resume with "
            f"enable_expert_tensor_parallelism={placed.is_cut}"
        )
        yield Finding("note", "expert-tensor-parallelism", message)


def _batch(writing: Writing) -> Iterator[Finding]:
    """The global batch is a product; with another number of replicas one factor has to change."""
    config = writing.config
    if config is None or not config.is_mapping:
        return
    numbers = [entry.value if (entry := config.get(key)) else None for key in _BATCH_KEYS]
    total, micro, steps = (n if isinstance(n, int) and 0 < n <= _LARGEST else None for n in numbers)
    if total is None:
        return
    micro, steps = micro or 1, steps or 1
    if micro * steps * writing.target.dp != total:
        message = (
            f"ds_config in the files says a train_batch_size of {total}, which is not "
            f"{micro} a rank * {steps} accumulation steps * {writing.target.dp} data-parallel "
            "ranks: change one of them to resume"
        )
        yield Finding("note", "config-batch", message)


def _ranks(writing: Writing) -> Iterator[Finding]:
    """What differs between ranks of the source, and does not go one to one to the target's."""
    training, target = writing.training, writing.target
    data = target.dp if target.zero == _PARTITIONED_WEIGHTS else 1
    chosen = [
        training.number_of_rank(dp=dp, dp_size=data, mp=tp, mp_size=target.tp)
        for dp in range(data)
        for tp in range(target.tp)
    ]
    yield from rank_findings(training, chosen)


def rank_findings(training: Training, chosen: Sequence[int]) -> Iterator[Finding]:
    """Tell of values that not all ranks of the source share, where some of them are left out.

    Args:
        training: What the ranks stored.
        chosen: For each rank of the output, the number of the one that speaks for it.
    """
    if list(chosen) == list(range(len(training.ranks))):
        return
    with FilePool() as pool:
        ranks = [_comparable(rank, pool) for rank in training.ranks]
    keys = dict.fromkeys(key for entries in ranks for key in entries)
    differing = [
        key for key in keys if any(entries.get(key) != ranks[0].get(key) for entries in ranks)
    ]
    if not differing:
        return
    named = ", ".join(map(repr, differing[:_MOST_KEYS]))
    if len(differing) > _MOST_KEYS:
        named += f" and {len(differing) - _MOST_KEYS} more"
    unused = sorted({*range(len(training.ranks))} - {*chosen})
    doubled = sorted({number for number in chosen if chosen.count(number) > 1})
    fates = [
        f"{what} {', '.join(training.ranks[number].where for number in numbers[:_MOST_KEYS])}"
        for what, numbers in (
            ("left out are those of", unused),
            ("used twice are those of", doubled),
        )
        if numbers
    ]
    message = (
        f"{named} differ between the {len(training.ranks)} model files of the source, and "
        f"{len(chosen)} are written: {'; '.join(fates)}"
    )
    yield Finding("warning", "rank-values", message, "", {"keys": differing})


def _comparable(rank: ModelRank, pool: FilePool) -> dict[str, Json]:
    """Values of a rank in a form that can be compared."""
    writer = JsonWriter(partial(read_bytes, pool))
    try:
        return {
            key: writer.of(Field(value, key))
            for part in (rank.values, rank.module)
            for key, value in part.items()
        }
    except RestrideError as error:
        raise error.located(rank.where) from None
