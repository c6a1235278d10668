from __future__ import annotations

import pytest

from restride.executors.option_words import as_kept, changed_options


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"stage": 3}, {"stage": None}, ["without --stage 3"]),
        ({}, {"stage": 3}, ["with --stage 3"]),
        ({"tp": 2, "dp": 4}, {"tp": 1, "dp": 4}, ["with --tp 1, not 2"]),
        ({"optimizer_transform": True}, {}, ["without --optimizer-transform"]),
        ({"plan": False}, {"plan": True}, ["with --plan, not --no-plan"]),
        ({"zero_init": None}, {"zero_init": False}, ["with --no-zero-init"]),
        ({"pp_tied": {"embed": [0, 8]}}, {"pp_tied": {}}, ["with --pp-tied none, not embed=0,8"]),
        ({"max_shard_nbytes": 5 * 10**9}, {}, ["without --max-shard-size 5GB"]),
        ({"max_shard_nbytes": 1 << 28}, {}, ["without --max-shard-size 256MiB"]),
        ({"max_shard_nbytes": 1234567}, {}, ["without --max-shard-size 1234567"]),
        ({"config": "my model/config.json"}, {}, ["without --config 'my model/config.json'"]),
        (
            {"replicas": [["*.c_attn.*", "mean"], ["*", "first"]]},
            {"replicas": []},
            ["without --replicas '*.c_attn.*=mean' --replicas first"],
        ),
    ],
)
def test_an_option_that_differs_is_told_as_it_is_typed(ours, theirs, words):
    assert list(changed_options(ours, theirs)) == words


def test_what_a_file_says_of_options_is_cut_short_and_never_fails():
    for value in ([1], [[1, 2, 3]], {"a": 1}, {"a": [[]]}, 1.5, "x" * 1000, [["*", []]], "\x1b[2J"):
        for name in ("replicas", "pp_tied", "max_shard_nbytes", "to", "unknown"):
            (change,) = changed_options({}, {name: value})

            assert change.startswith(f"with --{name[:2]}")
            assert len(change) <= 100


def test_long_paths_that_differ_at_their_end_do_not_look_the_same():
    folder = "/data/" + "run/" * 30
    (change,) = changed_options({"config": f"{folder}a.json"}, {"config": f"{folder}b.json"})

    then, now = change.removeprefix("with --config ").split(", not ")
    assert (then[-7:], now[-7:]) == ("/b.json", "/a.json")
    assert len(then) == len(now) < 70


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"replicas": "check"}, {"replicas": ()}),
        ({"replicas": 1}, {"replicas": (("*", "1"),)}),
        ({"replicas": [("*.bias", "mean")]}, {"replicas": (("*.bias", "mean"),)}),
        ({"pp_layers": [0, 3, 6]}, {"pp_layers": "0,3,6"}),
    ],
)
def test_options_are_kept_the_same_from_python_and_from_the_command_line(one, other):
    assert as_kept(one) == as_kept(other)
