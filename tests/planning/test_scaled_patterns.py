"""Tensors that are cut alike share what fills them only where they are scaled alike, too."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import replace

from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.errors import UnsupportedError
from restride.planning.jobs import plan_conversion, whole_layout
from restride.testing.moving import job_between, store


def planned(**changes):
    """Two jobs between the same layouts, of which half is scaled; the second one is changed."""
    whole, axes = whole_layout((6,)), (Axis(3, 1, 0, 1),)
    pieces = Piece(axes, 0, 0, 0), Piece(axes, 3, 0, 3, Fraction(2))
    stored = store(replace(whole, all_pieces=pieces), DTYPES["float32"], np.arange(6, dtype="u4"))
    job, _ = job_between(stored, whole, DTYPES["float32"])
    if "dtype" in changes:
        changes = {"source": replace(job.source, dtype=changes["dtype"])}
    other = replace(job, target_regions=(Region(0, 24),), **changes)
    plan = plan_conversion([job, other], budget_nbytes=1 << 20, workers=1)
    return [[fill.scale for fill in region.fills] for region in plan.regions]


def test_uses_are_told_apart():
    half = [Fraction(1), Fraction(1, 2)]
    assert planned() == [half, half]
    assert planned(use="compare") == [half, [1, 1]]


def test_states_are_told_apart():
    with pytest.raises(UnsupportedError, match="exp_avg"):
        planned(state="exp_avg")


def test_types_are_told_apart():
    with pytest.raises(UnsupportedError, match="int32"):
        planned(dtype=DTYPES["int32"])
