"""Which of several processes this one is: as the user says, or as torchrun or Slurm say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click

from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Process", "as_process", "process_of"]

_PART: Final = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_NUMBER: Final = re.compile(r"\d{1,10}", re.ASCII)
# Above it are the steps that are no `srun`: the shell of a batch script, an interactive one.
_MOST_STEPS: Final = 0xFFFF_0000


class Process(Frozen):
    """One of several.

    Attributes:
        number: Its number, from 0.
        count: How many there are.
        told_by: What says so.
    """

    number: int
    count: int
    told_by: str

    @property
    def words(self) -> str:
        """What it is called in front of errors."""
        return f"process {self.number} of {self.count}"


def process_of(environment: Mapping[str, str]) -> Process:
    """Which process this one is, by its environment; number 0 of 1 where nothing says anything.

    ``RANK`` and ``WORLD_SIZE`` are those of torchrun. In a job of Slurm that has several tasks, a
    command of the batch script is one process all the same: only those that ``srun`` started, in a
    step, are several.

    Examples:
        >>> process_of({"RANK": "1", "WORLD_SIZE": "4"})
        Process(number=1, count=4, told_by='RANK and WORLD_SIZE')
        >>> process_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}).count
        1
    """
    rank, size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is not None and size is not None and rank < size:
        return Process(rank, size, "RANK and WORLD_SIZE")
    step, rank = (_slurm_step(environment), _number(environment, "SLURM_PROCID"))
    if step and rank is not None:
        name, size = step
        if rank < size:
            return Process(rank, size, f"SLURM_PROCID and {name}")
    return Process(0, 1, "")


def as_process(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    """Callback of an option that is a number and a count, such as ``0/4``.

    Raises:
        click.BadParameter: The text is something else.
    """
    if text is None:
        return None
    found = _PART.fullmatch(text)
    if found is None or not int(found[1]) < int(found[2]):
        raise click.BadParameter(
            f"{text!r} is no process N/M, counted from 0, such as 0/4 to 3/4",
            ctx=context,
            param=parameter,
        )
    return int(found[1]), int(found[2])


def _slurm_step(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """How many tasks the step has that this process is in, and what says so."""
    step = _number(environment, "SLURM_STEP_ID")
    if step is None:
        step = _number(environment, "SLURM_STEPID")
    if step is None or step >= _MOST_STEPS:
        return None
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        count = _number(environment, name)
        if count is not None:
            return name, count
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else None
