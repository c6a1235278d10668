"""A layout is named only if it means the same as what that name makes."""

from __future__ import annotations

import pytest

from restride.algebra.layout import Layout
from restride.algebra.piece import Axis, Piece
from restride.cli.words import describe_layout
from restride.layouts.catalogue import build


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        ("replicated", {"shape": "8x6", "mesh": "tp=1"}, "whole"),
        ("replicated", {"shape": "8x6", "mesh": "tp=2"}, "replicated"),
        ("split", {"shape": "8x6", "mesh": "tp=2"}, "dim 0 over tp"),
        ("split", {"shape": "8x6", "mesh": "dp=2,tp=3", "dim": "1", "axis": "tp"}, "dim 1 over tp"),
        ("split", {"shape": "8x6", "mesh": "dp=2,tp=1", "axis": "dp"}, "dim 0 over dp"),
        ("chunked", {"shape": "5x6", "mesh": "tp=2"}, "dim 0 over tp, uneven"),
        ("codegen-qkv", {"shape": "96x8", "mesh": "tp=4", "heads": "16"}, "codegen-qkv over tp"),
        (
            "bigcode-qkv",
            {"shape": "20x2", "mesh": "tp=2", "hidden": "16"},
            "partly replicated, 2 pieces per rank",
        ),
        ("gate-up", {"shape": "16x2", "mesh": "tp=4"}, "1 piece per rank"),
        ("flat-chunks", {"shape": "4x5", "mesh": "dp=2"}, "1 piece per rank"),
        ("padded", {"shape": "13x2", "mesh": "tp=4", "rows": "16"}, "1 piece per rank"),
    ],
)
def test_a_known_cut_is_named_and_an_unknown_one_is_counted(
    name: str, texts: dict[str, str], words: str
) -> None:
    assert describe_layout(build(name, texts)) == words


def test_a_replica_that_is_scaled_is_not_called_replicated() -> None:
    scaled = build("replicated", {"shape": "8", "mesh": "tp=2", "scale": "1/2"})

    assert describe_layout(scaled) == "partly replicated, 1 piece per rank"


def test_shards_in_reverse_order_are_not_called_a_split() -> None:
    backwards = Layout.of(
        {"tp": 2}, (4, 2), [(2, 2)] * 2, [Piece((Axis(2, -4, 1, 0), Axis(4, 1, 0, 1)), full_base=4)]
    )

    assert describe_layout(backwards) == "1 piece per rank"
