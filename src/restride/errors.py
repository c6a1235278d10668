"""Every exception that restride raises on purpose.

It imports nothing but words, so any layer may raise.

All of them read ``<where>: <what is wrong with the numbers>; <what would work>``. The place grows
on the way up: the algebra knows a piece and an element, the checkpoint layer adds the tensor and
the rank, a format adds the file. Each layer adds what it knows with `RestrideError.located`.
"""

from __future__ import annotations

from typing import Self

from restride.wording import enough_size, told_apart

__all__ = [
    "BudgetError",
    "CorruptError",
    "CoverageError",
    "ExecutionError",
    "ExistsError",
    "FormatError",
    "LayoutError",
    "MissingProcessError",
    "PlanError",
    "ReplicaError",
    "RestrideError",
    "RuleError",
    "ShapeMismatchError",
    "StoppedError",
    "UnsupportedError",
]


class RestrideError(Exception):
    """Base class of all errors that restride raises on purpose.

    Attributes:
        problem: What is wrong, with the numbers.
        where: The place, outermost first, such as ``"model.pt: tensor 'wte'"``; may be empty.
        remedy: What would work; may be empty.
    """

    def __init__(self, problem: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        prefix = f"{self.where}: " if self.where else ""
        suffix = f"; {self.remedy}" if self.remedy else ""
        return f"{prefix}{self.problem}{suffix}"

    def located(self, where: str) -> Self:
        """Put `where` in front of the place that is already known, and return the error itself."""
        self.where = f"{where}: {self.where}" if self.where else where
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # An exception with keyword-only fields cannot be unpickled by default, and would kill a
        # process pool instead of reporting.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    cls: type[RestrideError], args: tuple[object, ...], fields: dict[str, object]
) -> RestrideError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error


class LayoutError(RestrideError, ValueError):
    """A mesh, piece or layout breaks an invariant, or a builder was given nonsense."""


class RuleError(LayoutError):
    """A partition rule refuses this shape, mesh or head count, as the framework's own does."""


class ShapeMismatchError(LayoutError):
    """Two things that must describe the same tensor have different shapes."""


class CoverageError(LayoutError):
    """A layout leaves a hole or writes a shard address twice.

    Attributes:
        verdict: The witness that `prove` returned.
    """

    def __init__(self, problem: str, *, verdict: object, where: str = "", remedy: str = "") -> None:
        super().__init__(problem, where=where, remedy=remedy)
        self.verdict = verdict


class FormatError(RestrideError, ValueError):
    """A file is not what its format says: the reader refuses it."""


class CorruptError(FormatError):
    """A file is damaged or was built to mislead: truncated, overlapping, lying about itself."""


class UnsupportedError(RestrideError, ValueError):
    """The input is valid, but this version cannot do what was asked. Never means corrupt."""


class PlanError(RestrideError, ValueError):
    """No plan exists for what was asked."""


class BudgetError(PlanError):
    """The plan cannot be executed inside the memory budget.

    Attributes:
        needed_nbytes: Smallest budget, in bytes, that would be enough.
        budget_nbytes: Budget, in bytes, that the caller gave.
    """

    def __init__(self, *, needed_nbytes: int, budget_nbytes: int, where: str = "") -> None:
        budget, needed = told_apart(budget_nbytes, needed_nbytes)
        super().__init__(
            f"a budget of {budget} of memory is below the {needed} needed",
            where=where,
            remedy=f"raise it: --memory {enough_size(needed_nbytes)} or more",
        )
        self.needed_nbytes = needed_nbytes
        self.budget_nbytes = budget_nbytes


class ReplicaError(RestrideError, ValueError):
    """Ranks that should hold the same elements hold different ones.

    Attributes:
        ranks: The ranks that were compared, sorted.
        different_numel: How many elements differ.
        largest: Largest absolute difference, or None where the dtype has none.
        first_index: Lowest flat index in the full tensor that differs, where it is known.
    """

    def __init__(
        self,
        problem: str,
        *,
        ranks: tuple[int, ...],
        different_numel: int,
        largest: float | None,
        first_index: int | None = None,
        where: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(problem, where=where, remedy=remedy)
        self.ranks = ranks
        self.different_numel = different_numel
        self.largest = largest
        self.first_index = first_index


class ExecutionError(RestrideError, OSError):
    """Reading or writing failed while a plan was carried out."""


class MissingProcessError(ExecutionError):
    """Several processes have to write one output, and some did not come, or ended before.

    Attributes:
        missing: Their numbers.
    """

    def __init__(
        self, problem: str, *, missing: tuple[int, ...], where: str = "", remedy: str = ""
    ) -> None:
        super().__init__(problem, where=where, remedy=remedy)
        self.missing = missing


class StoppedError(RestrideError, InterruptedError):
    """The work was asked to stop, and did so at the end of a step."""


class ExistsError(RestrideError, FileExistsError):
    """The output already exists, and nothing is overwritten without being asked."""
