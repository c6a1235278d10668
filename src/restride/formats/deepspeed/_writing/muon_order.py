"""The order of the parameters in Muon's groups, which follows from how they are cut.

DeepSpeed's Muon sorts the parameters of a group by their shapes, the largest first, and leaves what
is of one shape in the order in which it was given (deepspeed 0.19.8
`runtime/zero/muon/original_muon.py`). The shapes are those of the shards: an engine with other
tensor-parallel ranks has the same parameters in another order, and takes what it reads for theirs.
Under `zero.Init` all shapes are empty when it sorts, and the order is as given. An engine of ZeRO-3
does not notice values of one parameter in the place of another: where the two orders differ and
neither the source nor the user says which one it has, nothing is written.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from restride.checkpoint.catalog import Finding
from restride.errors import UnsupportedError
from restride.formats.deepspeed._momentum import trains_by_muon
from restride.formats.deepspeed._settings import optimizer_type
from restride.formats.deepspeed._writing.writing import config_of
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.algebra.layout import Layout, Shape
    from restride.checkpoint.catalog import TensorEntry
    from restride.checkpoint.training import ParameterGroup, Training
    from restride.formats.deepspeed.target import DeepSpeedTarget

__all__ = ["in_muon_order"]

_PARTITIONED_WEIGHTS: Final = 3
_MUON: Final = "muon"


def in_muon_order(
    training: Training,
    tensors: Mapping[str, TensorEntry],
    layouts: Mapping[str, Layout],
    *,
    target: DeepSpeedTarget,
    source: str,
) -> tuple[Training, tuple[Finding, ...]]:
    """Put the parameters of Muon's groups in the order that the engine of a target has.

    Args:
        training: The source's.
        tensors: Tensors of the source by name.
        layouts: How the ranks of the target cut each tensor.
        target: What is written for.
        source: Format of the source, which ends in its ZeRO stage.

    Returns:
        The training, and what the engine that resumes must not do otherwise.

    Raises:
        UnsupportedError: The order cannot be told.
    """
    places = {name: place for place, name in enumerate(training.order)}
    is_own_class = optimizer_type(config_of(training)) == _MUON
    findings: list[Finding] = []
    groups: list[ParameterGroup] = []
    for number, group in enumerate(training.groups):
        if not trains_by_muon(group) or not all(n in tensors and n in layouts for n in group.names):
            groups.append(group)
            continue
        order = _Order(
            f"parameter group {number}",
            group.names,
            {name: _sizes(tensors[name].layout) for name in group.names},
            {name: _sizes(layouts[name]) for name in group.names},
        )
        by_model = sorted(group.names, key=lambda name: places.get(name, len(places)))
        if target.zero == _PARTITIONED_WEIGHTS:
            said = target.zero_init
            shown = _shown_by(source, order, by_model) if said is None else said
            names, notes = order.of_partitioned(by_model, zero_init=shown)
            findings += [note for note in notes if note not in findings]
        elif order.is_sorted:
            names = order.sorted_again(by_model)
        else:
            names = order.sorted_first(is_own_class=is_own_class)
        listed = names if group.listed and {*group.listed} == {*names} else group.listed
        groups.append(replace(group, names=names, listed=listed))
    return replace(training, groups=tuple(groups)), tuple(findings)


def _shown_by(source: str, order: _Order, by_model: Sequence[str]) -> bool | None:
    """Whether the source was made under `zero.Init`, where its order tells."""
    if not source.endswith(f"zero-{_PARTITIONED_WEIGHTS}"):
        return None
    if not order.is_sorted:
        return True
    return None if list(order.names) == list(by_model) else False


class _Order(Frozen):
    """The parameters of one group, and how large their shards are.

    Attributes:
        where: The group, for errors.
        names: In the order of the source.
        source: Shapes of the shards on the ranks of the source.
        target: The same on those of the target.
    """

    where: str
    names: tuple[str, ...]
    source: Mapping[str, tuple[Shape, ...]]
    target: Mapping[str, tuple[Shape, ...]]

    @property
    def is_sorted(self) -> bool:
        """Whether every rank of the source has what it holds by size."""
        return self._is_of_source(self.names)

    def of_partitioned(
        self, by_model: Sequence[str], *, zero_init: bool | None
    ) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
        """Order the parameters for an engine of ZeRO-3.

        Args:
            by_model: The names in the order of the model.
            zero_init: Whether its model is made under `zero.Init`; None where nobody knows.

        Raises:
            UnsupportedError: That decides, and nobody knows; or the order cannot be told.
        """
        was_sorted = self.is_sorted
        given = tuple(by_model) if was_sorted else self.names
        by_size = self._for_target(given)
        is_told = not was_sorted or self._is_of_source(by_model)
        if is_told and given == by_size:
            return given, ()
        if zero_init is None:
            raise UnsupportedError(
                f"{self.where} is updated by Muon, and an engine of ZeRO-3 has its parameters in "
                "another order if its model is made under deepspeed.zero.Init, as transformers and "
                "Accelerate do; it would mix them up without a word",
                remedy="say --zero-init or --no-zero-init",
            )
        if not zero_init:
            names = self.sorted_again(by_model) if was_sorted else by_size
            return names, (_note("by their sizes", "is not made"),)
        if not is_told:
            raise UnsupportedError(
                f"{self.where} is updated by Muon, which sorts by size, and was given in another "
                "order than the model's, which an engine under deepspeed.zero.Init would keep: it "
                "is not known",
                remedy="resume without deepspeed.zero.Init, and say --no-zero-init",
            )
        return given, (_note("as the model has them", "is made"),)

    def sorted_again(self, by_model: Sequence[str]) -> tuple[str, ...]:
        """Sort what was sorted before: the order of the model tells what is of one size now.

        Raises:
            UnsupportedError: The script gave the parameters in another order than the model's.
        """
        if self._is_of_source(by_model):
            return self._for_target(by_model)
        names = self._for_target(self.names)
        for first, second in pairwise(names):
            if self.target[first] == self.target[second] and (
                self.source[first] != self.source[second]
            ):
                raise UnsupportedError(
                    f"{self.where} is updated by Muon, which sorts by size, and was given in "
                    f"another order than the model's: whether {first!r} or {second!r} comes first "
                    f"among shards of {self.target[first][0]} is not known",
                    remedy="choose as many tensor-parallel ranks as the source has",
                )
        return names

    def sorted_first(self, *, is_own_class: bool) -> tuple[str, ...]:
        """Sort what the source did not: under `zero.Init` it is in the order as given.

        Args:
            is_own_class: Whether the optimizer is DeepSpeed's Muon: others may never sort.

        Raises:
            UnsupportedError: That is not known.
        """
        names = self._for_target(self.names)
        if names != self.names and not is_own_class:
            raise UnsupportedError(
                f"{self.where} is updated by Muon and not in the order of sizes; whether the "
                "optimizer of the engine that resumes sorts is not known: ds_config does not say "
                "that it is DeepSpeed's",
                remedy="choose --zero 3",
            )
        return names

    def _is_of_source(self, given: Sequence[str]) -> bool:
        """Whether the source has what it has if Muon was given the names in this order."""
        ranks = range(len(self.source[self.names[0]]) if self.names else 0)
        return all(
            self._held(_sorted(given, self.source, rank), rank) == self._held(self.names, rank)
            for rank in ranks
        )

    def _held(self, names: Sequence[str], rank: int) -> list[str]:
        """Names of what a rank of the source has an element of; stages of a pipeline differ."""
        return [name for name in names if prod(self.source[name][rank])]

    def _for_target(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names by their sizes on the target, on which all ranks must agree."""
        ranks = range(len(self.target[self.names[0]]) if self.names else 0)
        found = {_sorted(names, self.target, rank) for rank in ranks}
        if len(found) > 1:
            raise UnsupportedError(
                f"{self.where} is updated by Muon, which sorts by size, and its shards are of "
                f"different sizes on the {len(ranks)} ranks that cut it: they would have "
                "different orders",
                remedy="choose ranks that divide the parameters evenly",
            )
        return found.pop() if found else tuple(names)


def _note(order: str, is_made: str) -> Finding:
    message = (
        f"the parameters that Muon updates are written {order}: resume with a model that {is_made} "
        "under deepspeed.zero.Init, or the engine mixes them up without a word"
    )
    return Finding("warning", "muon-order", message)


def _sorted(
    names: Sequence[str], sizes: Mapping[str, tuple[Shape, ...]], rank: int
) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: sizes[name][rank], reverse=True))


def _sizes(layout: Layout) -> tuple[Shape, ...]:
    return tuple(layout.shard_shape(rank) for rank in range(layout.rank_count))
