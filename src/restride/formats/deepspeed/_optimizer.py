"""One ``zero_pp_rank_D_mp_rank_TT_optim_states.pt``: the flat partitions of one rank.

Three classes of DeepSpeed write it. The ZeRO-1/2 optimizer (with a ``zero_stage``) cuts the padding
at the end off the fp32 partition, and keeps it on the optimizer's own states unless
``elastic_checkpoint`` is on. BF16_Optimizer (without ``zero_stage``) cuts nothing. The ZeRO-3
optimizer cuts every parameter by itself, and splits large parameter groups into sub-groups: one
flat partition each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.values import Constructed, StoredTensor
from restride.errors import CorruptError, FormatError, UnsupportedError
from restride.formats.deepspeed._fields import Field
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from restride.algebra.layout import Shape

__all__ = [
    "CONSUMED_KEYS",
    "FLAT_FP32",
    "FLAT_SUB_GROUPS",
    "Group",
    "ZeroFile",
    "read_zero_file",
    "unsaid_widths",
]

CONSUMED_KEYS: Final = frozenset(
    {
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
        "universal_checkpoint_info",
        "optimizer_state_dict",
        "fp32_flat_groups",
        "ds_zero_partition_groups",
    }
)
"""Keys of the optimizer's dict that become tensors and layouts; all others are carried."""

FLAT_FP32: Final = "single_partition_of_fp32_groups"
FLAT_SUB_GROUPS: Final = "fp32_flat_groups"
_PADDINGS: Final = "group_paddings"
_PARTITIONED_WEIGHTS: Final = 3
_STEP: Final = "step"
_MOMENTUM: Final = "momentum_buffer"  # of one element, where Muon keeps it whole


class Group(Frozen):
    """The partition of one parameter group on one rank; of one sub-group under ZeRO-3.

    Attributes:
        arrays: Flat tensors by state: the master weights as ``fp32``, and the optimizer's own.
        scalars: Tensors without a dimension, such as ``step``, which hold for the whole group.
        others: Entries of the optimizer state that are neither.
        partition_numel: Elements of the partition, padding included.
        padding_numel: Elements of padding that the file says are at its end.
        partition_count: Number of ranks that share the group; None where it is not said.
        partition_ranks: Those ranks, in the order of the partitions; None where it is not said.
        alignment: Padding after each parameter of the group, in flat order; None where none is.
        fragments: (numel, start in the partition) by parameter; None in old files.
        where: File and group, for errors.
    """

    arrays: Mapping[str, StoredTensor]
    scalars: Mapping[str, StoredTensor]
    others: Mapping[str, Field]
    partition_numel: int
    padding_numel: int
    partition_count: int | None
    alignment: tuple[int, ...] | None
    fragments: Mapping[str, tuple[int, int]] | None
    where: str
    partition_ranks: tuple[int, ...] | None = None


class ZeroFile(Frozen):
    """What the optimizer file of one (dp, tp) rank says.

    Attributes:
        name: Name of the file below the root of the checkpoint.
        dp: Data-parallel rank, from the name.
        tp: Tensor-parallel rank, from the name.
        root: Everything in the file.
        state: The optimizer's dict in it.
        stage: ZeRO stage, where it is said.
        groups: Partitions of the parameter groups, or of their sub-groups.
        param_groups: Hyperparameters of the parameter groups, where they are stored.
        parents: For each partition the number of its parameter group.
    """

    name: str
    dp: int
    tp: int
    root: Field
    state: Field
    stage: int | None
    groups: tuple[Group, ...]
    param_groups: tuple[Field, ...]
    parents: tuple[int, ...]

    @property
    def is_partitioned(self) -> bool:
        """Whether it is of ZeRO-3: every parameter is cut by itself."""
        return self.stage == _PARTITIONED_WEIGHTS

    @property
    def rank_name(self) -> str:
        """The rank, for errors."""
        return _rank_name(self.dp, self.tp)


def unsaid_widths(roots: Iterable[Field]) -> tuple[int, ...]:
    """Return the elements of the partition of each group, where files do not say what they cut off.

    That is what most is left of on any rank: the padding is at the end of the last partitions.
    Nothing says how much it was in files from before ``group_paddings`` (deepspeed 0.6).

    Args:
        roots: The content of all files of one model-parallel rank.

    Raises:
        FormatError: A part of a file has another type than it must have.
        CorruptError: Parts of a file contradict each other.
    """
    widths: list[int] = []
    for root in roots:
        state = _state_of(root)
        stage = _stage(state.get("zero_stage"))
        if stage in {None, _PARTITIONED_WEIGHTS} or state.get(_PADDINGS) is not None:
            return ()
        flats = state.at(FLAT_FP32).elements()
        own, _ = _own_states(state.at("base_optimizer_state"), len(flats))
        widths += [0] * (len(flats) - len(widths))
        for number, (flat, states) in enumerate(zip(flats, own, strict=True)):
            stored = [flat.value, *(entry.value for _, entry in (states.items() if states else ()))]
            shapes = (value.shape for value in stored if isinstance(value, StoredTensor))
            widths[number] = max(widths[number], *(s[0] for s in shapes if len(s) == 1), 0)
    return tuple(widths)


def read_zero_file(
    root: Field, name: str, dp: int, tp: int, widths: Sequence[int] = ()
) -> ZeroFile:
    """Read the inert content of an optimizer file.

    Args:
        root: The content.
        name: Name of the file.
        dp: Data-parallel rank.
        tp: Tensor-parallel rank.
        widths: What `unsaid_widths` found.

    Raises:
        FormatError: It is none, or a part of it has another type than it must have.
        CorruptError: Parts of it contradict each other.
    """
    state = _state_of(root)
    stage = _stage(state.get("zero_stage"))
    if stage == _PARTITIONED_WEIGHTS:
        flats = state.at(FLAT_SUB_GROUPS).elements()
        own, hyper, parents = _sub_group_states(state.at("optimizer_state_dict"), len(flats))
    else:
        flats = state.at(FLAT_FP32).elements()
        own, hyper = _own_states(state.at("base_optimizer_state"), len(flats))
        parents = tuple(range(len(flats)))
    places = [f"{flat.where} ({_rank_name(dp, tp)})" for flat in flats]
    if stage == _PARTITIONED_WEIGHTS:
        groups = tuple(
            _read_sub_group(state, number, flat, own[number], places[number])
            for number, flat in enumerate(flats)
        )
    else:
        groups = tuple(
            _read_group(
                state,
                number,
                flat,
                own[number],
                is_lean=stage is not None,
                width=widths[number] if number < len(widths) else 0,
                where=places[number],
            )
            for number, flat in enumerate(flats)
        )
    return ZeroFile(name, dp, tp, root, state, stage, groups, hyper, parents)


def _state_of(root: Field) -> Field:
    if not root.is_mapping:
        raise root.wrong("the dict of an optimizer file")
    return root.at("optimizer_state_dict")


def _stage(stored: Field | None) -> int | None:
    """An enum member is pickled as its class called with its value."""
    if stored is None:
        return None
    if isinstance(stored.value, Constructed) and len(stored.value.args) == 1:
        return Field(stored.value.args[0], stored.where).integer()
    return stored.integer()


def _own_states(base: Field, count: int) -> tuple[list[Field | None], tuple[Field, ...]]:
    """State of the wrapped optimizer for each group, None before the first step."""
    if base.is_sequence:  # elastic: one dict per group, with the padding cut off
        listed = base.elements()
        if len(listed) != count:
            raise CorruptError(
                f"has {counted(len(listed), 'group')}, {FLAT_FP32} has {count}", where=base.where
            )
        return list(listed), ()
    hyper = base.at("param_groups").elements()
    if len(hyper) != count:
        raise CorruptError(
            f"has {len(hyper)} param_groups, {FLAT_FP32} has {count}", where=base.where
        )
    states = dict(base.at("state").numbered())
    own: list[Field | None] = []
    for entry in hyper:
        numbers = entry.at("params").integers()
        if len(numbers) != 1:
            raise FormatError(
                f"has {len(numbers)} parameters, the flat partition of a group is one",
                where=f"{entry.where}['params']",
            )
        own.append(states.pop(numbers[0], None))
    if states:
        raise CorruptError(
            f"has states of parameters {sorted(states)[:8]}, which no group has", where=base.where
        )
    return own, hyper


def _sub_group_states(
    base: Field, count: int
) -> tuple[list[Field | None], tuple[Field, ...], tuple[int, ...]]:
    """State of the wrapped optimizer for each sub-group, the parameter groups, and whose each is.

    The optimizer's parameters are the partitions of the sub-groups, numbered from group to group.
    """
    hyper = base.at("param_groups").elements()
    numbers = [entry.at("params").integers() for entry in hyper]
    if [number for own in numbers for number in own] != list(range(count)):
        raise CorruptError(
            f"numbers the sub-groups {[list(own) for own in numbers][:8]}, {FLAT_SUB_GROUPS} has "
            f"{count}",
            where=f"{base.where}['param_groups']",
        )
    states = dict(base.at("state").numbered())
    own_states = [states.pop(number, None) for number in range(count)]
    if states:
        raise CorruptError(
            f"has states of sub-groups {sorted(states)[:8]}, which are not there", where=base.where
        )
    parents = tuple(number for number, own in enumerate(numbers) for _ in own)
    return own_states, hyper, parents


def _rank_name(dp: int, tp: int) -> str:
    return f"dp rank {dp}, tp rank {tp}"


def _read_group(
    state: Field,
    number: int,
    flat: Field,
    own: Field | None,
    *,
    is_lean: bool,
    width: int,
    where: str,
) -> Group:
    padding = _per_group(state, _PADDINGS, number)
    master_numel = _flat_numel(flat)
    padding_numel = padding.integer() if padding else max(width - master_numel, 0)
    partition_numel = master_numel + padding_numel if is_lean else master_numel
    arrays, scalars, others = _sorted_states(flat, own, {partition_numel, master_numel})
    count = _per_group(state, "partition_count", number)
    alignment = _per_group(state, "param_alignment_paddings", number)
    return Group(
        arrays,
        scalars,
        others,
        partition_numel,
        padding_numel,
        count.integer(at_least=1) if count else None,
        alignment.integers() if alignment else None,
        _fragments(_per_group(state, "param_slice_mappings", number)),
        where,
    )


def _read_sub_group(state: Field, number: int, flat: Field, own: Field | None, where: str) -> Group:
    numel = _flat_numel(flat)
    arrays, scalars, others = _sorted_states(flat, own, {numel})
    listed = state.get("ds_zero_partition_groups")  # only where groups of ranks differ
    said = _per_group(state, "ds_zero_partition_groups", number) if listed else None
    count = said.at("partition_count") if said else state.get("partition_count")
    return Group(
        arrays,
        scalars,
        others,
        numel,
        0,
        count.integer(at_least=1) if count else None,
        None,
        None,
        where,
        said.at("partition_ranks").integers() if said else None,
    )


def _sorted_states(
    flat: Field, own: Field | None, numels: Collection[int]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, Field]]:
    """Tell flat partitions, scalars of the whole group, and everything else apart."""
    arrays, scalars, others = {"fp32": flat.tensor()}, {}, {}
    for stored_key, entry in own.items() if own else ():
        # Our own two names mean the weights; no optimizer calls a state so, but a file may.
        key = f"optimizer_{stored_key}" if stored_key in {"fp32", "weight"} else stored_key
        value = entry.value
        if not isinstance(value, StoredTensor):
            others[key] = entry
        elif not value.shape or _is_number(key, value.shape, numels):
            scalars[key] = replace(value, shape=(), strides=())
        elif len(value.shape) == 1 and value.shape[0] in numels:
            _flat_numel(entry)
            arrays[key] = value
        else:
            others[key] = entry
    return arrays, scalars, others


def _is_number(key: str, shape: Shape, numels: Collection[int]) -> bool:
    """Whether a state is one number in a list: an engine that loads elastic files makes it so."""
    if shape != (1,) or key == _MOMENTUM:
        return False
    return key == _STEP or 1 not in numels


def _per_group(state: Field, key: str, number: int) -> Field | None:
    """Entry of one group in a list; old files have one number for all groups."""
    stored = state.get(key)
    if stored is None or not stored.is_sequence:
        return stored
    listed = stored.elements()
    if number >= len(listed):
        raise CorruptError(f"has {len(listed)} groups, there are more", where=stored.where)
    return listed[number]


def _flat_numel(stored: Field) -> int:
    tensor = stored.tensor()
    if len(tensor.shape) != 1:
        raise stored.wrong("a flat tensor")
    if tensor.shape[0] > 1 and tensor.strides != (1,):
        raise UnsupportedError(
            f"is a flat partition with stride {tensor.strides[0]}", where=stored.where
        )
    return tensor.shape[0]


def _fragments(stored: Field | None) -> dict[str, tuple[int, int]] | None:
    if stored is None:
        return None
    fragments = {
        name: (entry.attribute("numel").integer(), entry.attribute("start").integer())
        for name, entry in stored.items()
    }
    return {name: fragment for name, fragment in fragments.items() if fragment[0]}
