"""The layer files of a pipeline, put together to the modules that its model files lack.

A pipeline saves every layer by its number, with the names inside the layer: ``layer_03`` has
``norm.weight``. The optimizer calls it ``3.norm.weight`` (deepspeed 0.19.8
`runtime/pipe/module.py`, `_build` and `save_state_dict`). Only layers that are tied are called
otherwise: all layers with the key ``embed`` are one module on each stage,
``tied_modules.embed.weight``, and its file has one of their numbers. Nothing says which; names and
shapes do, or the checkpoint is refused::

    stage 0   layer_00  weight            tied_modules.embed.weight
              layer_01  up.weight, ...    1.up.weight, ...
    stage 1   layer_03  up.weight, ...    3.up.weight, ...
              (the tied module again, in a layer without a file: it has a function of its own)
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from restride.checkpoint.training import PipelineLayer
from restride.checkpoint.values import OrderedDictValue, StoredTensor
from restride.errors import CorruptError, UnsupportedError
from restride.frozen import Frozen
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._files import TagFolder

__all__ = ["Copies", "OpenedLayer", "StageModules", "assemble_modules", "open_layers"]

Copies = dict[str, list[tuple[StoredTensor, ...]]]
"""By name of a tied weight, further copies of it: its shard on each tensor-parallel rank."""

_TIED: Final = "tied_modules."


class StageModules(Struct):
    """What the layer files have of one stage.

    Attributes:
        modules: For each tensor-parallel rank the module, as a model file would have it.
        copies: Weights that the stage stores more than once, without the first time.
        elsewhere: Tied weights that only layers of other stages store, with the shard of each
            tensor-parallel rank.
        layers: The layers of the stage that have a file, in no order.
        unnamed: Files of layers behind the last one that anything else names.
    """

    modules: tuple[OrderedDictValue, ...]
    copies: Copies = field(default_factory=dict)
    elsewhere: dict[str, tuple[StoredTensor, ...]] = field(default_factory=dict)
    layers: list[PipelineLayer] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


class OpenedLayer(Frozen):
    """One layer: what its file has on each tensor-parallel rank."""

    number: int
    contents: tuple[Field, ...]

    @property
    def where(self) -> str:
        return self.contents[0].where

    @property
    def is_empty(self) -> bool:
        """Whether it is a module with neither parameters nor buffers."""
        return not list(self.contents[0].items())

    def stored(self, prefix: str, stage: int) -> PipelineLayer:
        """What a writer has to know of it."""
        content = self.contents[0]
        keys = tuple(key for key, _ in content.items())
        state = content.value.state if isinstance(content.value, OrderedDictValue) else None
        return PipelineLayer(self.number, prefix, keys, stage, state)

    def shapes(self, tp: int) -> dict[str, Shape | None]:
        """Shape of each entry; None where it is no tensor."""
        return {
            key: entry.value.shape if isinstance(entry.value, StoredTensor) else None
            for key, entry in self.contents[tp].items()
        }


class _Stage(Frozen):
    """What the model files of one stage call its tensors.

    Attributes:
        shapes: For each tensor-parallel rank the trained parameters; None where only the name is
            known.
        buffers: Names of the buffers.
        where: File, for errors.
    """

    shapes: tuple[Mapping[str, Shape | None], ...]
    buffers: frozenset[str]
    where: str

    @property
    def names(self) -> set[str]:
        """All names, of any rank: an empty shard is not among the parameters of its rank."""
        return {name for shapes in self.shapes for name in shapes} | self.buffers

    @property
    def numbers(self) -> set[int]:
        """Numbers of the layers that are not tied."""
        first = (name.partition(".")[0] for name in self.names)
        return {int(number) for number in first if number.isdecimal() and len(number) < 7}  # noqa: PLR2004


def assemble_modules(
    folder: TagFolder,
    layers: Sequence[OpenedLayer],
    stages: Sequence[Sequence[Field]],
    names: Sequence[Sequence[Iterable[str]]],
    tied_to: Mapping[int, str] | None = None,
) -> tuple[StageModules, ...]:
    """Give every stage of a pipeline its module.

    Args:
        folder: The files of the tag.
        layers: Those that have files.
        stages: Content of the model files, by stage and tensor-parallel rank.
        names: The same of the names that the optimizer files have, for model files without shapes.
        tied_to: Where it was told, the key of its tied module for each layer that has one.

    Raises:
        CorruptError: A file is missing, or does not have what the optimizer trained.
        UnsupportedError: A layer may be one of several tied modules.
    """
    known = [_read_stage(*stage) for stage in zip(stages, names, strict=True)]
    found = [StageModules(tuple(OrderedDictValue() for _ in stages[0])) for _ in stages]
    tied: dict[str, list[OpenedLayer]] = defaultdict(list)
    lowest = 0
    last = max((number for stage in known for number in stage.numbers), default=None)
    for layer in layers:
        owners = [number for number, stage in enumerate(known) if layer.number in stage.numbers]
        if len(owners) > 1:
            raise CorruptError(
                f"layer {layer.number} is on stages {owners}, by what {known[owners[0]].where} and "
                f"{known[owners[1]].where} name",
                where=layer.where,
            )
        prefix = None
        if tied_to is not None:
            key = tied_to.get(layer.number)
            prefix = None if key is None else f"{_TIED}{key}."
        elif not owners and not layer.is_empty:
            prefix = _tied_prefix(layer, known)
        if prefix is None:
            lowest = owners[0] if owners else lowest
            _add(found[lowest], layer, f"{layer.number}.")
            found[lowest].layers.append(layer.stored(f"{layer.number}.", lowest))
            if last is not None and layer.number > last and not layer.is_empty:
                found[lowest].unnamed.append(layer.where)
        else:
            tied[prefix].append(layer)
    for prefix, copies in tied.items():
        _add_tied(prefix, copies, known, found)
    _require_all(folder, known, found)
    return tuple(found)


def _read_stage(roots: Sequence[Field], names: Sequence[Iterable[str]]) -> _Stage:
    shapes: list[dict[str, Shape | None]] = []
    for root, own_names in zip(roots, names, strict=True):
        groups = root.get("param_shapes")
        own = (group.items() for group in groups.elements()) if groups else ()
        shapes.append(dict.fromkeys(own_names))
        shapes[-1] |= {name: shape.shape() for group in own for name, shape in group}
    buffers = [root.get("buffer_names") for root in roots]
    named = (name for stored in buffers if stored for name in stored.texts())
    return _Stage(tuple(shapes), frozenset(named), roots[0].where)


def open_layers(
    folder: TagFolder, open_file: Callable[[str], Field], tp_size: int
) -> Iterator[OpenedLayer]:
    """Open the layer files of a pipeline, in the order of the layers.

    Args:
        folder: The files of the tag.
        open_file: Opens one of them by its name.
        tp_size: Tensor-parallel ranks.

    Raises:
        FormatError: A file is not what its name says.
        CorruptError: A file is missing, or is there twice, or has other names than another rank's.
    """
    names: dict[int, dict[int, str]] = defaultdict(dict)
    for file in folder.layers:
        first = names[file.layer].setdefault(file.tp, file.name)
        if first != file.name:
            raise CorruptError(
                f"has two files of layer {file.layer}, tp rank {file.tp}: {first} and {file.name}",
                where=str(folder.path),
            )
    for number, by_rank in sorted(names.items()):
        missing = [tp for tp in range(tp_size) if tp not in by_rank]
        if missing:
            raise CorruptError(
                f"layer {number} has files of tp ranks {sorted(by_rank)} of {tp_size}: "
                f"layer_{number:02d}-model_{missing[0]:02d}-model_states.pt is missing",
                where=str(folder.path),
            )
        contents = tuple(open_file(by_rank[tp]) for tp in range(tp_size))
        keys = [list(content.items()) for content in contents]
        if any([key for key, _ in other] != [key for key, _ in keys[0]] for other in keys[1:]):
            raise CorruptError(
                f"has other names than {contents[0].where}",
                where=contents[1].where,
                remedy="put only the files of one save into the folder",
            )
        yield OpenedLayer(number, contents)


def _tied_prefix(layer: OpenedLayer, stages: Sequence[_Stage]) -> str | None:
    """Tell which tied module a layer is, by the names and shapes of its parameters."""
    fitting = {
        prefix
        for stage in stages
        for prefix in _tied_prefixes(stage)
        if _has_module(layer, stage, prefix)
    }
    if len(fitting) > 1:
        raise UnsupportedError(
            f"layer {layer.number} has the names and shapes of the tied modules "
            f"{' and '.join(sorted(prefix.rstrip('.') for prefix in fitting))}, and nothing says "
            "which of them it is",
            where=layer.where,
            remedy="save the checkpoint with one pipeline stage and without PipelineModule",
        )
    return fitting.pop() if fitting else None


def _tied_prefixes(stage: _Stage) -> set[str]:
    return {
        f"{_TIED}{name.removeprefix(_TIED).partition('.')[0]}."
        for name in stage.names
        if name.startswith(_TIED)
    }


def _has_module(layer: OpenedLayer, stage: _Stage, prefix: str) -> bool:
    """Whether a layer has all that the stage names of a tied module."""
    for tp, shapes in enumerate(stage.shapes):
        stored = layer.shapes(tp)
        for name, shape in shapes.items():
            found = stored.get(name.removeprefix(prefix))
            if name.startswith(prefix) and (found is None or shape not in (None, found)):
                return False
    keys = layer.shapes(0).keys()
    wanted = {name.removeprefix(prefix) for name in stage.names if name.startswith(prefix)}
    return wanted <= keys


def _add(stage: StageModules, layer: OpenedLayer, prefix: str) -> None:
    for module, content in zip(stage.modules, layer.contents, strict=True):
        module.update((f"{prefix}{key}", entry.value) for key, entry in content.items())


def _add_tied(
    prefix: str,
    layers: Sequence[OpenedLayer],
    known: Sequence[_Stage],
    found: Sequence[StageModules],
) -> None:
    """Give the copies of a tied module to the stages that have it, in order."""
    owners = [number for number, stage in enumerate(known) if prefix in _tied_prefixes(stage)]
    owners = owners or [0]  # no stage says what it trains
    held: dict[int, list[OpenedLayer]] = {number: [] for number in owners}
    for layer in layers:
        held[_owner_of(layer, prefix, owners, known, held)].append(layer)
    for number, copies in held.items():
        stage = found[number]
        stage.layers += (layer.stored(prefix, number) for layer in copies)
        if not copies:
            names = [name for name in known[number].names if name.startswith(prefix)]
            stage.elsewhere |= {name: _shards_of(name, prefix, layers) for name in names}
            continue
        modules = stage.modules
        stage.modules = tuple(OrderedDictValue() for _ in modules)
        _add(stage, copies[0], prefix)  # before the others, as the module has it
        for module, rest in zip(stage.modules, modules, strict=True):
            module.update(rest)
        for layer in copies[1:]:
            for key, entry in layer.contents[0].items():
                if isinstance(entry.value, StoredTensor):
                    shards = tuple(content.at(key).tensor() for content in layer.contents)
                    stage.copies.setdefault(f"{prefix}{key}", []).append(shards)


def _shards_of(name: str, prefix: str, layers: Sequence[OpenedLayer]) -> tuple[StoredTensor, ...]:
    """A tied weight of each tensor-parallel rank; empty where no layer has it."""
    key = name.removeprefix(prefix)
    for layer in layers:
        entries = [content.get(key) for content in layer.contents]
        found = tuple(
            entry.value for entry in entries if entry and isinstance(entry.value, StoredTensor)
        )
        if len(found) == len(entries):
            return found
    return ()


def _owner_of(
    layer: OpenedLayer,
    prefix: str,
    owners: Sequence[int],
    known: Sequence[_Stage],
    held: Mapping[int, Sequence[OpenedLayer]],
) -> int:
    """The stage that a copy is of: stages are runs of layers, and every one stores its own."""
    this = layer.number
    numbers = [stage.numbers for stage in known]
    low = max((n for n, own in enumerate(numbers) if min(own, default=this) < this), default=0)
    after = (n for n, own in enumerate(numbers) if max(own, default=this) > this)
    high = min(after, default=len(known) - 1)
    fitting = [number for number in owners if _has_module(layer, known[number], prefix)]
    near = [number for number in fitting if low <= number <= high] or fitting
    return next((number for number in near if not held[number]), near[-1])


def _require_all(folder: TagFolder, known: Sequence[_Stage], found: Sequence[StageModules]) -> None:
    """Every trained parameter is in a layer file; a layer without parameters has none."""
    for stage, own in zip(known, found, strict=True):
        for tp, shapes in enumerate(stage.shapes):
            missing = [
                name for name in shapes if name not in own.modules[tp] and name not in own.elsewhere
            ]
            missing += [name for name, held in own.elsewhere.items() if not held]
            if missing:
                raise CorruptError(
                    f"{counted(len(missing), 'parameter')} that {stage.where} names "
                    f"{which(len(missing), 'is', 'are')} in no layer file, the first is "
                    f"{missing[0]!r}",
                    where=str(folder.path),
                    remedy=_remedy(missing[0]),
                )


def _remedy(name: str) -> str:
    number = name.partition(".")[0]
    if number.isdecimal():
        return f"look for layer_{int(number):02d}-*model_states.pt of the same save"
    return "look for the layer_* file of the same save that has the tied module"
