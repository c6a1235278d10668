"""`restride layouts` lists, draws and proves whatever the catalogue holds."""

from __future__ import annotations

import pytest

from restride.algebra.serial import layout_from_json
from restride.algebra.signature import same_layout, signature
from restride.layouts import codegen_qkv
from restride.layouts.catalogue import CATALOGUE, build
from restride.testing.command_line import run


def options(name: str) -> list[str]:
    """The example of a layout, as the options that a user would give."""
    entry = CATALOGUE[name]
    words: list[str] = []
    for parameter in entry.parameters:
        if parameter.name in entry.example:
            words.append(parameter.option)
            if parameter.kind != "flag":
                words.append(entry.example[parameter.name])
    return words


def test_the_list_holds_the_catalogue() -> None:
    listed = run("layouts").out
    content = run("layouts", "--json").json

    assert list(content["layouts"]) == list(CATALOGUE)
    for name, entry in CATALOGUE.items():
        assert any(line.split(maxsplit=1) == [name, entry.summary] for line in listed.splitlines())
        described = content["layouts"][name]
        assert [*described["parameters"]] == [parameter.name for parameter in entry.parameters]


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_layout_is_drawn_proved_and_given_to_machines(name: str) -> None:
    layout = build(name, CATALOGUE[name].example)

    drawn, given = run("layouts", name), run("layouts", name, *options(name), "--json")

    assert (drawn.code, drawn.err) == (0, "")
    assert f"an example: {CATALOGUE[name].parameters[0].option}" in drawn.out
    assert "each shard holds these blocks" in drawn.out
    assert drawn.out.splitlines()[-1].startswith("covered: ")
    content = given.json
    assert content["verdict"] == "covered"
    assert content["signature"] == signature(layout)
    assert same_layout(layout_from_json(content["layout"]), layout)
    assert content["pieces_per_rank"] == {
        str(rank): len(layout.pieces(rank)) for rank in range(layout.rank_count)
    }


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_layout_has_help_for_each_parameter(name: str) -> None:
    shown = run("layouts", name, "--help").out

    assert all(parameter.option in shown for parameter in CATALOGUE[name].parameters)
    assert "Example: restride layouts" in shown


def test_codegen_is_one_piece_on_each_rank() -> None:
    ran = run(
        *("layouts", "codegen-qkv", "--shape", "3072x1024"),
        *("--mesh", "tp=2", "--heads", "16", "--json"),
    )

    content = ran.json
    assert content["verdict"] == "covered"
    assert content["pieces_per_rank"] == {"0": 1, "1": 1}
    expected = codegen_qkv((3072, 1024), mesh={"tp": 2}, heads=16)
    assert same_layout(layout_from_json(content["layout"]), expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["codegen-qkv", "--shape", "3072x1024", "--mesh", "tp=2"], ["--heads"]),
        (["codegen-qkv", "--shape", "48x2", "--mesh", "tp=2", "--heads", "9"], ["9", "4 * 2"]),
        (["split", "--shape", "4by4", "--mesh", "tp=2"], ["4by4", "3072x1024"]),
        (["split", "--shape", "4x4", "--mesh", "tp"], ["tp=4,dp=2"]),
        (["split", "--shape", "5x4", "--mesh", "tp=2"], ["5", "2"]),
        (["split", "--shape", "4x4", "--mesh", "tp=2", "--sizes", "1,2"], ["4"]),
        (
            ["block-gather", "--shape", "4x4", "--mesh", "tp=2", "--ids", "0;0", "--block", "2"],
            ["0"],
        ),
    ],
)
def test_what_a_builder_refuses_is_one_sentence(arguments: list[str], words: list[str]) -> None:
    ran = run("layouts", *arguments)

    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("restride: ")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in words)


def test_replicas_may_be_asked_for_with_a_flag() -> None:
    ran = run(
        *("layouts", "block-gather", "--shape", "4x2", "--mesh", "tp=2"),
        *("--ids", "0,1;0", "--block", "2", "--allow-shared"),
    )

    assert ran.code == 0
    assert "AB 0" in ran.out
