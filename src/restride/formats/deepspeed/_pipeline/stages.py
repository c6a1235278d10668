"""How many pipeline stages a checkpoint has, and the model files of each.

Model-parallel ranks are numbered stage by stage: rank ``stage * tp + tp`` (deepspeed 0.19.8
`runtime/pipe/topology.py`). Since 0.19 the model files say both numbers; before that, the layer
files told how many tensor-parallel ranks there are (`checkpoint/reshape_3d_utils.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.values import OrderedDictValue
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.formats.deepspeed._model import read_model_file
from restride.formats.deepspeed._optimizer import FLAT_FP32
from restride.formats.deepspeed._pipeline.layers import StageModules, assemble_modules, open_layers
from restride.formats.deepspeed._pipeline.optimizers import StageNames, name_stages
from restride.frozen import Frozen
from restride.wording import which

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._files import TagFolder
    from restride.formats.deepspeed._model import ModelFile
    from restride.formats.deepspeed._optimizer import ZeroFile

__all__ = ["Grid", "OpenedModel", "Stage", "agreed", "find_grid", "read_stages"]

_DIMENSIONS: Final = "checkpoint_parallel_dimensions"
_ONE_SAVE: Final = "put only the files of one save into the folder"
_MOST_NAMED: Final = 5
_MOST_RANKS: Final = 1 << 20


class OpenedModel(Frozen):
    """A model file that was opened and not yet read.

    Attributes:
        name: Name of the file below the root of the checkpoint.
        dp: Data-parallel rank under ZeRO-3, else None.
        mp: Model-parallel rank, from the name.
        root: Everything in the file.
    """

    name: str
    dp: int | None
    mp: int
    root: Field

    def count(self, key: str) -> int | None:
        """Return the number of ranks that the file says under a key, or None."""
        if not self.root.is_mapping:
            raise self.root.wrong("the dict of a model file")
        stored = self.root.get(key)
        return None if stored is None else stored.integer(at_least=1)

    def dimension(self, key: str) -> int | None:
        """The same of the degrees of parallelism, which have a dict of their own."""
        if not self.root.is_mapping:
            raise self.root.wrong("the dict of a model file")
        stored = self.root.get(_DIMENSIONS)
        degree = stored.get(key) if stored else None
        return None if degree is None else degree.integer(at_least=1)


class Grid(Frozen):
    """Model-parallel ranks.

    Attributes:
        stage_count: Pipeline stages.
        tp_size: Tensor-parallel ranks of each.
    """

    stage_count: int
    tp_size: int

    @property
    def size(self) -> int:
        """Number of model-parallel ranks."""
        return self.stage_count * self.tp_size


class Stage(Frozen):
    """Model files of one pipeline stage.

    Attributes:
        models: The first of each tensor-parallel rank.
        partitioned: Those of each (dp, tp) rank, under ZeRO-3.
        layers: What the layer files have of the stage; None where there are none.
        names: Without ZeRO, what the stages of a pipeline are known to train.
    """

    models: tuple[ModelFile, ...]
    partitioned: dict[tuple[int, int], ModelFile]
    layers: StageModules | None
    names: StageNames | None = None


def agreed(said: Iterable[tuple[int | None, str]], key: str) -> int | None:
    """Return the one value that all files which have one agree on.

    Raises:
        CorruptError: Two files say different values.
    """
    values: dict[int, str] = {}
    for value, name in said:
        if value is not None:
            values.setdefault(value, name)
    if len(values) > 1:
        (first, first_name), (second, second_name) = list(values.items())[:2]
        raise CorruptError(
            f"{key} is {first}, in {second_name} it is {second}",
            where=first_name,
            remedy=_ONE_SAVE,
        )
    return next(iter(values), None)


def find_grid(folder: TagFolder, opened: Sequence[OpenedModel]) -> Grid:
    """Tell the pipeline stages and the tensor-parallel ranks.

    Raises:
        CorruptError: The numbers of ranks contradict each other.
    """
    said = agreed(((model.count("mp_world_size"), model.name) for model in opened), "mp_world_size")
    stages = agreed(((model.dimension("pp_degree"), model.name) for model in opened), "pp_degree")
    tensor = agreed(((model.dimension("tp_degree"), model.name) for model in opened), "tp_degree")
    total = said or len({model.mp for model in opened})
    by_layers = 1 + max((file.tp for file in folder.layers), default=0)
    if stages is None:
        stages = total // by_layers if folder.layers else 1
    if total > _MOST_RANKS:
        raise CorruptError(
            f"mp_world_size is {total}, no run has more than {_MOST_RANKS} ranks",
            where=str(folder.path),
        )
    grid = Grid(max(stages, 1), total // max(stages, 1))
    is_known = tensor is not None and stages > 1
    if grid.size != total or (is_known and tensor != grid.tp_size):
        raise CorruptError(
            f"{total} model-parallel ranks are no {stages} pipeline stages of "
            f"{tensor if is_known else by_layers} tensor-parallel ranks each",
            where=str(folder.path),
            remedy=_ONE_SAVE,
        )
    return grid


def read_stages(
    folder: TagFolder,
    open_file: Callable[[str], Field],
    grid: Grid,
    opened: Sequence[OpenedModel],
    zeros: Mapping[tuple[int, int], ZeroFile],
    *,
    has_weights: bool = True,
    tied: Mapping[str, tuple[int, ...]] | None = None,
) -> Iterator[Stage]:
    """Read the model files of each stage, with the modules that are in layer files.

    Args:
        folder: The files of the tag.
        open_file: Opens one of them by its name.
        grid: The model-parallel ranks.
        opened: Model files of these ranks.
        zeros: Optimizer file of each (data-parallel, model-parallel) rank.
        has_weights: Whether the weights of a pipeline must be there; universal folders lack them.
        tied: What is told of layers that share a module; asked for without ZeRO alone.

    Raises:
        FormatError: A file is none, or a part of it has another type than it must have.
        CorruptError: Files are missing or contradict each other.
        UnsupportedError: Nothing tells which layer a weight is of, or what is told is not so.
    """
    _require_all(folder, grid, opened)
    stage_names: StageNames | None = None
    layers: tuple[StageModules, ...] | None = None
    named = {
        model.mp: _flat_names(zeros, model.mp)
        for model in opened
        if model.root.get("param_shapes") is None
    }
    lacks_weights = any(model.root.get("module") is None for model in opened)
    if lacks_weights and not has_weights and not folder.layers:
        layers = (StageModules((OrderedDictValue(),) * grid.tp_size),) * grid.stage_count
    elif folder.layers or grid.stage_count > 1:
        _require_layers(folder, grid, opened)
        files = tuple(open_layers(folder, open_file, grid.tp_size))
        roots = [
            [model.root for model in opened[pipe * grid.tp_size :][: grid.tp_size]]
            for pipe in range(grid.stage_count)
        ]
        names = [
            [
                [name for group in named.get(pipe * grid.tp_size + tp, ()) for name in group]
                for tp in range(grid.tp_size)
            ]
            for pipe in range(grid.stage_count)
        ]
        if _are_whole(roots, zeros):
            stage_names = name_stages(roots, files, tied)
            names = [[[*own]] * grid.tp_size for own in stage_names.stages] or names
        tied_to = stage_names.tied_to if stage_names else None
        layers = assemble_modules(folder, files, roots, names, tied_to)
    for pipe in range(grid.stage_count):
        own = [model for model in opened if model.mp // grid.tp_size == pipe]
        stage = _read_stage(own, grid, layers[pipe] if layers else None, named)
        yield replace(stage, names=stage_names)


def _are_whole(
    stages: Sequence[Sequence[Field]], zeros: Mapping[tuple[int, int], ZeroFile]
) -> bool:
    """Whether the model files have the optimizers, with numbers."""
    optimizers = [root.get("optimizer") for roots in stages for root in roots]
    return not zeros and not any(own is None or _is_flat(own) for own in optimizers)


def _flat_names(zeros: Mapping[tuple[int, int], ZeroFile], mp: int) -> tuple[tuple[str, ...], ...]:
    """Names of each parameter group in flat order, from the optimizer files of one rank.

    BF16_Optimizer saves such files without ZeRO as well, and then no model file has the shapes.
    """
    files = [zero for (_, number), zero in sorted(zeros.items()) if number == mp]
    if any(group.fragments is None for zero in files for group in zero.groups):
        return ()
    groups: list[dict[str, None]] = []
    for zero in files:
        for number, group in enumerate(zero.groups):
            groups += [{}] * (number + 1 - len(groups))
            groups[number] = groups[number] | dict.fromkeys(group.fragments or {})
    return tuple(map(tuple, groups))


def _read_stage(
    opened: Sequence[OpenedModel],
    grid: Grid,
    layers: StageModules | None,
    named: Mapping[int, Sequence[Sequence[str]]],
) -> Stage:
    models: dict[int, ModelFile] = {}
    partitioned: dict[tuple[int, int], ModelFile] = {}
    before: ModelFile | None = None
    for file in opened:
        tp = file.mp % grid.tp_size
        root = file.root
        if layers is not None:
            root = _with_module(root, layers, tp)
        before = read_model_file(root, file.name, tp, file.dp, before=before)
        model = replace(before, tp_size=grid.tp_size)
        if named.get(file.mp):
            model = _with_shapes(model, layers, named[file.mp])
        elif _is_flat(model.optimizer):
            model = replace(model, optimizer=None)
        elif layers is not None and layers.elsewhere and model.optimizer is not None:
            elsewhere = {
                name: own[tp].shape
                for name, own in layers.elsewhere.items()
                if name not in model.buffer_names
            }
            model = replace(model, param_shapes=(elsewhere,))
        models.setdefault(tp, model)
        if file.dp is not None:
            partitioned[file.dp, tp] = model
    return Stage(tuple(models[tp] for tp in range(grid.tp_size)), partitioned, layers)


def _with_module(root: Field, layers: StageModules, tp: int) -> Field:
    """The model file as it would be if the module were in it."""
    module = layers.modules[tp]
    value: dict[Value, Value] = {key: entry.value for key, entry in root.items()}
    value["module"] = module
    return Field(value, root.where)


def _is_flat(optimizer: Field | None) -> bool:
    """Whether a model file has what belongs into the optimizer files, which are not there."""
    if optimizer is None or not optimizer.is_mapping:
        return False
    return optimizer.get(FLAT_FP32) is not None


def _with_shapes(
    model: ModelFile, layers: StageModules | None, names: Sequence[Sequence[str]]
) -> ModelFile:
    """The model file as a run with ZeRO would have written it.

    What it has of the optimizer is what the file of the first data-parallel rank has again.
    """
    shapes: list[dict[str, Shape]] = []
    for group in names:
        shapes.append({})
        for name in group:
            weight = model.weights.get(name)
            elsewhere = layers.elsewhere.get(name) if layers else None
            if weight is not None:
                shapes[-1][name] = weight.shape
            elif elsewhere:
                shapes[-1][name] = elsewhere[model.tp].shape
            else:
                raise CorruptError(
                    f"has no weight {name!r}, which the optimizer files name",
                    where=model.root.where,
                    remedy=_ONE_SAVE,
                )
    return replace(model, param_shapes=tuple(shapes), optimizer=None)


def _require_all(folder: TagFolder, grid: Grid, opened: Sequence[OpenedModel]) -> None:
    known = {model.mp for model in opened}
    missing = [mp for mp in range(grid.size) if mp not in known]
    if missing:
        before = "zero_pp_rank_*_" if folder.partitioned else ""
        names = ", ".join(
            f"{before}mp_rank_{mp:02d}_model_states.pt" for mp in missing[:_MOST_NAMED]
        )
        raise CorruptError(
            f"{len(missing)} of {grid.size} model files {which(len(missing), 'is', 'are')} "
            f"missing: {names}",
            where=str(folder.path),
            remedy=f"add {which(len(missing), 'it', 'them')}: on disks that are not shared, each "
            "machine saves its own ranks",
        )


def _require_layers(folder: TagFolder, grid: Grid, opened: Sequence[OpenedModel]) -> None:
    """Weights are in layer files or in model files, and not in both."""
    with_module = [model for model in opened if model.root.get("module") is not None]
    if with_module and folder.layers:
        raise CorruptError(
            f"has {folder.layers[0].name}, and the weights are in {with_module[0].name}",
            where=str(folder.path),
            remedy=_ONE_SAVE,
        )
    if folder.partitioned:
        raise UnsupportedError(
            f"is of ZeRO-3 with {grid.stage_count} pipeline stages or in layers, which DeepSpeed "
            "does not train",
            where=str(folder.path),
        )
    if with_module:
        raise UnsupportedError(
            f"is of a run with {grid.stage_count} pipeline stages that has the weights in the "
            f"model files, such as {with_module[0].name}: the names are those of a stage, and two "
            "stages may give different layers the same",
            where=str(folder.path),
            remedy="checkpoints of a PipelineModule, with layer_* files, can be read",
        )
    if not folder.layers:
        raise FormatError(
            "has no 'module' in its model files, and there are no layer_*-model_states.pt with the "
            "weights of a pipeline",
            where=str(folder.path),
            remedy="copy the layer files of the save as well",
        )
