"""Every exception can cross a process boundary, and says what it is for."""

from __future__ import annotations

import inspect
import pickle

import pytest

from restride import errors
from restride.errors import (
    BudgetError,
    CoverageError,
    MissingProcessError,
    ReplicaError,
    RestrideError,
)

CLASSES = [getattr(errors, name) for name in errors.__all__]
FIELDS = {
    BudgetError: {"needed_nbytes": 7, "budget_nbytes": 3},
    CoverageError: {"verdict": ("a", "verdict")},
    MissingProcessError: {"missing": (1, 3)},
    ReplicaError: {"ranks": (0, 1), "different_numel": 5, "largest": 0.25},
}


def make(cls: type[RestrideError]) -> RestrideError:
    fields = FIELDS.get(cls, {})
    if cls is BudgetError:
        return cls(**fields, where="here")
    return cls("it broke", where="here", remedy="mend it", **fields)


def test_all_exceptions_are_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, RestrideError)
    }

    assert defined == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_exception_survives_pickling_with_its_fields_and_its_place(
    cls: type[RestrideError],
) -> None:
    error = make(cls).located("rank 3")

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.where == "rank 3: here"


@pytest.mark.parametrize("cls", CLASSES)
def test_an_exception_is_documented_with_each_of_its_fields(cls: type[RestrideError]) -> None:
    text = cls.__dict__.get("__doc__")

    assert text
    for field in FIELDS.get(cls, {}):
        assert f"{field}:" in text


@pytest.mark.parametrize("cls", CLASSES[:])
def test_an_exception_reads_as_one_sentence(cls: type[RestrideError]) -> None:
    text = str(make(cls))

    assert text.startswith("here: ")
    assert "\n" not in text
    assert not text.endswith(".")


def test_every_family_can_also_be_caught_as_a_standard_error() -> None:
    for cls in CLASSES:
        if cls is not RestrideError:
            assert issubclass(cls, ValueError | OSError), cls
