"""What goes out: turn a format and its options into files, tensors and what they are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from restride.algebra._checks import require_int
from restride.checkpoint.hyperparameters import with_hyperparameters
from restride.checkpoint.optimizer_scale import follow_scales
from restride.checkpoint.output import Output, OutputFile
from restride.checkpoint.selection import (
    Export,
    cast_target,
    require_states,
    select_optimizer,
    select_weights,
)
from restride.errors import UnsupportedError
from restride.executors.option_words import option_name
from restride.formats.opening import open_training
from restride.frozen import Frozen
from restride.storage.model_files import read_hyperparameters
from restride.storage.paths import require_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from restride.algebra.layout import Layout
    from restride.checkpoint.catalog import Catalog, Finding
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.selection import Selected, States, Target
    from restride.checkpoint.training import Training
    from restride.formats.deepspeed.stage_cut import StageCut
    from restride.storage.torch_zip import TorchFiles

__all__ = ["Wanted", "lay_out_export"]


class Wanted(Frozen):
    """What a user wants written. None is the format's own choice.

    Attributes:
        to: Format of the output.
        states: Only the weights (the default), or everything. DeepSpeed's own forms
            always have everything.
        dtype: Type of the weights in safetensors, where it is not the one they were trained in.
        max_shard_nbytes: Largest file of safetensors; 2 GB where nothing is said.
        stage: ZeRO stage of the engines that load a universal folder, by default that of the
            source: 1 and 2 are one shape, 3 is another.
        tp, dp, ep, zero: Ranks and ZeRO stage of the engine that resumes from the sharded form; by
            default those of the source.
        pp, pp_layers, pp_tied: Stages of a pipeline, and how its layers are dealt out to them; by
            default as in the source. See `convert`.
        source_config, source_rules: What says how the ranks of the source cut, where its files do
            not.
        config, rules, plan, grain: What says how its tensor-parallel ranks cut: see `Cut`.
        optimizer_transform: Whether moments follow the scale of their parameter, with the learning
            rate and epsilon of their group.
        hyperparameters: A file with the settings of the parameter groups, where the source left
            them out.
        zero_init: Whether the engine of ZeRO-3 that resumes makes its model under
            ``deepspeed.zero.Init``, which decides in what order Muon has its parameters.
    """

    to: Target
    states: States | None = None
    dtype: str | None = None
    max_shard_nbytes: int | None = None
    stage: int | None = None
    tp: int | None = None
    dp: int | None = None
    ep: int | None = None
    zero: int | None = None
    config: str | PathLike[str] | None = None
    rules: str | PathLike[str] | None = None
    plan: bool | None = None
    grain: int | None = None
    optimizer_transform: bool | None = None
    pp: int | None = None
    pp_layers: str | Sequence[int] | None = None
    pp_tied: Mapping[str, Sequence[int]] | None = None
    hyperparameters: str | PathLike[str] | None = None
    zero_init: bool | None = None
    source_config: str | PathLike[str] | None = None
    source_rules: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_paths(*self.files.values())
        for option in _NUMBERS:  # or "3" is said to be none of 1, 2 or 3
            if getattr(self, option) is not None:
                require_int(option, getattr(self, option))

    @property
    def files(self) -> dict[str, Any]:
        """Options that name files, which processes may look for from another folder."""
        names = ("config", "rules", "hyperparameters", "source_config", "source_rules")
        return {name: getattr(self, name) for name in names}


_NUMBERS: Final = ("max_shard_nbytes", "stage", "tp", "dp", "ep", "zero", "grain", "pp")
_PARTITIONED: Final = 3
# A system lets one thread at a time write into a file: a large one would keep the others waiting.
_SHARD_NBYTES: Final = 2_000_000_000
_OF_SOURCE: Final = frozenset({"source_config", "source_rules"})
_TAKEN: Final = {
    "safetensors": {*_OF_SOURCE, "states", "dtype", "max_shard_nbytes"},
    "universal": {*_OF_SOURCE, "stage", "optimizer_transform", "hyperparameters"},
    "deepspeed": {
        *_OF_SOURCE,
        *("tp", "dp", "ep", "zero", "config", "rules", "plan", "grain"),
        *("pp", "pp_layers", "pp_tied"),
        *("optimizer_transform", "hyperparameters", "zero_init"),
    },
}


def lay_out_export(catalog: Catalog, wanted: Wanted, opened: TorchFiles | None = None) -> Export:
    """Describe what a conversion writes, before anything is read of a tensor.

    Args:
        catalog: The source.
        wanted: Format and options.
        opened: What the source's files were opened by; without it they are opened again.

    Raises:
        FormatError, ExecutionError: What goes with the tensors cannot be read.
        RuleError, CoverageError: Nothing says how a parameter is cut, or says it wrongly.
        UnsupportedError: The format has no place for something, or takes no such option.
    """
    # Where the source asks for it, it has been told which layers are tied.
    _require_taken(wanted if catalog.tied is None else replace(wanted, pp_tied=None))
    if wanted.to == "safetensors":
        dtype = cast_target(wanted.dtype) if wanted.dtype is not None else None
        states = wanted.states or "weights"
        return _lay_out_safetensors(catalog, states, dtype, wanted.max_shard_nbytes)
    if wanted.to == "universal":
        return _lay_out_universal(catalog, wanted, opened)
    return _lay_out_deepspeed(catalog, wanted, opened)


def _require_taken(wanted: Wanted) -> None:
    taken = _TAKEN.get(wanted.to)
    if taken is None:
        raise UnsupportedError(
            f"cannot write {wanted.to!r}", remedy=f"formats to write are {', '.join(_TAKEN)}"
        )
    if wanted.states is not None:
        require_states(wanted.states)
    # All states are what every format can have; the weights alone are not.
    is_all = wanted.states == "all"
    for option in wanted.__struct_fields__[2 if is_all else 1 :]:
        if getattr(wanted, option) is not None and option not in taken:
            takers = [to for to, names in _TAKEN.items() if option in names]
            is_of_weights = option in _TAKEN["safetensors"]
            why = ": it has every state, as it is stored" if is_of_weights else ""
            # Two options for a stage: a universal folder has no ranks, only a shape.
            like = {"stage": "zero", "zero": "stage"}.get(option)
            instead = f"say --{like}" if like in taken else "leave it out"
            raise UnsupportedError(
                f"{wanted.to} takes no {option_name(option)}{why}",
                remedy=f"{instead}, or convert to {' or '.join(takers)}",
            )


def _lay_out_safetensors(
    catalog: Catalog, states: States, dtype: DType | None, max_shard_nbytes: int | None
) -> Export:
    """Describe the output files, and which state goes where, in the same order."""
    from restride.formats.safetensors import lay_out  # noqa: PLC0415 - only when it is written
    from restride.formats.safetensors.files import (  # noqa: PLC0415 - likewise
        MODEL_STEM,
        OPTIMIZER_STEM,
    )
    from restride.formats.safetensors.spelling import (  # noqa: PLC0415 - likewise
        DEFAULT_METADATA,
        VALUES_NAME,
        WRITTEN_WITH,
    )

    most = _SHARD_NBYTES if max_shard_nbytes is None else max_shard_nbytes
    selected = list(select_weights(catalog, dtype))
    moments = list(select_optimizer(catalog)) if states == "all" else []
    sets = {MODEL_STEM: _targets(selected)}
    if moments:
        sets[OPTIMIZER_STEM] = _targets(moments)
    # Each file says what else there is, or nothing would tell that it is gone.
    metadata = dict(DEFAULT_METADATA)
    if states == "all":
        metadata[WRITTEN_WITH] = " ".join([*sets, VALUES_NAME])
    outputs = [
        lay_out(targets, stem=stem, max_shard_nbytes=most, metadata=metadata)
        for stem, targets in sets.items()
    ]
    if states == "all":
        import msgspec  # noqa: PLC0415 - only where there are values to write

        values = msgspec.json.format(msgspec.json.encode(dict(catalog.values)), indent=1) + b"\n"
        outputs.append(Output((OutputFile(VALUES_NAME, len(values), ((0, values),)),)))
    selected += moments
    return Export(Output.joined(outputs), tuple(selected))


def _lay_out_universal(catalog: Catalog, wanted: Wanted, opened: TorchFiles | None) -> Export:
    """The same for a universal folder, which only DeepSpeed's own checkpoints have all parts of."""
    from restride.formats.universal import lay_out  # noqa: PLC0415 - only when it is written

    stage = wanted.stage
    if stage not in {None, 1, 2, 3}:
        raise UnsupportedError(
            f"there is no universal folder for ZeRO-{stage}", remedy="choose 1, 2 or 3"
        )
    is_partitioned = stage == _PARTITIONED if stage else catalog.format.endswith("zero-3")
    training, given = _trained(catalog, wanted, opened)
    training, followed = _followed(training, catalog, wanted, {})
    written = lay_out(catalog, training, is_partitioned=is_partitioned, opened=opened)
    return Export(written.output, written.sources, (*given, *followed, *written.findings))


def _lay_out_deepspeed(catalog: Catalog, wanted: Wanted, opened: TorchFiles | None) -> Export:
    """The same for DeepSpeed's sharded form, for ranks that may be others than the source's."""
    from restride.formats.deepspeed.expert_settings import (  # noqa: PLC0415
        expert_rank_count,
        native_rank_counts,
        stacked_experts,
    )
    from restride.formats.deepspeed.stage_cut import read_stage_cut  # noqa: PLC0415
    from restride.formats.deepspeed.target import DeepSpeedTarget  # noqa: PLC0415
    from restride.formats.deepspeed.writer import lay_out  # noqa: PLC0415
    from restride.targets import Cut, find_cut  # noqa: PLC0415 - with the catalogue of families

    stages = read_stage_cut(wanted.pp_layers, wanted.pp_tied)
    training, given = _trained(catalog, wanted, opened)
    tp, dp, zero = _require_ranks(catalog, wanted)
    target = DeepSpeedTarget(
        tp=tp,
        dp=dp,
        zero=zero,
        ep=expert_rank_count(training) if wanted.ep is None else wanted.ep,
        pp=_stage_count(training, stages) if wanted.pp is None else wanted.pp,
        cut=stages,
        zero_init=wanted.zero_init,
        is_ep_kept=wanted.ep is None and len(native_rank_counts(training)) > 1,
    )
    stacked = stacked_experts(training)  # which no tensor-parallel rank cuts
    dense = replace(catalog, tensors=tuple(t for t in catalog.tensors if t.name not in stacked))
    config = wanted.source_config if wanted.config is None else wanted.config
    cut = find_cut(dense, Cut(target.tp, config, wanted.rules, wanted.plan, wanted.grain))
    training, followed = _followed(training, catalog, wanted, cut.layouts)
    written = lay_out(catalog, training, target, cut.layouts)
    findings = (*cut.findings, *given, *followed, *written.findings)
    return Export(written.output, written.sources, findings)


def _trained(
    catalog: Catalog, wanted: Wanted, opened: TorchFiles | None
) -> tuple[Training, tuple[Finding, ...]]:
    """The training of the source, with the settings that the user gives where it has none."""
    training = open_training(catalog, opened)
    if wanted.hyperparameters is None:
        return training, ()
    given = read_hyperparameters(wanted.hyperparameters)
    training, note = with_hyperparameters(training, given, str(wanted.hyperparameters))
    return training, (note,)


def _followed(
    training: Training, catalog: Catalog, wanted: Wanted, layouts: Mapping[str, Layout]
) -> tuple[Training, tuple[Finding, ...]]:
    """The training with settings that follow the scales of parameters, where that is wanted."""
    if not wanted.optimizer_transform:
        return training, ()
    return follow_scales(training, catalog, layouts)


def _require_ranks(catalog: Catalog, wanted: Wanted) -> tuple[int, int, int]:
    """The tp and dp ranks and the ZeRO stage of the target: as said, else those of the source.

    Raises:
        UnsupportedError: The source is of no run that has them; says all that have to be said.
    """
    axes = dict(catalog.mesh.axes)
    name, _, stage = catalog.format.rpartition("-")
    kept = {
        "--tp N": axes.get("tp") if wanted.tp is None else wanted.tp,
        "--dp N": axes.get("dp") if wanted.dp is None else wanted.dp,
        "--zero STAGE": wanted.zero,
    }
    if wanted.zero is None and name == "deepspeed zero":
        kept["--zero STAGE"] = int(stage)
    known = tuple(number for number in kept.values() if number is not None)
    if len(known) < len(kept):
        raise UnsupportedError(
            f"{catalog.format} is for runs of any ranks",
            where=catalog.root,
            remedy="say what the next run has: "
            + " ".join(option for option, number in kept.items() if number is None),
        )
    tp, dp, zero = known
    return tp, dp, zero


def _stage_count(training: Training, said: StageCut) -> int:
    """Stages that are said layer by layer, else those of the source; 1 where it is no pipeline."""
    if said.starts is not None:
        return len(said.starts)
    return len(training.pipeline.stages) if training.pipeline else 1


def _targets(selected: list[Selected]) -> list[tuple[str, DType, tuple[int, ...]]]:
    return [(item.key, item.dtype, item.entry.layout.full_shape) for item in selected]
