"""ZeRO-0: the optimizer inside the model files, in the form that the engine's class loads.

Which class that is follows from the configuration (deepspeed 0.19.8 `runtime/engine.py`,
`_configure_optimizer`): in fp32 the optimizer itself, in bf16 or fp16 a wrapper; a flat one around
DeepSpeed's own fused Adam, else one that keeps a master copy of every parameter. The wrappers read
what they are given by number, so the order of the groups is that in which the model gives its
parameters to the optimizer.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor, keyed
from restride.errors import UnsupportedError
from restride.formats.deepspeed._loss_scaler import entries_of_scaler
from restride.formats.deepspeed._settings import is_bf16, is_enabled
from restride.formats.deepspeed._writing.folding import expert_folding, expert_places
from restride.formats.deepspeed._writing.groups import require_numbers, scalar_states, states_of
from restride.formats.deepspeed._writing.model import common_entries, expert_entries, module_of
from restride.formats.deepspeed._writing.writing import FP32, WEIGHT, optimizer_key
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.frozen import Frozen
from restride.layouts.lifting import repeated
from restride.layouts.replicated import replicated
from restride.storage.torch_output import FileDraft

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.layout import Shape
    from restride.checkpoint.training import ParameterGroup
    from restride.checkpoint.values import Value
    from restride.formats.deepspeed._writing.experts import Placed
    from restride.formats.deepspeed._writing.writing import Writing
    from restride.storage.torch_output import OutputArray

__all__ = ["write_whole"]

_Kind: TypeAlias = Literal["bare", "unfused", "flat"]
_FUSED_TYPES: Final = frozenset({"adam", "adamw"})
# Settings that DeepSpeed's other classes with a bias correction have, and the fused Adam has not.
_OTHER_CLASSES: Final = frozenset({"amsgrad", "max_coeff"})
_MOST_NAMED: Final = 3


class _Part(Frozen):
    """What one parameter is in the output.

    Attributes:
        arrays: States as large as itself, by name; master weights among them.
        scalars: Numbers, by name.
        holders: Tensor-parallel ranks that have them. DeepSpeed's wrappers leave out what a rank
            has no element of, the optimizer itself does not.
    """

    arrays: Mapping[str, OutputArray]
    scalars: Mapping[str, OutputArray]
    holders: tuple[int, ...]


def write_whole(writing: Writing) -> None:
    """Add the model file of each tensor-parallel rank, with the optimizer in it.

    Raises:
        CoverageError: A layout of the target is not whole.
        UnsupportedError: A state is missing, or is none that such a file can have.
        ExecutionError: The step of a parameter cannot be read.
    """
    kind = _kind(writing)
    weights = {
        name: writing.output.array(selected, writing.layouts[name])
        for name, selected in writing.weights.items()
        if not writing.is_expert(name) and writing.stage is None
    }
    if writing.experts is not None:
        _write_copies(writing, writing.experts, kind, weights)
        return
    parts = _parts(writing, kind)
    for tp in range(writing.target.tp):
        optimizer = _Optimizer(writing, kind, tp, parts, writing.draft(writing.model_name(tp)))
        _add_model(writing, weights, optimizer, tp)
    if kind == "bare":
        writing.findings.extend(_unlisted(writing))


def _write_copies(
    writing: Writing,
    placed: Placed,
    kind: _Kind,
    weights: Mapping[str, OutputArray],
) -> None:
    """Add one optimizer for each expert-parallel rank on each tensor-parallel one.

    The engine looks for its own, ``expp_rank_E_mp_rank_TT_optim_states.pt``, which has all other
    parameters as well (deepspeed 0.19.8 `runtime/engine.py`, `_save_moe_checkpoint`); the model
    files repeat those of the first data-parallel ranks. So the files are ranks here, over which the
    experts are placed and all else is held again and again.
    """
    target = writing.target
    own = expert_places(placed)
    ranks = (*range(target.tp), *own.values())
    files = DeepSpeedTarget(tp=len(ranks), dp=1, zero=0)
    layouts = {
        name: placed.copies(name, ranks, files.tp_mesh)
        if writing.is_expert(name)
        else repeated(layout, files.tp_mesh)
        for name, layout in writing.layouts.items()
    }
    copies = replace(writing, layouts=layouts, target=files)
    parts = _parts(copies, kind)
    for tp in range(target.tp):
        model = FileDraft(writing.model_name(tp))
        _add_model(writing, weights, _Optimizer(copies, kind, tp, parts, model), tp)
    for number, (expert, tp) in enumerate(own, target.tp):
        name = f"expp_rank_{expert}_mp_rank_{tp:02d}_optim_states.pt"
        draft = FileDraft(f"{writing.training.tag}/{name}")
        optimizer = _Optimizer(copies, kind, number, parts, draft)
        folding = expert_folding(placed, expert, tp)
        writing.output.add(draft, {"optimizer": optimizer.state(), **folding})


def _add_model(
    writing: Writing, weights: Mapping[str, OutputArray], optimizer: _Optimizer, tp: int
) -> None:
    """Add the model file of a tensor-parallel rank."""
    draft, rank = optimizer.draft, writing.source_rank(0, tp, dp_size=1)
    made = optimizer.joined(weights)
    for name, array in weights.items():
        if name not in made:
            made[name] = draft.tensor(array, tp)
    entries: dict[Value, Value] = {
        # The weights of a pipeline are in the files of its layers.
        "module": None if writing.stage is not None else module_of(writing, rank, made.__getitem__),
        "param_shapes": None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        **common_entries(writing, rank, tp),
        "shared_params": None,
        "optimizer": optimizer.state(),
        **expert_entries(writing, tp),
    }
    writing.output.add(draft, entries)


def _parts(writing: Writing, kind: _Kind) -> dict[str, _Part]:
    return {
        # A flat buffer has one step, so only the first of a group needs to have it.
        name: _part(writing, name, kind, has_scalars=kind != "flat" or not place)
        for number, group in enumerate(writing.training.groups)
        for place, name in enumerate(_checked(writing, number, group, kind))
    }


def _kind(writing: Writing) -> _Kind:
    """The class of the engine that resumes."""
    if writing.dtype.name == "float32":
        return "bare"
    config = writing.config
    section = config.get("optimizer") if config is not None and config.is_mapping else None
    if section is not None:
        name, params = section.get("type"), section.get("params")
        is_adam = name is not None and name.text().lower() in _FUSED_TYPES
        is_torch = params is not None and is_enabled(params.get("torch_adam"))
        return "flat" if is_adam and not is_torch else "unfused"
    settings = [set(group.settings) for group in writing.training.groups]
    is_fused = all("bias_correction" in own and not own & _OTHER_CLASSES for own in settings)
    return "flat" if is_fused and settings else "unfused"


def _checked(writing: Writing, number: int, group: ParameterGroup, kind: _Kind) -> tuple[str, ...]:
    """Members of a group, whose states have a place in the output."""
    require_numbers(number, group, writing.catalog.root)
    if kind == "flat":  # one buffer and one number for all of the group
        states_of(writing, number, group)
        scalar_states(writing, number, group)
        dtypes = {writing.weights[name].dtype.name for name in group.names}
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"parameter group {number} has weights of {' and '.join(sorted(dtypes))}, and a "
                "flat buffer has one dtype",
                where=writing.catalog.root,
                remedy="resume with an optimizer that is not fused (torch_adam)",
            )
    return group.names


def _part(writing: Writing, name: str, kind: _Kind, *, has_scalars: bool) -> _Part:
    tensor, layout = writing.tensors[name], writing.layouts[name]
    arrays = {} if kind == "bare" else {FP32: writing.state(tensor, FP32, layout)}
    scalars: dict[str, OutputArray] = {}
    ranks = range(writing.target.tp)
    has = {
        "bare": writing.is_held,
        "unfused": writing.is_owned,
        "flat": lambda *_: True,  # the first parameter of a buffer speaks for all of it
    }
    holders = tuple(tp for tp in ranks if has[kind](name, tp))
    for state, entry in tensor.states.items():
        if state in {WEIGHT, FP32}:
            continue
        if entry.layout.full_shape == tensor.layout.full_shape:
            arrays[state] = writing.state(tensor, state, layout)
        elif not entry.layout.full_shape:
            if has_scalars and holders:
                copies = replicated((), mesh={"tp": len(holders)})
                scalars[state] = writing.state(tensor, state, copies)
        else:
            raise UnsupportedError(
                f"state {state!r} has shape {entry.layout.full_shape}, the parameter has shape "
                f"{tensor.layout.full_shape}: how it is cut is not known",
                where=f"tensor {name!r}",
                remedy="convert the weights with --to safetensors",
            )
    return _Part(arrays, scalars, holders)


class _Optimizer:
    """The optimizer of one rank, in a file.

    Attributes:
        draft: The file.
    """

    def __init__(
        self,
        writing: Writing,
        kind: _Kind,
        tp: int,
        parts: Mapping[str, _Part],
        draft: FileDraft,
    ) -> None:
        self._writing = writing
        self._kind = kind
        self._tp = tp
        self._parts = parts
        self._rank = writing.source_rank(0, tp, dp_size=1)
        self.draft = draft

    def joined(self, weights: Mapping[str, OutputArray]) -> dict[str, StoredTensor]:
        """Weights as views of the buffers of their groups, where the class makes them so."""
        made: dict[str, StoredTensor] = {}
        if self._kind == "flat":
            for group in self._writing.training.groups:
                if all(name in weights for name in group.names):
                    made |= dict(self._joined(group, weights))
        return made

    def state(self) -> Value:
        """The state of the optimizer, as its class saves it."""
        groups = self._writing.training.groups
        state: dict[Value, Value] = {}
        settings: list[Value] = []
        masters: list[Value] = []
        first = 0
        for group in groups:
            numbered = [*self._states(group)]
            numbers = range(first, first + len(numbered))
            first += len(numbered)
            state |= {n: own for n, own in zip(numbers, numbered, strict=True) if own}
            settings.append({**keyed(group.settings), "params": [*numbers]})
            masters.append(self._masters(group))
        base: dict[Value, Value] = {"state": state, "param_groups": settings}
        if self._kind == "bare":
            return base
        optimizer = self._writing.training.optimizer
        scale = entries_of_scaler(optimizer, self._steps(), self._writing.catalog.root)
        wrapped: dict[Value, Value] = {"optimizer_state_dict": base}
        if self._kind == "unfused":
            return {**scale, **wrapped, "fp32_groups": masters}
        # The fused wrapper scales no loss in bf16, and says nothing of a scale then.
        return {
            **({} if is_bf16(self._writing.config) else scale),
            **wrapped,
            "fp32_groups_flat": masters,
            "clip_grad": optimizer.get("clip_grad", 0.0),
        }

    def _states(self, group: ParameterGroup) -> Iterator[dict[Value, Value]]:
        """What the optimizer keeps under each number of a group; nothing where it has no state."""
        if self._kind == "flat":
            yield self._flat_state(group)
            return
        listed: Sequence[str] = [*self._writing.members(group, self._tp)]
        trained = {*listed}
        if self._kind == "bare":
            listed = [
                name
                for name in group.listed or group.names
                if self._writing.is_held(name, self._tp)
            ]
            trained = {*group.names}
        for name in listed:
            own: dict[Value, Value] = {}
            if name in trained:
                part = self._parts[name]
                own = {
                    optimizer_key(state): self.draft.tensor(array, part.holders.index(self._tp))
                    for state, array in part.scalars.items()
                }
                own |= {
                    optimizer_key(state): self.draft.tensor(array, self._tp)
                    for state, array in part.arrays.items()
                    if state != FP32
                }
                own |= keyed(group.numbers)
            yield own

    def _flat_state(self, group: ParameterGroup) -> dict[Value, Value]:
        first = self._parts[group.names[0]]
        own: dict[Value, Value] = {
            optimizer_key(state): self.draft.tensor(array, self._tp)
            for state, array in first.scalars.items()
        }
        for state in first.arrays:
            if state != FP32:
                own[optimizer_key(state)] = self._flat(group, state)
        return {**own, **keyed(group.numbers)}

    def _masters(self, group: ParameterGroup) -> Value:
        if self._kind == "bare":
            return None
        if self._kind == "flat":
            return self._flat(group, FP32)
        return [
            self.draft.tensor(self._parts[name].arrays[FP32], self._tp)
            for name in self._writing.members(group, self._tp)
        ]

    def _flat(self, group: ParameterGroup, state: str) -> StoredTensor:
        """A state of all parameters of a group, end to end."""
        arrays = {name: self._parts[name].arrays[state] for name in group.names}
        return self._buffer(group, arrays)[0]

    def _joined(
        self, group: ParameterGroup, weights: Mapping[str, OutputArray]
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Weights as views of the buffer of their group, as the fused wrapper makes them."""
        flat, places = self._buffer(group, weights)
        for name, (start, shape) in places.items():
            strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
            yield name, replace(flat, storage_base=start, shape=shape, strides=strides)

    def _buffer(
        self, group: ParameterGroup, arrays: Mapping[str, OutputArray]
    ) -> tuple[StoredTensor, dict[str, tuple[int, Shape]]]:
        members = self._writing.members(group, self._tp)
        if not members:
            raise UnsupportedError(
                f"a parameter group has no element on tensor-parallel rank {self._tp} of "
                f"{self._writing.target.tp}, and an engine cannot have an empty group",
                remedy="choose fewer tensor-parallel ranks",
            )
        dtype = arrays[next(iter(members))].selected.dtype
        flat = self.draft.buffer(dtype, sum(map(prod, members.values())))
        places: dict[str, tuple[int, Shape]] = {}
        start = 0
        for name, shape in members.items():
            self.draft.put(flat, arrays[name], self._tp, start)
            places[name] = start, shape
            start += prod(shape)
        return flat, places

    def _steps(self) -> int:
        steps = self._rank.values.get("global_steps")
        return steps if type(steps) is int else 0


def _unlisted(writing: Writing) -> Iterator[Finding]:
    """Tell of parameters that the script may have given to the optimizer, or not."""
    groups: Sequence[ParameterGroup] = writing.training.groups
    if all(group.listed is not None for group in groups):
        return
    known = {name for group in groups for name in group.names}
    others = [
        tensor.name
        for tensor in writing.tensors.values()
        if tensor.kind == "parameter" and tensor.name not in known
    ]
    if others:
        shown = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
        message = (
            f"without ZeRO an optimizer in fp32 numbers all parameters that it is given, and "
            f"{len(others)} that are not trained ({shown}) are left out: resume with an optimizer "
            "that is not given them"
        )
        yield Finding("warning", "numbering", message)
