"""Where the layers of a pipeline are, as far as its files say it.

A file has the number of its layer. Functions between the layers have no file, and neither has a
layer that uses a tied module through a function: of that, a checkpoint says on which stage it is,
by the parameters that the stage trains, and not which layer it is.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final

from restride.checkpoint.orders import merged_order
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from restride.checkpoint.training import Pipeline

__all__ = ["TIED", "KnownLayers", "tied_prefix"]

TIED: Final = "tied_modules."
"""What the names of tied modules begin with."""

_MOST_NAMED: Final = 4


def tied_prefix(name: str) -> str | None:
    """What the names of a tied module begin with, or None for a name of another layer."""
    if not name.startswith(TIED):
        return None
    return f"{TIED}{name.removeprefix(TIED).partition('.')[0]}."


class KnownLayers:
    """The layers of a source, and which of its stages they are on.

    Args:
        pipeline: The source.
        told: For the key of a tied module, all layers that use it.
        where: The checkpoint, for errors.

    Raises:
        UnsupportedError: What is told is not so.
    """

    def __init__(self, pipeline: Pipeline, told: Mapping[str, tuple[int, ...]], where: str) -> None:
        self.pipeline = pipeline
        self._where = where
        self._files = {layer.number: layer for layer in pipeline.layers}
        self._holders = self._find_holders()
        self._told = {f"{TIED}{key}.": numbers for key, numbers in told.items()}
        for prefix, numbers in self._told.items():
            self._require_so(prefix, numbers)

    @cached_property
    def count(self) -> int:
        """Layers up to the last one that has a file or is told."""
        numbers = [*self._files, *(n for told in self._told.values() for n in told)]
        return 1 + max(numbers, default=0)

    @property
    def tied(self) -> tuple[str, ...]:
        """What the names of each tied module begin with, in the order of the source."""
        return tuple(self._holders)

    @property
    def untold(self) -> tuple[str, ...]:
        """Tied modules of which it was not told which layers use them."""
        return tuple(prefix for prefix in self._holders if prefix not in self._told)

    def uses(self, prefix: str) -> tuple[int, ...]:
        """Layers that are known to use a tied module."""
        return self._told.get(prefix) or self._stored(prefix)

    def stages_with(
        self, prefix: str, stage_of: Callable[[int], int], beyond: int
    ) -> frozenset[int]:
        """Which stages of another cut have a tied module.

        Args:
            prefix: What its names begin with.
            stage_of: The stage of each layer.
            beyond: A layer from which on all are on the last stage.

        Raises:
            UnsupportedError: It may be used on a stage, or not.
        """
        sure = {stage_of(number) for number in self.uses(prefix)}
        if prefix in self._told:
            return frozenset(sure)
        hidden = self._hidden(prefix, beyond)
        stored = self._stored(prefix)
        for stage, numbers in hidden.items():
            new = {stage_of(number) for number in numbers}
            is_hidden = not any(self._may_have(stage, number) for number in stored)
            if is_hidden and len(new) == 1:
                sure |= new
        for numbers in hidden.values():
            unsure = [number for number in numbers if stage_of(number) not in sure]
            if unsure:
                raise self.untold_error(prefix, unsure[0])
        return frozenset(sure)

    def hidden_uses(self, prefix: str, beyond: int) -> tuple[int, ...]:
        """Layers without a file that may use a tied module; `beyond` as for `stages_with`."""
        return tuple(chain.from_iterable(self._hidden(prefix, beyond).values()))

    def _hidden(self, prefix: str, beyond: int) -> dict[int, list[int]]:
        """The same for each stage of the source that has the module."""
        if prefix in self._told:
            return {}
        end = max(self.count, beyond) + 1
        return {stage: self._gaps(stage, end) for stage in self._holders[prefix]}

    def untold_error(self, prefix: str, number: int | None = None) -> UnsupportedError:
        """Nothing says which layers without a file are tied."""
        key = prefix.removeprefix(TIED).rstrip(".")
        known = ",".join(map(str, self._stored(prefix))) or "0"
        which = "" if number is None else f", and it may be layer {number}"
        return UnsupportedError(
            f"a layer that uses the tied module {key!r} through a function has no file{which}: "
            "nothing says which of the new stages have the module",
            where=self._where,
            remedy=f"name all layers that use it, those with a file and others, as --pp-tied "
            f"{key}={known},{self.count}",
        )

    def _stored(self, prefix: str) -> tuple[int, ...]:
        return tuple(layer.number for layer in self.pipeline.layers if layer.prefix == prefix)

    def _find_holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that have each tied module; modules in the order of their first stage."""
        found: dict[str, list[int]] = {}
        for number, stage in enumerate(self.pipeline.stages):
            # A frozen module is among what was given to the optimizer alone.
            given = [group.listed or group.names for group in stage.groups]
            orders = [[*dict.fromkeys(filter(None, map(tied_prefix, own)))] for own in given]
            own = [layer.prefix for layer in self.pipeline.layers if layer.stage == number]
            names = [prefix for name in stage.names if (prefix := tied_prefix(name))]
            names += [prefix for prefix in own if prefix.startswith(TIED)]
            for prefix in dict.fromkeys([*merged_order(orders, names), *names]):
                found.setdefault(prefix, []).append(number)
        return {prefix: tuple(stages) for prefix, stages in found.items()}

    def _gaps(self, stage: int, end: int) -> list[int]:
        """Layers without a file that may be on a stage of the source."""
        low, high = self._reach(stage)
        stop = end if high is None else high
        return [number for number in range(low, stop) if number not in self._files]

    def _reach(self, stage: int) -> tuple[int, int | None]:
        """The first layer that a stage of the source may have, and the first that it has not."""
        own = [
            (layer.stage, layer.number)
            for layer in self.pipeline.layers
            if layer.keys and not layer.prefix.startswith(TIED)
        ]
        low = max((number + 1 for other, number in own if other < stage), default=0)
        high = min((number for other, number in own if other > stage), default=None)
        return low, high

    def _require_so(self, prefix: str, numbers: Sequence[int]) -> None:
        """Hold what is told of a tied module against the files and the stages."""
        key = prefix.removeprefix(TIED).rstrip(".")
        holders = self._holders.get(prefix)
        if holders is None:
            known = [other.removeprefix(TIED).rstrip(".") for other in self._holders]
            raise UnsupportedError(
                f"no stage has a tied module {key!r}",
                where=self._where,
                remedy=f"tied modules here are {', '.join(known[:_MOST_NAMED]) or 'none'}",
            )
        problems = [*self._problems(prefix, numbers, holders)]
        if problems:
            raise UnsupportedError(
                f"the layers {', '.join(map(str, numbers))} are not those that are tied to "
                f"{key!r}: {problems[0]}",
                where=self._where,
                remedy="name all layers that use it, by their place in the list that "
                "PipelineModule is given",
            )

    def _problems(
        self, prefix: str, numbers: Sequence[int], holders: Sequence[int]
    ) -> Iterator[str]:
        for number in self._stored(prefix):
            if number not in numbers:
                yield f"layer {number} has a file with that module, and is not among them"
        for number in numbers:
            layer = self._files.get(number)
            if layer is not None and layer.prefix != prefix:
                yield f"layer {number} has a file, which is not of that module"
            elif not any(self._may_have(stage, number) for stage in holders):
                yield f"layer {number} is on no stage of the source that has that module"
        for stage in holders:
            if not any(self._may_have(stage, number) for number in numbers):
                yield f"stage {stage} of the source has that module, and none of them"

    def _may_have(self, stage: int, number: int) -> bool:
        low, high = self._reach(stage)
        return low <= number and (high is None or number < high)
