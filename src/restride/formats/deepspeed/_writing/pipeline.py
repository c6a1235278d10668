"""A pipeline in sharded form: the files of its layers, and those of every stage.

    TAG/layer_LL[-model_TT]-model_states.pt                a layer, of a tensor-parallel rank
    TAG/mp_rank_MM_model_states.pt                         no module; without ZeRO the optimizer
    TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   optimizer of a (dp, mp) rank

A stage is written as a run of its own, whose model-parallel ranks are counted on from those of the
stages before. An engine finds layers by their numbers and everything else by its rank (deepspeed
0.19.8 `runtime/pipe/module.py`, `load_state_dir`), so that only the optimizer depends on the cut.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import OrderedDictValue
from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._pipeline.cut import cut_stages
from restride.formats.deepspeed._pipeline.described_layers import completed_layers
from restride.formats.deepspeed._pipeline.muon import Cuts
from restride.formats.deepspeed._pipeline.place import StagePlace
from restride.formats.deepspeed._settings import is_bf16
from restride.formats.deepspeed._writing.model import write_models
from restride.formats.deepspeed._writing.partitions import write_partitions
from restride.formats.deepspeed._writing.whole import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.training import ModelRank, Pipeline, PipelineLayer
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._pipeline.cut import CutStages, OptimizerForm, TargetStage
    from restride.formats.deepspeed._writing.writing import Writing

__all__ = ["write_pipeline"]

_GRADIENTS: Final = 2
_DESCRIBED: Final = Finding(
    "warning",
    "described-layers",
    "the files of layers are made of what the universal folder has: frozen weights of a folder of "
    "DeepSpeed's own converter are not in it, and layers without parameters behind the last one "
    "need their number, as --pp-layers uniform:9; the engine stops where it misses one",
)


def write_pipeline(writing: Writing, pipeline: Pipeline) -> list[int]:
    """Add all files of a pipeline.

    Returns:
        For each model-parallel rank that is written, the number of the rank of the source that
        speaks for it.

    Raises:
        CoverageError: A layout of the target is not whole.
        CorruptError: A layer has a name that no tensor has.
        UnsupportedError: An engine of pipelines does not load such a form, a state is missing, or
            nothing tells what a stage has.
        ExecutionError: The step of a parameter cannot be read.
    """
    _require_loaded(writing)
    target = writing.target
    if pipeline.is_described:
        pipeline = completed_layers(pipeline, target.cut, writing.catalog.root)
        writing.findings.append(_DESCRIBED)
    cut = cut_stages(
        writing.training,
        pipeline,
        target.cut,
        target.pp,
        partial(_numels, writing),
        Cuts({name: own.layout for name, own in writing.tensors.items()}, writing.layouts),
        writing.catalog.root,
        form=_form(writing),
    )
    _require_trained(writing, cut)
    sources = len(pipeline.stages)
    for stage in cut.stages:
        own = _of_stage(writing, stage, sources)
        own.require_known()
        if target.zero:
            write_models(own)
            write_partitions(own)
        else:
            write_whole(own)
    _write_layers(writing, pipeline, cut)
    writing.findings.extend(cut.findings)
    return [
        _first_rank(writing, stage.source, sources) + tp * _ranks(writing, sources) // target.tp
        for stage in cut.stages
        for tp in range(target.tp)
    ]


def _numels(writing: Writing, name: str) -> list[int]:
    """Elements of a parameter on each tensor-parallel rank; nothing of what is none."""
    tensor = writing.tensors.get(name)
    if tensor is None or tensor.kind != "parameter":
        return []
    return [writing.layouts[name].shard_numel(tp) for tp in range(writing.target.tp)]


def _form(writing: Writing) -> OptimizerForm:
    if writing.target.zero:
        return "zero"
    return "bare" if writing.dtype.name == "float32" else "wrapped"


def _require_loaded(writing: Writing) -> None:
    """Refuse what an engine of pipelines cannot have, or cannot load."""
    target, root = writing.target, writing.catalog.root
    if target.zero >= _GRADIENTS:
        raise UnsupportedError(
            f"ZeRO-{target.zero} does not go with pipelines: the engine refuses it",
            where=root,
            remedy="choose --zero 1, or 0",
        )
    is_half = writing.dtype.name == "bfloat16" or is_bf16(writing.config)
    if not target.zero and is_half:
        raise UnsupportedError(
            "without ZeRO an engine of a pipeline in bf16 does not load its optimizer, not even "
            "what it saved itself: it looks for a list of partitions where it saved one",
            where=root,
            remedy="choose --zero 1",
        )


def _require_trained(writing: Writing, cut: CutStages) -> None:
    """Refuse stages with which an engine would wait for ever.

    ZeRO adds the norm of each group up over the stages (`runtime/zero/stage_1_and_2.py`,
    `scaled_global_norm`), group by group: a stage with fewer groups comes to fewer of the sums.
    """
    counts = [len(stage.groups) for stage in cut.stages]
    if writing.target.zero and writing.is_lean and len(set(counts)) > 1:
        fewest = counts.index(min(counts))
        raise UnsupportedError(
            f"stage {fewest} would train {counts[fewest]} of {max(counts)} parameter groups, and "
            "an engine of ZeRO-1 waits for ever where stages have different numbers of them",
            where=writing.catalog.root,
            remedy="give first layers with which every stage has all groups, as --pp-layers 0,3,6, "
            "or fewer stages",
        )


def _ranks(writing: Writing, sources: int) -> int:
    """Tensor-parallel ranks of a stage of the source."""
    return len(writing.training.ranks) // sources


def _first_rank(writing: Writing, stage: int, sources: int) -> int:
    return stage * _ranks(writing, sources)


def _of_stage(writing: Writing, stage: TargetStage, sources: int) -> Writing:
    """The writing of one stage."""
    training, target = writing.training, writing.target
    first, count = _first_rank(writing, stage.source, sources), _ranks(writing, sources)
    # Frozen weights too, which are only in the files of layers.
    names = stage.names.union(*(layer.names for layer in stage.layers))
    return replace(
        writing,
        training=replace(
            training, groups=stage.groups, ranks=training.ranks[first : first + count]
        ),
        tensors={
            name: tensor
            for name, tensor in writing.tensors.items()
            if name in names or any(alias in names for alias in tensor.aliases)
        },
        stage=StagePlace(stage.number, target.pp, writing.universal_info),
    )


def _write_layers(writing: Writing, pipeline: Pipeline, cut: CutStages) -> None:
    """Add the file of every layer, as all tensor-parallel ranks of its stage have it."""
    stages = {layer.number: stage.number for stage in cut.stages for layer in stage.layers}
    names = {
        name: tensor.name
        for tensor in writing.tensors.values()
        for name in (tensor.name, *tensor.aliases)
    }
    sources = len(pipeline.stages)
    for layer in pipeline.layers:
        place = StagePlace(stages[layer.number], writing.target.pp, None)
        own = replace(writing, stage=place)
        first = _first_rank(writing, layer.stage, sources)
        tensors = {key: names[name] for key, name in _named(layer) if name in names}
        arrays = {
            key: own.array(own.weights[name], own.layouts[name]) for key, name in tensors.items()
        }
        for tp in range(writing.target.tp):
            rank = writing.training.ranks[
                first + tp * _ranks(writing, sources) // writing.target.tp
            ]
            draft = own.draft(_file_name(own, pipeline, layer, tp))
            content = OrderedDictValue()
            content.state = layer.state
            for key, name in _named(layer):
                content[key] = (
                    draft.tensor(arrays[key], tp) if key in arrays else _value(rank, layer, name)
                )
            writing.output.add(draft, content)


def _named(layer: PipelineLayer) -> Iterator[tuple[str, str]]:
    return zip(layer.keys, layer.names, strict=True)


def _value(rank: ModelRank, layer: PipelineLayer, name: str) -> Value:
    """What of a layer is no tensor: extra states."""
    if name not in rank.module:
        raise CorruptError(
            f"layer {layer.number} has {name!r}, which is neither a tensor nor a value there",
            where=rank.where,
        )
    return rank.module[name]


def _file_name(writing: Writing, pipeline: Pipeline, layer: PipelineLayer, tp: int) -> str:
    is_named = writing.target.tp > 1 or pipeline.names_ranks
    rank = f"-model_{tp:02d}" if is_named else ""
    return f"{writing.training.tag}/layer_{layer.number:02d}{rank}-model_states.pt"
