"""A slow writer of pipelines without ZeRO: the oracle for what their numbers and buffers are.

It does what `PipelineModule` and the three classes of DeepSpeed 0.19.8 do that save an optimizer
without ZeRO: layers are dealt out to stages, tied modules are first on each that uses them, and
the optimizer of a stage numbers what a script gave it, or joins it end to end. One pipeline can be
written on any stages, so that what is converted from one cut to another has to be what is written.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from restride.checkpoint.values import OrderedDictValue
from restride.frozen import Frozen
from restride.testing.saved_values import Array, save_file
from restride.testing.zero_files import Parameter, ZeroRun, box_map, shard_of, stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hypothesis.strategies import DrawFn

    from restride.testing.whole_files import WholeKind
    from restride.testing.zero_files import Cut

__all__ = ["Layer", "WholePipeline", "cuts", "whole_pipelines", "write_whole_pipeline"]

# Of numbers in fp32 nothing but the shapes tells an order that is not the module's.
Order: TypeAlias = Literal["module", "reversed", "sorted", "muon"]

_CONFIGS: Final[Mapping[WholeKind, dict[str, Any]]] = {
    "bare": {},
    "unfused": {"fp16": {"enabled": True}, "optimizer": {"type": "Lamb"}},
    "flat": {"fp16": {"enabled": True}, "optimizer": {"type": "Adam"}},
}


class Layer(Frozen):
    """A layer of a pipeline.

    Attributes:
        parameters: By name inside the layer; those of a tied layer are of its module.
        frozen: Which of them are.
        key: Of the module that it shares with others, or empty.
        has_file: Whether it is a module; a function is none, also one that uses a tied module.
        buffers: Names of its buffers.
    """

    parameters: Mapping[str, Parameter]
    frozen: frozenset[str] = frozenset()
    key: str = ""
    has_file: bool = True
    buffers: tuple[str, ...] = ()


class WholePipeline(Frozen, dict=True):
    """What is to be written.

    Attributes:
        layers: All layers.
        starts: The first layer of each stage.
        kind: Which class writes.
        tp: Tensor-parallel ranks.
        rates: The learning rate of each parameter group.
        order: In which order a script gives the parameters of a group to the optimizer. Muon has
            the first group, and sorts what it is given by the shapes of the shards.
        gives_frozen: Whether it gives frozen parameters to it as well.
        drift: How far the copies of a tied module are apart on neighbouring stages.
    """

    layers: tuple[Layer, ...]
    starts: tuple[int, ...]
    kind: WholeKind
    tp: int = 1
    rates: tuple[float, ...] = (0.5,)
    order: Order = "module"
    gives_frozen: bool = False
    drift: float = 0.0

    @cached_property
    def run(self) -> ZeroRun:
        """The parameters of all stages, as one run."""
        named = {name: own for stage in self.stages for name, own in self.named(stage).items()}
        return ZeroRun(1, self.tp, named)

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """The layers of each tied module."""
        found: dict[str, tuple[int, ...]] = {}
        for number, layer in enumerate(self.layers):
            if layer.key:
                found[layer.key] = (*found.get(layer.key, ()), number)
        return found

    @property
    def stages(self) -> range:
        """The stages."""
        return range(len(self.starts))

    @property
    def frozen(self) -> frozenset[str]:
        """Names of all frozen parameters."""
        return frozenset(
            f"{self.prefix(number)}{name}"
            for number, layer in enumerate(self.layers)
            for name in layer.frozen
        )

    def prefix(self, number: int) -> str:
        """What the names of a layer's parameters begin with."""
        key = self.layers[number].key
        return f"tied_modules.{key}." if key else f"{number}."

    def numbers(self, stage: int) -> range:
        """The layers of a stage."""
        stops = (*self.starts[1:], len(self.layers))
        return range(self.starts[stage], stops[stage])

    def named(self, stage: int) -> dict[str, Parameter]:
        """The parameters of a stage's module, in its order: tied modules first, each once."""
        own = sorted(self.numbers(stage), key=lambda number: not self.layers[number].key)
        return {
            f"{self.prefix(number)}{name}": parameter
            for number in own
            for name, parameter in self.layers[number].parameters.items()
        }

    def groups(self, stage: int, tp: int) -> Iterator[tuple[float, list[str]]]:
        """The groups of a stage's optimizer as it is made, without those that are empty."""
        names = [*self.named(stage)]
        if self.order == "reversed":
            names.reverse()
        elif self.order == "sorted":
            names.sort()
        given = [name for name in names if self.gives_frozen or name not in self.frozen]
        for number, rate in enumerate(self.rates):
            own = [name for name in given if self.run.parameters[name].group == number]
            if self.is_muon(number):
                shards = {name: shard_of(self.run, name, "weight", tp).shape for name in own}
                own.sort(key=shards.__getitem__, reverse=True)
            numbered = [name for name in own if self.is_numbered(name, tp)]
            if own and (numbered or self.kind != "flat"):  # nothing can be joined to a buffer
                yield rate, numbered

    def is_muon(self, group: int) -> bool:
        """Whether Muon updates a group."""
        return self.order == "muon" and group == 0

    def shard(self, name: str, state: str, stage: int, tp: int) -> Any:
        """What a tensor-parallel rank of a stage has of a state."""
        shard = shard_of(self.run, name, "fp32" if state == "weight" else state, tp)
        if name.startswith("tied_modules."):
            shard = (shard * np.float32(1 + stage * self.drift)).astype(np.float32)
        return shard.astype(self.run.parameters[name].states[state].dtype)

    def is_numbered(self, name: str, tp: int) -> bool:
        """Whether a parameter that was given has a number: wrappers leave some out."""
        if self.kind == "bare":
            return True
        return name not in self.frozen and shard_of(self.run, name, "weight", tp).size > 0


def write_whole_pipeline(folder: Path, pipeline: WholePipeline) -> None:
    """Write a checkpoint with one tag."""
    tag = folder / "step"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("step")
    for tp in range(pipeline.tp):
        rank = f"-model_{tp:02d}" if pipeline.tp > 1 else ""
        for number, layer in enumerate(pipeline.layers):
            if layer.has_file:
                content = _content(pipeline, number, layer, tp)
                save_file(tag / f"layer_{number:02d}{rank}-model_states.pt", content)
        for stage in pipeline.stages:
            mp = stage * pipeline.tp + tp
            save_file(tag / f"mp_rank_{mp:02d}_model_states.pt", _file(pipeline, stage, tp))


def _content(pipeline: WholePipeline, number: int, layer: Layer, tp: int) -> Any:
    content: Any = OrderedDictValue()
    stage = max(stage for stage in pipeline.stages if pipeline.starts[stage] <= number)
    for name in layer.parameters:
        full = f"{pipeline.prefix(number)}{name}"
        content[name] = stored(pipeline.shard(full, "weight", stage, tp))
    for name in layer.buffers:
        content[name] = Array("int64", (2,), bytes(16))
    return content


def _file(pipeline: WholePipeline, stage: int, tp: int) -> dict[str, Any]:
    names = pipeline.run.parameters
    maps = {f"^{name.replace('.', chr(92) + '.')}$": box_map(pipeline.run, name) for name in names}
    info: dict[str, Any] = {"affine_map": {"version": 1, "params": maps}}
    buffers = [
        f"{pipeline.prefix(number)}{name}"
        for number in pipeline.numbers(stage)
        for name in pipeline.layers[number].buffers
    ]
    return {
        "module": None,
        "buffer_names": [*dict.fromkeys(buffers)],
        "optimizer": _optimizer(pipeline, stage, tp),
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "global_steps": 2,
        "dp_world_size": 1,
        "mp_world_size": pipeline.tp * len(pipeline.starts),
        "checkpoint_parallel_dimensions": {
            "pp_degree": len(pipeline.starts),
            "tp_degree": pipeline.tp,
        },
        "ds_config": {"zero_optimization": {"stage": 0}, **_CONFIGS[pipeline.kind]},
        **({"universal_checkpoint_info": info} if pipeline.tp > 1 else {}),
    }


def _optimizer(pipeline: WholePipeline, stage: int, tp: int) -> dict[str, Any]:
    state: dict[int, Any] = {}
    settings: list[Any] = []
    masters: list[Any] = []
    for rate, names in pipeline.groups(stage, tp):
        buffers = [names] if pipeline.kind == "flat" else [[name] for name in names]
        first = sum(len(own["params"]) for own in settings)
        for number, own in enumerate(buffers, first):
            if not pipeline.frozen.issuperset(own) and any(
                shard_of(pipeline.run, name, "weight", tp).size for name in own
            ):
                moment = _part(pipeline, own, "exp_avg", stage, tp)
                step = Array("float32", (), np.float32(2).tobytes())
                is_muon = pipeline.is_muon(pipeline.run.parameters[own[0]].group)
                state[number] = (
                    {"momentum_buffer": moment} if is_muon else {"step": step, "exp_avg": moment}
                )
        entry: dict[str, Any] = {"lr": rate, "params": [*range(first, first + len(buffers))]}
        if pipeline.order == "muon":
            entry["use_muon"] = rate == pipeline.rates[0]
        settings.append(entry)
        masters.append([_part(pipeline, own, "fp32", stage, tp) for own in buffers])
    base = {"state": state, "param_groups": settings}
    if pipeline.kind == "bare":
        return base
    scale: dict[str, Any] = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 2}
    if pipeline.kind == "unfused":
        return {**scale, "optimizer_state_dict": base, "fp32_groups": masters}
    flat = [own[0] for own in masters]
    wrapped = {"optimizer_state_dict": base, "fp32_groups_flat": flat, "clip_grad": 0.0}
    return {**scale, **wrapped}


def _part(pipeline: WholePipeline, names: Sequence[str], state: str, stage: int, tp: int) -> Array:
    shards = [pipeline.shard(name, state, stage, tp) for name in names]
    if pipeline.kind != "flat":
        return stored(shards[0].astype(np.float32))
    joined = np.concatenate([shard.ravel() for shard in shards])
    return Array("float32", (prod(joined.shape),), joined.astype(np.float32).tobytes())


# Names and shapes of the parameters of a layer. Most look like those of another one.
_KINDS: Final[tuple[dict[str, tuple[int, ...]], ...]] = (
    {"weight": (5, 3)},
    {"weight": (3,), "bias": (3,)},
    {"up": (4, 3), "norm": (3,), "down": (3, 4)},
    {"weight": (3,)},
    {"weight": (3, 3), "bias": (3,)},
    {"empty": (0, 3), "bias": (3,)},
    {"scale": (1,), "weight": (12,)},
    {},
)


@st.composite
def whole_pipelines(draw: DrawFn, *, kinds: Sequence[WholeKind]) -> WholePipeline:
    """Draw a pipeline of up to 7 layers, of which some are tied, frozen, or like others.

    Args:
        draw: Of the strategy.
        kinds: Which classes may write.
    """
    kind = draw(st.sampled_from(kinds))
    count = draw(st.integers(1, 7))
    tp = draw(st.sampled_from([1, 1, 2]))
    groups = draw(st.sampled_from(["one", "one", "by dimensions", "any"]))
    modules: dict[str, Layer] = {}
    layers: list[Layer] = []
    for number in range(count):
        what = draw(st.integers(-1, len(_KINDS) - 1))
        key = draw(st.sampled_from(["", "", "", "a", "b"]))
        if what < 0 or (key and key not in modules and not _KINDS[what]):
            layers.append(Layer({}, has_file=False))
            continue
        layer = modules.get(key)
        if layer is None:
            layer = draw(_layers(_KINDS[what], number, kind, tp, groups))
            layer = replace(layer, key=key)
        elif draw(st.booleans()):
            layer = replace(layer, has_file=False)
        if key:
            modules.setdefault(key, layer)
        layers.append(layer)
    rates = draw(st.sampled_from([(0.5, 0.25), (0.5, 0.5)])) if groups != "one" else (0.5,)
    orders: tuple[Order, ...] = ("module", "module", "module", "reversed", "sorted")
    if kind == "bare":
        orders = ("module",)
    if groups == "by dimensions" and rates == (0.5, 0.25) and kind != "flat":
        orders = (*orders, "muon")
    return WholePipeline(
        tuple(layers),
        draw(cuts(count)),
        kind,
        tp,
        rates,
        draw(st.sampled_from(orders)),
        draw(st.booleans()),
    )


@st.composite
def cuts(draw: DrawFn, count: int) -> tuple[int, ...]:
    """Draw the first layers of up to three stages."""
    more = draw(st.sets(st.integers(1, count - 1), max_size=2)) if count > 1 else ()
    return (0, *sorted(more))


@st.composite
def _layers(
    draw: DrawFn,
    shapes: Mapping[str, tuple[int, ...]],
    number: int,
    kind: WholeKind,
    tp: int,
    groups: str,
) -> Layer:
    parameters: dict[str, Parameter] = {}
    for place, (name, shape) in enumerate(shapes.items()):
        group = {"one": 0, "by dimensions": len(shape) == 1}.get(groups)
        parameters[name] = Parameter(
            shape,
            _states(shape, 100 * number + place, kind, draw(st.sampled_from(_VALUES))),
            _CUTS.get(shape) if tp > 1 else None,
            draw(st.integers(0, 1)) if group is None else int(group),
        )
    frozen = draw(st.sets(st.sampled_from([*shapes]), max_size=2)) if shapes else set()
    is_frozen = draw(st.sampled_from([False, False, True]))
    buffers = draw(st.sampled_from([(), (), ("positions",)]))
    return Layer(parameters, frozenset(frozen if is_frozen else ()), buffers=buffers)


# What weights are: drawn, or what they were initialised with.
_VALUES: Final = ("any", "any", "any", "any", "ones", "zeros")
_CUTS: Final[Mapping[tuple[int, ...], Cut]] = {(4, 3): (0, (3, 1)), (3, 4): (1, (3, 1))}


def _states(shape: tuple[int, ...], seed: int, kind: WholeKind, values: str) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    drawn = {state: numbers.normal(size=shape).astype(np.float32) for state in ("fp32", "exp_avg")}
    if values != "any":
        drawn["fp32"] = np.full(shape, values == "ones", np.float32)
    dtype = np.float32 if kind == "bare" else np.float16
    return {"weight": drawn["fp32"].astype(dtype), **drawn}
