"""Which copy counts where ranks hold different ones, decided for each array by the name it has."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, TypeAlias

from restride.algebra.copies import OWN, as_replicas
from restride.checkpoint.pairs import require_pairs
from restride.errors import PlanError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from restride.algebra.copies import Decision
    from restride.algebra.mesh import Mesh
    from restride.checkpoint.catalog import Catalog, TensorEntry

__all__ = ["DEFAULT", "EVERYTHING", "ReplicaRules", "Saying", "read_rules"]

Saying: TypeAlias = "str | int | Sequence[tuple[str, str | int]]"
"""A decision for everything, or (pattern, decision) rules of which the last that matches counts."""

DEFAULT: Final = "check"
EVERYTHING: Final = "*"
_MOST_NAMED: Final = 3


class ReplicaRules(Frozen):
    """Decisions by pattern.

    Attributes:
        rules: (pattern, decision); the last pattern that matches decides.
        aliases: Other names of tensors, which patterns match as well.
    """

    rules: tuple[tuple[str, Decision], ...]
    aliases: Mapping[str, tuple[str, ...]]

    def decide(self, tensor: str, state: str) -> Decision:
        """Return what holds for one array.

        A pattern with a ``/`` is for ``TENSOR/STATE``, any other for all states of a tensor.
        """
        names = tuple(_names(tensor, self.aliases.get(tensor, ()), (state,)))
        for pattern, decision in reversed(self.rules):
            if _matches(pattern, names):
                return decision
        return DEFAULT


def read_rules(said: Saying, catalog: Catalog) -> ReplicaRules:
    """Understand what is said of replicas for the arrays of a checkpoint.

    Args:
        said: One decision, as `as_replicas` takes it or ``"own"``, or rules (pattern, decision). In
            a pattern ``*`` stands for anything, ``?`` for one character and ``[ab]`` for one of
            these. Numbers of ranks count on the mesh of the checkpoint.
        catalog: The checkpoint.

    Raises:
        PlanError: A decision is none, there is no such rank, or a pattern matches nothing.
    """
    pairs: Sequence[tuple[str, str | int]] = (
        [(EVERYTHING, said)]
        if isinstance(said, str | int)
        else require_pairs("replicas", said, ("*.bias", "mean"))
    )
    rules = tuple((pattern, _as_decision(decision, catalog.mesh)) for pattern, decision in pairs)
    for pattern, _ in rules:
        _require_used(pattern, catalog.tensors)
    aliases = {tensor.name: tensor.aliases for tensor in catalog.tensors if tensor.aliases}
    return ReplicaRules(rules, aliases)


def _as_decision(said: str | int, mesh: Mesh) -> Decision:
    return "own" if said == OWN else as_replicas(said, mesh, also=(OWN,))


def _require_used(pattern: str, tensors: Sequence[TensorEntry]) -> None:
    if pattern == EVERYTHING:
        return
    if not any(
        _matches(pattern, tuple(_names(tensor.name, tensor.aliases, tuple(tensor.states))))
        for tensor in tensors
    ):
        some = ", ".join(tensor.name for tensor in tensors[:_MOST_NAMED])
        states = dict.fromkeys(state for tensor in tensors for state in tensor.states)
        of_states = f"; states here are {', '.join(states)}" if "/" in pattern else ""
        raise PlanError(
            f"no tensor of {len(tensors)} has a name like {pattern!r}, to decide its copies",
            remedy=f"names here are {some}{', ...' if len(tensors) > _MOST_NAMED else ''}"
            f"{of_states}",
        )


def _names(tensor: str, aliases: Sequence[str], states: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for name in (tensor, *aliases):
        yield (name, *(f"{name}/{state}" for state in states))


def _matches(pattern: str, names: Sequence[Sequence[str]]) -> bool:
    return any(
        fnmatchcase(spelled, pattern)
        for name, *keys in names
        for spelled in (keys if "/" in pattern else (name,))
    )
