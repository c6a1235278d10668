"""The executor that a user names: what their code raises is told in one sentence, with its line."""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Final

from restride.errors import PlanError, RestrideError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.api import PartExecutor

__all__ = ["open_executor"]

_MOST_SHOWN: Final = 200
_OURS: Final = frozenset({__file__, importlib.__file__, contextlib.__file__})


@contextmanager
def open_executor(name: str | None) -> Iterator[PartExecutor | None]:
    """Make the executor that a user names as ``module:factory``, and close it at the end.

    A module may be in the working directory. The factory is called without arguments; what it
    returns is used in a ``with`` block if it can be.

    Yields:
        The executor; None without a name.

    Raises:
        PlanError: There is no such module, or nothing of that name in it, or it makes no executor,
            or an exception of the user's code ended it.
    """
    if name is None:
        yield None
        return
    module, _, attributes = name.partition(":")
    if not module or not attributes:
        raise PlanError(
            f"--executor {name!r} names nothing to call",
            remedy="write it as MODULE:FUNCTION, such as concurrent.futures:ProcessPoolExecutor",
        )
    executor = _made(module, attributes)
    with ExitStack() as stack:
        if isinstance(executor, AbstractContextManager):
            try:
                executor = stack.enter_context(executor)
            except Exception as error:  # whatever a foreign object raises
                what = f"the {type(executor).__name__} that {attributes} made cannot be used"
                raise _failed(module, attributes, what, error) from error
        if not callable(getattr(executor, "submit", None)):
            raise PlanError(
                f"--executor {name!r} returns {type(executor).__name__}, which has no submit()",
                remedy="name something that returns an executor as of concurrent.futures",
            )
        yield executor


def _made(module: str, attributes: str) -> PartExecutor:
    """What the factory returns."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`, which has it
    try:
        found: object = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a foreign module raises
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise PlanError(
                f"--executor '{module}:{attributes}' cannot be found (no module {error.name!r})",
                remedy="put it into the working directory, or install it",
            ) from error
        raise _failed(module, attributes, "the module cannot be imported", error) from error
    try:
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except AttributeError as error:
        raise PlanError(f"--executor '{module}:{attributes}' cannot be found ({error})") from error
    if callable(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:  # whatever a foreign function raises
            raise _failed(module, attributes, f"{attributes}() failed", error) from error
    return found  # type: ignore[return-value]  # whether it has submit is seen by the caller


def _failed(module: str, attributes: str, what: str, error: BaseException) -> PlanError:
    """The error that says what the user's code raised, and where."""
    text = " ".join(str(error).split())
    shown = f"{text[:_MOST_SHOWN]}..." if len(text) > _MOST_SHOWN else text
    raised = type(error).__name__ + (f": {shown}" if shown else "")
    remedy = f"try it alone: python -c 'import {module}; {module}.{attributes}()'"
    if isinstance(error, RestrideError):
        remedy = ""
    where = _line_of(error)
    at = f", {where}" if where else ""
    return PlanError(f"--executor '{module}:{attributes}': {what} ({raised}{at})", remedy=remedy)


def _line_of(error: BaseException) -> str:
    """The line of the user's file that an exception came through last; empty if through none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _place(error.filename, error.lineno)
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in _OURS
    ]
    # The first one is of the module that was named; it may have called others.
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return _place(own[-1].filename, own[-1].lineno) if own else ""


def _place(path: str, line: int | None) -> str:
    named = path
    if Path(path).is_relative_to(Path.cwd()):
        named = str(Path(path).relative_to(Path.cwd()))
    return f"{named}, line {line}"
