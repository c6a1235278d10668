"""Groups of experts of several numbers of ranks, put into one order.

DeepSpeed splits every parameter group by the number of ranks that experts are on, in the order of a
set of names, which is another one in every process that hashes otherwise (deepspeed 0.19.8
`moe/utils.py`, `split_params_into_different_moe_groups_for_optimizer`). What is of one number is in
the same order everywhere, and each file says of its own groups which number they are of. So they
can be told apart; here all files get the order of the first model file.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.errors import CorruptError
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from restride.formats.deepspeed._fields import Field
    from restride.formats.deepspeed._model import ModelFile, Shapes
    from restride.formats.deepspeed._optimizer import ZeroFile
    from restride.formats.deepspeed._whole.file import WholeFile

__all__ = ["alike", "in_one_order", "said_rank_counts", "said_size", "same_order"]

_GROUP_NAME: Final = re.compile(r"ep_size_([1-9]\d{0,5})")


def said_size(group: Field) -> int | None:
    """Expert-parallel ranks that a parameter group says its experts are on; None of others."""
    name, flag = group.get("name"), group.get("moe")
    if name is None or flag is None or flag.value is not True or not isinstance(name.value, str):
        return None
    match = _GROUP_NAME.fullmatch(name.value)
    return int(match[1]) if match else None


def said_rank_counts(groups: Iterable[Field]) -> tuple[int, ...]:
    """The numbers of ranks that parameter groups say experts are on, each once."""
    return tuple(sorted({size for group in groups if (size := said_size(group)) is not None}))


def in_one_order(
    models: tuple[ModelFile, ...], zeros: dict[tuple[int, int], ZeroFile]
) -> tuple[tuple[ModelFile, ...], dict[tuple[int, int], ZeroFile]]:
    """Files that have the groups of experts in the order of the first model file.

    Args:
        models: Model files. Those of ZeRO-3 have parts of groups, and no experts of this kind.
        zeros: Optimizer files, by rank.

    Raises:
        CorruptError: Files contradict each other.
    """
    sizes = {place: [said_size(g) for g in zero.param_groups] for place, zero in zeros.items()}
    if len({size for own in sizes.values() for size in own} - {None}) <= 1:
        return models, zeros
    shapes = models[0].param_shapes or ()
    order = [_size_of(members, zeros.values(), models[0].name) for members in shapes]
    ordered = {
        place: _reordered(zero, same_order(order, sizes[place], zero.name))
        for place, zero in zeros.items()
    }
    return tuple(_like(model, shapes) for model in models), ordered


def alike(files: Sequence[WholeFile]) -> list[WholeFile]:
    """Optimizers without ZeRO, with their groups in the order of the first of them.

    Raises:
        CorruptError: One has other groups.
    """
    sizes = [[said_size(group) for group in file.settings] for file in files]
    orders = [same_order(sizes[0], own, file.where) for file, own in zip(files, sizes, strict=True)]
    return [
        replace(
            file,
            groups=tuple(
                tuple(replace(entry, group=place) for entry in file.groups[number])
                for place, number in enumerate(order)
            ),
            settings=tuple(file.settings[number] for number in order),
            names=tuple(file.names[number] for number in order),
        )
        if order != sorted(order)
        else file
        for file, order in zip(files, orders, strict=True)
    ]


def same_order(wanted: Sequence[int | None], has: Sequence[int | None], where: str) -> list[int]:
    """The places of some groups in the order of others: the first of a size is the first of it.

    Args:
        wanted: The size of each group, in the order to come.
        has: The same in the order that there is.
        where: File, for errors.

    Raises:
        CorruptError: There are more groups of a size than there should be, or fewer.

    Examples:
        >>> same_order([None, 2, 4, 4], [None, 4, 4, 2], "file")
        [0, 3, 1, 2]
    """
    if Counter(wanted) != Counter(has):
        size = next(size for size in (*wanted, *has) if wanted.count(size) != has.count(size))
        of = "other parameters" if size is None else f"experts on {counted(size, 'rank')}"
        raise CorruptError(
            f"has {counted(has.count(size), 'parameter group')} of {of}, the first model file has "
            f"{wanted.count(size)}",
            where=where,
        )
    places = {size: [n for n, own in enumerate(has) if own == size] for size in {*has}}
    return [places[size].pop(0) for size in wanted]


def _size_of(members: Shapes, zeros: Iterable[ZeroFile], where: str) -> int | None:
    """What the optimizer files say of the size of the group that has some members."""
    said = {
        said_size(group)
        for zero in zeros
        for group, flat in zip(zero.param_groups, zero.groups, strict=False)
        if any(name in members for name in flat.fragments or ())
    }
    if len(said) > 1:
        raise CorruptError(
            f"optimizer files say of the group of {next(iter(members))!r} that its experts are on "
            f"{' and on '.join(sorted(map(str, said)))} ranks",
            where=where,
            remedy="put only the files of one save into the folder",
        )
    return next(iter(said), None)


def _reordered(zero: ZeroFile, order: Sequence[int]) -> ZeroFile:
    return replace(
        zero,
        groups=tuple(zero.groups[n] for n in order),
        param_groups=tuple(zero.param_groups[n] for n in order),
    )


def _like(model: ModelFile, shapes: Sequence[Mapping[str, object]]) -> ModelFile:
    """A model file with its groups in the order of others that have the same members."""
    own = {tuple(group): group for group in model.param_shapes or ()}
    keys = [tuple(group) for group in shapes]
    if {*own} != {*keys} or len(keys) != len(own):
        return model  # what is not alike is found where it is read
    return replace(model, param_shapes=tuple(own[key] for key in keys))
