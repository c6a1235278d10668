"""The layers of a pipeline of which there are no files: what a universal folder tells of them.

Its model files name what every stage trains, with the numbers of layers in the names. So layers
that train something are known, and those that share a module are once it is told which they are. A
layer that has neither parameters nor buffers gets a file with nothing in it, whether it is a
module, which an engine opens a file for, or a function, for which it looks for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.checkpoint.training import Pipeline, PipelineLayer, PipelineStage
from restride.errors import UnsupportedError
from restride.formats.deepspeed._pipeline.known_layers import TIED, tied_prefix
from restride.wording import counted, which

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.checkpoint.training import ParameterGroup
    from restride.formats.deepspeed._run import Run
    from restride.formats.deepspeed.stage_cut import StageCut

__all__ = ["completed_layers", "described_pipeline"]

# Of names that begin with more digits, none is that of a layer.
_LONGEST_NUMBER = 6


def described_pipeline(
    run: Run, groups: Sequence[ParameterGroup], parameters: Iterable[str]
) -> Pipeline:
    """Tell the layers and stages of a pipeline by the names of what it trains.

    Args:
        run: The model files of all stages.
        groups: Parameter groups over all stages.
        parameters: All parameters, frozen ones among them.
    """
    tp_size = run.tp_size // run.stage_count
    stages: list[PipelineStage] = []
    firsts: list[int] = []
    for pipe in range(run.stage_count):
        models = run.models[pipe * tp_size :][:tp_size]
        own = dict.fromkeys(
            name for model in models for group in model.param_shapes or () for name in group
        )
        stages.append(PipelineStage(tuple(own), tuple(_held(groups, own))))
        numbers = [number for name in own if (number := _number(name)) is not None]
        firsts.append(min(numbers, default=firsts[-1] if firsts else 0))
    keys: dict[int, list[str]] = {}
    for name in parameters:
        number = _number(name)
        if number is not None:
            keys.setdefault(number, []).append(name.partition(".")[2])
    layers = tuple(
        PipelineLayer(number, f"{number}.", tuple(keys[number]), _stage_of(number, firsts))
        for number in sorted(keys)
    )
    buffers = sorted({name for model in run.models for name in model.buffer_names})
    return Pipeline(layers, tuple(stages), is_described=True, lost=tuple(buffers))


def completed_layers(pipeline: Pipeline, cut: StageCut, where: str) -> Pipeline:
    """Add the layers that train nothing of their own: tied ones as told, and all that is between.

    Args:
        pipeline: What `described_pipeline` gave.
        cut: What is told of it.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: It had buffers, which are in no file; or it was not told which layers use
            a tied module; or a stage lacks a parameter group.
    """
    if pipeline.lost:
        raise UnsupportedError(
            f"is a universal folder of a pipeline, and {counted(len(pipeline.lost), 'buffer')} of "
            f"its layers, such as {pipeline.lost[0]!r}, "
            f"{which(len(pipeline.lost), 'is', 'are')} in no file of it",
            where=where,
            remedy="convert the sharded checkpoint that it was made of, or resume from the "
            "universal folder itself: it fits pipelines of any stages",
        )
    names = dict.fromkeys(name for stage in pipeline.stages for name in stage.names)
    tied = {prefix: _keys_of(prefix, names) for name in names if (prefix := tied_prefix(name))}
    told = {f"{TIED}{key}.": numbers for key, numbers in cut.tied.items()}
    firsts = [
        min((layer.number for layer in pipeline.layers if layer.stage == number), default=0)
        for number in range(len(pipeline.stages))
    ]
    known = {layer.number: layer for layer in pipeline.layers}
    for prefix, keys in tied.items():
        if prefix not in told:
            key = prefix.removeprefix(TIED).rstrip(".")
            raise UnsupportedError(
                f"is a universal folder of a pipeline, without the files of its layers: nothing "
                f"says which of them use the tied module {key!r}",
                where=where,
                remedy=f"name all of them, as --pp-tied {key}=0,{max(known, default=0) + 1}",
            )
        for number in told[prefix]:
            stage = _stage_of(number, firsts)
            known.setdefault(number, PipelineLayer(number, prefix, keys, stage))
    count = max(1 + max(known, default=0), cut.layer_count or 0)
    for number in range(count):
        empty = PipelineLayer(number, f"{number}.", (), _stage_of(number, firsts))
        known.setdefault(number, empty)
    return replace(pipeline, layers=tuple(known[number] for number in sorted(known)))


def _held(groups: Iterable[ParameterGroup], own: Mapping[str, None]) -> Iterable[ParameterGroup]:
    for group in groups:
        names = tuple(name for name in group.names if name in own)
        if names:
            yield replace(group, names=names)


def _keys_of(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _number(name: str) -> int | None:
    first, dot, _ = name.partition(".")
    is_number = dot and first.isdecimal() and len(first) <= _LONGEST_NUMBER
    return int(first) if is_number else None


def _stage_of(number: int, firsts: Sequence[int]) -> int:
    """The last stage that begins with this layer or an earlier one."""
    return max((stage for stage, first in enumerate(firsts) if first <= number), default=0)
