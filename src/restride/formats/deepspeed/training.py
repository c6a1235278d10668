"""Read the training that a DeepSpeed checkpoint stopped in: all that a writer needs but tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.orders import merged_order
from restride.checkpoint.training import (
    ModelRank,
    ParameterGroup,
    Pipeline,
    PipelineStage,
    Training,
)
from restride.checkpoint.values import OrderedDictValue, StoredTensor, difference
from restride.errors import UnsupportedError
from restride.formats.deepspeed import _model, _optimizer
from restride.formats.deepspeed._experts.files import open_experts
from restride.formats.deepspeed._experts.ranks import ExpertRanks
from restride.formats.deepspeed._fields import Field, shown
from restride.formats.deepspeed._pipeline.groups import merged_groups
from restride.formats.deepspeed._placement import REPLICATED, ROW_PARALLEL
from restride.formats.deepspeed._run import joined_run, open_stages
from restride.formats.deepspeed._settings import group_order, is_round_robin
from restride.formats.deepspeed._whole.experts import find_experts
from restride.formats.deepspeed._whole.states import read_whole
from restride.formats.deepspeed._whole.training import with_whole_optimizer
from restride.storage.torch_zip import TorchFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._experts.files import Expert
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._optimizer import Group, ZeroFile
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed._whole.states import Whole

__all__ = ["merged_order", "read_model_training", "read_training"]

_INFO: Final = "universal_checkpoint_info"
_EXPERT_LAYERS: Final = ("ds_autoep_layers", "autoep_layers")
# Geometry that a conversion makes anew.
_GEOMETRY: Final = frozenset(
    {
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "num_experts",
        "folding",
        _INFO,
        *_EXPERT_LAYERS,
    }
)
# What of `universal_checkpoint_info` follows from the layouts.
_DESCRIBED_BY_LAYOUTS: Final = frozenset(
    {
        "affine_map",
        "affine_maps",
        "parameter_with_sub_params",
        "parameter_with_2_sub_params_cat_dim_0",
        "sub_param_shard_widths",
        "ds_autoep_layers",
    }
)
_PATTERNS: Final = "_patterns"
_RANK_OF_LAYER: Final = "-model_00-"


def read_training(catalog: Catalog, opened: TorchFiles | None = None) -> Training:
    """Read, from the files of a catalog, what goes with its tensors.

    Args:
        catalog: What `read_catalog` gave for a checkpoint of any ZeRO stage.
        opened: What its files were opened by; without it they are opened again.

    Raises:
        UnsupportedError: It has no optimizer, or no parameter groups in its files, or the
            optimizer's states have no names (ZeRO-0).
        FormatError, CorruptError, ExecutionError: As for `read_catalog`.

    Cost:
        O(metadata of all files); no tensor is read.
    """
    runs = open_stages(Path(catalog.root), opened or TorchFiles(), tied=catalog.tied)
    run = joined_run(runs)
    experts = open_experts(run)[0] if run.folder.experts else {}
    wholes = [own for stage in runs if (own := read_whole(stage, find_experts(stage)))]
    if wholes:
        training = with_whole_optimizer(read_model_training(run, catalog), wholes[0])
        return _of_stages(training, runs, wholes) if run.is_of_pipeline else training
    zero = next(iter(run.zeros.values()), None)
    if zero is None or run.models[0].param_shapes is None:
        raise UnsupportedError(
            "has no optimizer files, and a training does not go on without",
            where=str(run.folder.path),
            remedy="convert the weights with --to safetensors",
        )
    stages = [
        tuple(
            _without_arrays(group, catalog)
            for own in _first_file(stage)
            for group in _groups(stage, own, experts)
        )
        for stage in runs
    ]
    return replace(
        read_model_training(run, catalog),
        groups=merged_groups(stages, _order(run), str(run.folder.path)),
        pipeline=_pipeline(runs, stages) if run.is_of_pipeline else None,
        optimizer={
            key: entry.value
            for key, entry in zero.state.items()
            if key not in _optimizer.CONSUMED_KEYS and key != "zero_stage"
        },
    )


def _of_stages(training: Training, runs: Sequence[Run], wholes: Sequence[Whole]) -> Training:
    """Put the optimizers of all stages together, which are in their model files."""
    stages = [
        tuple(map(_without_names, with_whole_optimizer(training, whole).groups)) for whole in wholes
    ]
    names = runs[0].names
    pipeline = _pipeline(runs, stages)
    listed = [dict.fromkeys(own) for own in (names.stages if names else ())]
    return replace(
        training,
        groups=merged_groups(stages, training.order, str(runs[0].folder.path)),
        pipeline=replace(
            pipeline,
            stages=tuple(
                replace(stage, names=tuple(own | dict.fromkeys(stage.names)))
                for stage, own in zip(pipeline.stages, listed, strict=True)
            ),
            are_ties_known=names is not None and names.are_ties_known,
        ),
    )


def _without_names(group: ParameterGroup) -> ParameterGroup:
    """Leave out what an optimizer was told of its parameters: other stages have others.

    PyTorch's keep the names that they are made with.
    """
    settings = {key: value for key, value in group.settings.items() if key != "param_names"}
    return replace(group, settings=settings)


def _first_file(run: Run) -> list[ZeroFile]:
    """The file that speaks for a stage; findings tell where there is none."""
    return [*run.zeros.values()][:1]


def _pipeline(runs: Sequence[Run], groups: Sequence[tuple[ParameterGroup, ...]]) -> Pipeline:
    layers = sorted((layer for run in runs for layer in run.layers), key=lambda own: own.number)
    names = [
        tuple(
            dict.fromkeys(
                name
                for model in run.models
                for group in (*(model.param_shapes or ()), sorted(model.buffer_names))
                for name in group
            )
        )
        for run in runs
    ]
    names_ranks = any(_RANK_OF_LAYER in file.name for file in runs[0].folder.layers)
    return Pipeline(
        tuple(layers),
        tuple(PipelineStage(*stage) for stage in zip(names, groups, strict=True)),
        names_ranks=names_ranks and runs[0].tp_size == 1,
    )


def read_model_training(run: Run, catalog: Catalog) -> Training:
    """Read what the model files alone say of a training: all but its optimizer.

    Args:
        run: The files.
        catalog: What was read of them.
    """
    first = run.models[0]
    return Training(
        tag=run.folder.below.removesuffix("/") or run.root.resolve().name,
        dtype=_dtype(catalog, first),
        order=_order(run),
        groups=(),
        optimizer={},
        ranks=tuple(_rank(model) for model in run.all_models),
        data_size=len(run.all_models) // run.tp_size,
        described=dict(_described(first.root.get(_INFO))),
        has_maps=not _is_listed(first.root.get(_INFO)),
        experts=tuple(_experts(first.root)),
    )


def _order(run: Run) -> tuple[str, ...]:
    """Names of the module; every stage of a pipeline has its own, and tied ones."""
    names = (name for model in run.models for name, _ in model.root.at("module").items())
    return tuple(dict.fromkeys(names))


def _dtype(catalog: Catalog, model: ModelFile) -> DType:
    trained = (tensor.trained_dtype for tensor in catalog.tensors if not tensor.is_frozen)
    found = _model.configured_dtype(model.root) or next(filter(None, trained), None)
    return found or DTYPES["float32"]


def _groups(run: Run, zero: ZeroFile, experts: Mapping[str, Expert]) -> Iterator[ParameterGroup]:
    # With elastic_checkpoint there are none, and the engine that resumes keeps its own.
    settings = [
        {key: entry for key, entry in _entries(group) if key != "params"}
        for group in zero.param_groups
    ] or [{} for _ in zero.groups]
    # Ranks may hold nothing of a parameter, and have other sub-groups then.
    own = {file.tp: file for file in reversed(run.zeros.values())}
    names = [_names(run, own[model.tp], model, experts) for model in run.models if model.tp in own]
    module = _order(run)
    parts: list[list[Group]] = [[] for _ in settings]
    for parent, flat in zip(zero.parents, zero.groups, strict=True):
        parts[parent].append(flat)
    for number, own_settings in enumerate(settings):
        yield ParameterGroup(
            names=merged_order([ranks[number] for ranks in names], module),
            settings=own_settings,
            numbers=_numbers(parts[number]),
        )


def _without_arrays(group: ParameterGroup, catalog: Catalog) -> ParameterGroup:
    """Leave out what the catalog has as an array of each parameter: Muon's momentum."""
    names = set(group.names)
    arrays = {
        state for tensor in catalog.tensors if tensor.name in names for state in tensor.states
    }
    return replace(
        group,
        numbers={
            key: value
            for key, value in group.numbers.items()
            if not (isinstance(value, StoredTensor) and key in arrays)
        },
    )


def _names(
    run: Run, zero: ZeroFile, model: ModelFile, experts: Mapping[str, Expert]
) -> list[list[str]]:
    """Members of each group on one tensor-parallel rank, in the order of the optimizer."""
    config, ranks = zero.root.get("ds_config"), ExpertRanks(run, experts)
    members: list[list[str]] = [[] for _ in zero.param_groups or zero.groups]
    for parent, flat, shapes in zip(
        zero.parents, zero.groups, model.param_shapes or (), strict=True
    ):
        names = list(shapes)
        # BF16_Optimizer, which says no stage, knows of no round robin, whatever is configured.
        is_dealt_out = not zero.is_partitioned and zero.stage is not None
        if is_dealt_out and is_round_robin(config):
            names = group_order(names, flat.partition_count or run.dp_size)
        members[parent] += ranks.full_names(names)
    return members


def _numbers(parts: Sequence[Group]) -> dict[str, Value]:
    """States that are no arrays; sub-groups of one group have them in common."""
    found: dict[str, Field] = {}
    for part in parts:
        for key, entry in part.others.items():
            first = found.setdefault(key, entry)
            different = difference(entry.value, first.value)
            if different is not None:
                place, one, other = different
                raise UnsupportedError(
                    f"is {shown(one)}, {first.where}{place} of the same parameter group is "
                    f"{shown(other)}",
                    where=f"{entry.where}{place}",
                    remedy="convert a checkpoint whose parameters were all trained alike",
                )
    return {key: entry.value for key, entry in found.items()}


def _rank(model: ModelFile) -> ModelRank:
    root = model.root
    module = root.at("module").value
    return ModelRank(
        where=model.name,
        values={
            key: value
            for key, value in _entries(root)
            if key not in _model.CONSUMED_KEYS and key not in _GEOMETRY
        },
        module={
            key: value
            for key, value in _entries(root.at("module"))
            if not isinstance(value, StoredTensor)
        },
        module_state=module.state if isinstance(module, OrderedDictValue) else None,
    )


def _is_listed(info: Field | None) -> bool:
    """Whether lists of patterns say how parameters are cut, and no map does."""
    if info is None or info.get("affine_map") is not None:
        return False
    return info.get(REPLICATED) is not None or info.get(ROW_PARALLEL) is not None


def _described(info: Field | None) -> Iterator[tuple[str, Value]]:
    for key, value in _entries(info) if info else ():
        if key not in _DESCRIBED_BY_LAYOUTS and not key.endswith(_PATTERNS):
            yield key, value


def _experts(root: Field) -> Iterator[Mapping[str, Value]]:
    stored = next((layers for key in _EXPERT_LAYERS if (layers := root.get(key))), None)
    for layer in stored.elements() if stored else ():
        yield dict(_entries(layer))


def _entries(mapping: Field) -> Iterator[tuple[str, Value]]:
    """Entries of a mapping; one whose value is None is an entry too."""
    for key, entry in mapping.items():
        yield key, entry.value
