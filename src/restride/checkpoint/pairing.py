"""Find the arrays of two catalogs that have the same name, or would have it after renaming."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from restride.checkpoint.pairs import require_pairs
from restride.errors import PlanError
from restride.frozen import Frozen
from restride.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from restride.checkpoint.catalog import Catalog, StateEntry, TensorEntry
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.selection import States

__all__ = ["Array", "Pair", "arrays_of", "pair_arrays", "tensors_by_name"]


class Array(Frozen):
    """One array of a catalog, as it is looked at.

    Attributes:
        entry: Where it is.
        dtype: Type that it is read in: the stored one, but for a weight that is stored nowhere.
    """

    entry: StateEntry
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full array."""
        return self.entry.layout.full_shape


class Pair(Frozen):
    """One array that two catalogs have.

    Attributes:
        names: Name of the tensor in each.
        state: Name of the state.
        a: Where the first has it.
        b: Where the second has it.
    """

    names: tuple[str, str]
    state: str
    a: Array
    b: Array

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the full array."""
        return self.a.shape, self.b.shape

    @property
    def dtypes(self) -> tuple[str, str]:
        """Names of the dtypes."""
        return self.a.dtype.name, self.b.dtype.name


def pair_arrays(
    a: Catalog, b: Catalog, states: States, rename: Sequence[tuple[str, str]]
) -> tuple[list[Pair], tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    r"""Match the arrays of two catalogs by name; tied names are names too.

    Args:
        a: The first catalog.
        b: The second one.
        states: Only the weights, or every state.
        rename: Rules (OLD, NEW) for the names of `a`. The first rule whose regular expression OLD
            matches a whole name replaces that name by NEW, in which ``\1`` is the first group.

    Returns:
        The pairs, and the (tensor, state) that only `a` and only `b` have.

    Raises:
        PlanError: A rule is no regular expression, matches no name, or gives two tensors one name.
    """
    renamed = _renamed(a, rename)
    by_name = tensors_by_name(b)
    pairs: list[Pair] = []
    only_a: list[tuple[str, str]] = []
    seen: dict[str, set[str]] = {}
    for tensor in a.tensors:
        names = [renamed[name] for name in (tensor.name, *tensor.aliases)]
        others = {by_name[name].name: by_name[name] for name in names if name in by_name}
        ours = arrays_of(tensor, states)
        if not others:
            only_a.extend((tensor.name, state) for state in ours)
        for place, other in enumerate(others.values()):
            theirs = arrays_of(other, states)
            both = [state for state in ours if state in theirs]
            seen.setdefault(other.name, set()).update(both)
            pairs.extend(
                Pair((tensor.name, other.name), state, ours[state], theirs[state]) for state in both
            )
            # A second name of the tensor need not have states of its own.
            if not place:
                only_a.extend((tensor.name, state) for state in ours if state not in theirs)
    only_b = [
        (other.name, state)
        for other in b.tensors
        for state in arrays_of(other, states)
        if state not in seen.get(other.name, set())
    ]
    return pairs, tuple(only_a), tuple(only_b)


def _renamed(catalog: Catalog, rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The new name of each name of a catalog."""
    patterns = [
        (_pattern(old), old, new) for old, new in require_pairs("rename", rules, ("old", "new"))
    ]
    unused = {old for _, old, _ in patterns}
    result: dict[str, str] = {}
    owners: dict[str, str] = {}
    for tensor in catalog.tensors:
        for name in (tensor.name, *tensor.aliases):
            result[name] = name
            for pattern, old, new in patterns:
                match = pattern.fullmatch(name)
                if match:
                    unused.discard(old)
                    result[name] = _expanded(match, old, new)
                    break
        owner = owners.setdefault(result[tensor.name], tensor.name)
        if owner != tensor.name:
            raise PlanError(
                f"the rules give {result[tensor.name]!r} to {owner!r} and to {tensor.name!r}",
                remedy="make OLD match fewer names, or NEW keep what tells them apart",
            )
    if unused:
        raise PlanError(
            f"no tensor has a name that '{min(unused)}' matches as a whole",
            remedy="a rule is OLD=NEW, OLD a regular expression for whole names of the first one",
        )
    return result


def _pattern(old: str) -> re.Pattern[str]:
    try:
        return re.compile(old)
    except re.error as error:
        raise PlanError(
            f"'{old}' is no regular expression ({error})",
            remedy="put a backslash before signs that stand for themselves",
        ) from None


def _expanded(match: re.Match[str], old: str, new: str) -> str:
    try:
        return match.expand(new)
    except (re.error, IndexError) as error:
        raise PlanError(
            f"'{new}' cannot replace what '{old}' matches ({error})",
            remedy=f"'{old}' has {counted(match.re.groups, 'group')}: \\1 is the first",
        ) from None


def tensors_by_name(catalog: Catalog) -> dict[str, TensorEntry]:
    """Tensors by name and tied name; a tensor's own name comes first."""
    tied = {alias: tensor for tensor in catalog.tensors for alias in tensor.aliases}
    return tied | {tensor.name: tensor for tensor in catalog.tensors}


def arrays_of(tensor: TensorEntry, states: States) -> dict[str, Array]:
    """The arrays to look at: of every state, or the weight alone.

    Where ZeRO-3 stores no weight, it is the master copy rounded to the type of the training: what
    the engine computes with, what `select_weights` writes, and what other stages store.
    """
    arrays = {state: Array(entry, entry.dtype) for state, entry in tensor.states.items()}
    if "weight" not in arrays and "fp32" in arrays and tensor.trained_dtype is not None:
        arrays = {"weight": Array(tensor.states["fp32"], tensor.trained_dtype), **arrays}
    return {s: array for s, array in arrays.items() if states == "all" or s == "weight"}
