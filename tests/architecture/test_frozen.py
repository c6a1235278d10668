"""What every value can rely on, since its class is a `Frozen`."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import restride
from restride.algebra.piece import Axis, Piece
from restride.errors import LayoutError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from nowhere import Unknown

PIECE = Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))


class Named(Frozen):
    name: str
    other: Unknown | None = None


class NamedAlike(Frozen):
    name: str
    other: Unknown | None = None


def test_a_value_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        PIECE.full_base = 3
    with pytest.raises(AttributeError):
        del PIECE.full_base


def test_values_are_equal_by_class_and_fields() -> None:
    assert Named("a") == Named("a", None)
    assert hash(Named("a")) == hash(Named("a", None))
    assert Named("a") != Named("b")
    assert Named("a") != NamedAlike("a")


def test_a_changed_copy_is_checked_like_a_new_value() -> None:
    assert replace(PIECE, full_base=3).full_base == 3
    with pytest.raises(LayoutError):
        replace(PIECE.axes[0], extent=1)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))],  # noqa: S301 - ours
)
def test_a_copy_is_equal(copied) -> None:
    assert copied(PIECE) == PIECE
    assert hash(copied(PIECE)) == hash(PIECE)


def test_a_signature_is_as_it_is_written_and_names_need_not_be_there() -> None:
    assert str(inspect.signature(Named)) == "(name: 'str', other: 'Unknown | None' = None) -> None"


def test_a_field_of_the_class_above_is_in_the_signature() -> None:
    class Below(Named):
        number: int = 3

    assert list(inspect.signature(Below).parameters) == ["name", "other", "number"]
    assert repr(Below("a")) == "Below(name='a', other=None, number=3)"


@pytest.mark.parametrize("name", ["Axis", "Layout", "Mesh", "Piece"])
def test_help_of_a_public_class_shows_its_fields(name: str) -> None:
    shown = pydoc.plain(pydoc.render_doc(getattr(restride, name)))

    assert all(field in shown for field in getattr(restride, name).__struct_fields__)
