"""Outputs refuse what could not be written."""

from __future__ import annotations

import pytest

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.catalog import Region
from restride.checkpoint.dtypes import DTYPES
from restride.checkpoint.output import Output, OutputFile, OutputTensor
from restride.errors import PlanError

ROWS = Layout.of({"tp": 2}, (4, 3), [(2, 3)] * 2, [Piece((Axis(2, 6, 1, 0), Axis(6, 1, 0, 1)))])


def tensor(*starts: int, name: str = "w", file: int = 0) -> OutputTensor:
    regions = tuple(Region(file, start) for start in starts)
    return OutputTensor(name, DTYPES["float16"], ROWS, regions)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0", "a\\b"])
def test_a_file_that_would_leave_the_root_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="no path below the root"):
        OutputFile(name, 1)


def test_a_file_of_negative_length_is_refused() -> None:
    with pytest.raises(PlanError, match="-1 bytes"):
        OutputFile("a", -1)


def test_shards_of_several_ranks_stand_where_they_fit() -> None:
    output = Output((OutputFile("a", 40, ((0, b"head"), (28, b"tail"))),), (tensor(4, 16),))

    assert output.nbytes == 40
    assert output.tensors[0].shard_nbytes(1) == 12


def test_packed_units_take_whole_bytes() -> None:
    packed = Layout.of({"tp": 1}, (5,), [(5,)], [Piece((Axis(5, 1, 0, 1),))], unit_bits=4)

    assert OutputTensor("w", DTYPES["uint8"], packed, (Region(0, 0),)).shard_nbytes(0) == 3


@pytest.mark.parametrize(
    ("files", "tensors", "says"),
    [
        ([OutputFile("b", 1), *[OutputFile("a", 1)] * 2], [], "a: two files"),
        ([OutputFile("a", 24)], [tensor(0, 11)], "'w' starts at byte 11, before the end"),
        ([OutputFile("a", 24, ((8, b"x"),))], [tensor(0, 12)], "fixed part starts at byte 8"),
        ([OutputFile("a", 23)], [tensor(0, 12)], "ends at byte 24, the file has 23"),
        ([OutputFile("a", 24)], [tensor(-1, 12)], "starts at byte -1"),
        ([OutputFile("a", 24)], [tensor(0, 12, file=1)], "rank 0: file 1 of 1"),
        ([OutputFile("a", 24)], [tensor(0, 12, file=-1)], "rank 0: file -1 of 1"),
        ([OutputFile("a", 2, ((1, b"xx"),))], [], "ends at byte 3, the file has 2"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    files: list[OutputFile], tensors: list[OutputTensor], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        Output(tuple(files), tuple(tensors))


def test_every_rank_with_elements_needs_a_place() -> None:
    with pytest.raises(PlanError, match="regions of 1 rank are given, the layout has 2"):
        tensor(0)
    with pytest.raises(PlanError, match="rank 1: a shard of 12 bytes has no place"):
        OutputTensor("w", DTYPES["float16"], ROWS, (Region(0, 0), None))


def test_joined_outputs_keep_their_tensors_in_their_files() -> None:
    one = Output((OutputFile("a", 24),), (tensor(0, 12, name="x"),))
    empty = Output((OutputFile("b", 2, ((0, b"{}"),)),))
    other = Output((OutputFile("c", 30),), (tensor(0, 18, name="y"),))

    joined = Output.joined([one, empty, other])

    assert [file.name for file in joined.files] == ["a", "b", "c"]
    assert joined.tensors[0].regions == (Region(0, 0), Region(0, 12))
    assert joined.tensors[1].regions == (Region(2, 0), Region(2, 18))
    with pytest.raises(PlanError, match="two files"):
        Output.joined([one, one])
