"""`restride layouts CHECKPOINT --tp N`: how the next run would cut a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from restride import Axis, Layout, Piece
from restride.algebra.serial import layout_to_json
from restride.algebra.signature import same_layout
from restride.api import open as open_checkpoint
from restride.errors import CoverageError
from restride.layouts.presets import autotp_layouts
from restride.targets import Cut, find_cut
from restride.testing.catalogs import catalog_of
from restride.testing.command_line import SAMPLE, run

CODEGEN = {"model_type": "codegen", "n_head": 16, "n_embd": 32, "tie_word_embeddings": False}
QKV = "transformer.h.0.attn.qkv_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample in the folder `ckpt` of the working directory; it has no config.json."""
    shutil.copytree(SAMPLE, tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ckpt"


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def line_of(out: str, name: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith(name))
    return line


def test_each_kind_of_parameter_is_one_line_with_what_decides(checkpoint: Path) -> None:
    write(checkpoint / "config.json", CODEGEN)

    ran = run("layouts", "ckpt", "--tp", "4")

    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[:3] == [
        "ckpt: deepspeed zero-1, written by 4 ranks (dp=2,tp=2)",
        "for 4 tensor-parallel ranks:",
        "",
    ]
    assert lines[3].split() == ["tensor", "count", "shape", "is", "becomes", "shards", "how"]
    assert (
        f"{QKV}      1  96x32   codegen-qkv over tp  codegen-qkv over tp  24x32   "
        "preset codegen without its plan"
    ) in lines
    assert lines[-2] == "note: the model is taken from ckpt/config.json: codegen [model-config]"
    assert lines[-1].endswith("the next one must not either [without-plan]")


def test_machines_get_the_shards_of_every_rank(checkpoint: Path) -> None:
    config = write(checkpoint.parent / "model.json", CODEGEN)

    content = run("layouts", checkpoint, "--tp", "4", "--config", config, "--json").json

    kinds: dict[str, Any] = {kind["pattern"]: kind for kind in content["kinds"]}
    assert content["tp"] == 4
    assert kinds["transformer.h.*.attn.qkv_proj.weight"] == {
        "pattern": "transformer.h.*.attn.qkv_proj.weight",
        "tensors": [QKV],
        "shape": [96, 32],
        "before": "codegen-qkv over tp",
        "after": "codegen-qkv over tp",
        "shards": [[24, 32]] * 4,
        "how": "preset codegen without its plan",
        "layout": layout_to_json(
            find_cut(open_checkpoint(checkpoint), Cut(4, config)).layouts[QKV]
        ),
    }
    names = [name for kind in content["kinds"] for name in kind["tensors"]]
    assert names == [tensor.name for tensor in open_checkpoint(checkpoint).tensors]


def test_without_ranks_the_families_of_each_cut_are_listed(checkpoint: Path) -> None:
    ran = run("layouts", checkpoint.name)
    kinds = {kind["pattern"]: kind for kind in run("layouts", "ckpt", "--json").json["kinds"]}
    in_front = run("layouts", "--json", "ckpt")
    assert in_front.json == run("layouts", "ckpt", "--json").json

    assert (ran.code, ran.err) == (0, "")
    assert line_of(ran.out, QKV).endswith("96x32   codegen-qkv with a multiple of 8 heads")
    assert line_of(ran.out, "transformer.h.0.mlp.fc_in.bias").endswith(
        "128     split of dimension 0 evenly, or split of dimension 0 by heads: 2, 4, 8, 16, 32, "
        "64, or chunked of dimension 0 rounded up"
    )
    assert ran.out.splitlines()[-3:] == [
        "chunked rounded up: told apart where it does not divide: the last ranks are short",
        "split by heads: told apart on other ranks: a head is never cut",
        "split evenly: told apart where it does not divide: the first ranks get one more",
    ]
    fused = kinds["transformer.h.*.attn.qkv_proj.weight"]
    assert fused["tensors"] == [QKV]
    assert fused["shape"] == [96, 32]
    assert fused["families"] == [
        {
            "name": "codegen-qkv",
            "also": [],
            "text": "codegen-qkv with a multiple of 8 heads",
            "apart": "",
        }
    ]


def test_uneven_shards_are_counted(checkpoint: Path) -> None:
    rules = write(
        checkpoint.parent / "my.toml",
        'format = "restride-rules/1"\nrest = "whole"\n'
        '[[rules]]\nmatch = "**.fc_in.weight"\nlayout = "column"\nheads = 2\ngrain = 64\n'
        '[[rules]]\nmatch = "**.fc_in.bias"\nlayout = "split"\nsizes = [100, 20, 8]\n',
    )

    out = run("layouts", "ckpt", "--tp", "3", "--rules", rules).out

    assert "64x32, 64x32" not in out
    assert "2 of 64x32, 0x32  rule" in out
    assert "100, 20, 8        rule" in out


@pytest.mark.parametrize("place", ["ckpt/config.json", "config.json"])
def test_the_config_is_found_in_the_checkpoint_or_beside_it(checkpoint: Path, place: str) -> None:
    write(checkpoint.parent / place, CODEGEN)
    catalog = open_checkpoint(checkpoint)

    found = find_cut(catalog, Cut(4))

    shapes = {tensor.name: tensor.layout.full_shape for tensor in catalog.tensors}
    wanted = autotp_layouts(CODEGEN, shapes, mesh={"tp": 4}, plan=False)
    assert [name for name in wanted if not same_layout(found.layouts[name], wanted[name])] == []


def test_a_grain_that_the_files_do_not_say_is_told_of(checkpoint: Path) -> None:
    write(checkpoint / "config.json", CODEGEN)

    same, other = (run("layouts", "ckpt", "--tp", "2", "--grain", grain).out for grain in "18")

    assert "config-grain" not in same
    assert "says no tp_grain_size, as the source was trained: resume with 8 [config-grain]" in other
    assert line_of(same, QKV).endswith("kept")
    assert line_of(other, QKV).endswith("preset codegen without its plan")


def test_a_tag_opened_by_itself_finds_the_config_of_its_checkpoint(checkpoint: Path) -> None:
    write(checkpoint / "config.json", CODEGEN)
    tag = checkpoint / (checkpoint / "latest").read_text()

    assert find_cut(open_checkpoint(tag), Cut(4)).how[QKV].startswith("preset codegen")


def test_a_config_that_is_named_goes_before_one_that_is_found(checkpoint: Path) -> None:
    write(checkpoint / "config.json", {"model_type": "codegen", "n_head": 5})
    config = write(checkpoint.parent / "model.json", CODEGEN)

    ran = run("layouts", "ckpt", "--tp", "4", "--config", config)

    assert ran.code == 0
    assert "model-config" not in ran.out


def test_no_config_is_read_where_none_is_needed(checkpoint: Path) -> None:
    write(checkpoint / "config.json", "{")

    assert run("layouts", "ckpt", "--tp", "2").code == 0
    assert run("layouts", "ckpt", "--tp", "1").code == 0


def test_a_config_of_something_else_is_said_not_to_be_used(checkpoint: Path) -> None:
    write(checkpoint / "config.json", {"train_batch_size": 8})
    rules = write(
        checkpoint.parent / "my.toml",
        'format = "restride-rules/1"\nrest = "whole"\n[[rules]]\nmatch = "**"\nlayout = "row"\n',
    )

    ran = run("layouts", "ckpt", "--tp", "4", "--rules", rules)

    assert "ckpt/config.json has no 'model_type'" in ran.out
    assert ran.code == 0


def test_a_user_may_follow_the_plan_against_the_checkpoint(checkpoint: Path) -> None:
    write(checkpoint / "config.json", CODEGEN)

    out = run("layouts", "ckpt", "--tp", "2", "--plan").out

    assert line_of(out, QKV).endswith(" preset codegen")
    assert "warning: tensor 'transformer.h.0.attn.qkv_proj.weight': the run that wrote" in out
    assert "is fused and cut against its heads" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "ckpt/config.json: it is no JSON"),
        ("[]", "ckpt/config.json: Expected `object`"),
        ('{"model_type": "codegen", "model_type": "llama"}', "the key 'model_type' comes twice"),
        ('{"model_type": "codegen", "a": NaN}', "NaN"),
        ('{"model_type": "codegen", "a": ' + "[" * 9999 + "]" * 9999 + "}", "nested too deep"),
        ('{"model_type": "codegen", "n_head": "16"}', "'n_head' is '16'"),
        ('{"model_type": "codgen"}', "no preset for model type 'codgen'; that of codegen cuts "),
        ('{"model_type": "llama"}', "the config is of another model"),
        (" " * (16 << 20) + "{}", "larger than the limit of 16777216 bytes"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    checkpoint: Path, content: str, words: str
) -> None:
    write(checkpoint / "config.json", content)

    ran = run("layouts", "ckpt", "--tp", "4")

    assert ran.code == 2
    assert ran.out == ""
    assert words in ran.err


@pytest.mark.parametrize(("folder", "words"), [("ckpt", "; name 'ckpt/config.json'"), ("x", "")])
def test_a_folder_in_place_of_a_config_comes_with_the_one_in_it(
    checkpoint: Path, folder: str, words: str
) -> None:
    (checkpoint / "config.json").write_text("{}")
    (checkpoint.parent / "x").mkdir()

    ran = run("layouts", "ckpt", "--tp", "4", "--config", folder)

    assert ran.err == f"restride: {folder}: is a folder{words}\n"


def test_a_pipe_in_the_place_of_a_config_is_no_config(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / "config.json")

    ran = run("layouts", "ckpt", "--tp", "4")

    assert ran.err == "restride: ckpt/config.json: is not a regular file\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", "my.toml: is no UTF-8 text"),
        (b"rest = =", "my.toml: is no TOML"),
        (b" " * (1 << 20) + b"x", "larger than the limit of 1048576 bytes"),
        (b"", "my.toml: names nothing as its format"),
    ],
)
def test_a_rule_file_that_is_none_is_refused(checkpoint: Path, content: bytes, words: str) -> None:
    (checkpoint.parent / "my.toml").write_bytes(content)

    ran = run("layouts", "ckpt", "--tp", "4", "--rules", "my.toml")

    assert ran.code == 2
    assert words in ran.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plan",), "say how many ranks the next run has: --tp"),
        (("--grain", "4"), "say how many ranks the next run has: --tp"),
        (("--tp", "0"), "0 is not at least 1"),
        (("--tp", "4", "--grain", "0"), "0 is not at least 1"),
        (("--tp", "4", "--config", "none.json"), "none.json: cannot be opened"),
        (("--tp", "4", "--no-plan"), "--no-plan says how the preset"),
        (
            ("--tp", "4"),
            "give the config.json of the model with --config",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence(
    checkpoint: Path, options: tuple[str, ...], words: str
) -> None:
    ran = run("layouts", checkpoint.name, *options)

    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_cut_that_loses_elements_is_refused_before_anything_is_written() -> None:
    """A checkpoint whose map has a hole is kept as it is, and proved like everything else."""
    holed = Layout.of({"tp": 1}, (4,), [(3,)], [Piece((Axis(3, 1, 0, 1),))])

    with pytest.raises(CoverageError, match="tensor 'wte', as kept cuts it: "):
        find_cut(catalog_of({"wte": holed}), Cut(1))


def test_a_path_that_is_not_there_is_named(checkpoint: Path) -> None:
    ran = run("layouts", checkpoint / "nothing", "--tp", "4")

    assert ran.err == f"restride: {checkpoint / 'nothing'}: no such file or folder\n"


def layouts_of(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor.layout for tensor in open_checkpoint(path).tensors}


def test_a_conversion_cuts_what_was_shown_and_back_again_is_the_same(checkpoint: Path) -> None:
    config = write(checkpoint.parent / "model.json", CODEGEN)
    wide = ("--to", "deepspeed", "--config", config, "--zero", "1")

    ran = run("convert", "ckpt", "four", *wide, "--tp", "4", "--dp", "1")
    back = run("convert", "four", "two", *wide, "--tp", "2", "--dp", "2")

    assert (ran.code, back.code) == (0, 0), ran.err + back.err
    assert "[without-plan]" in ran.out
    shown = find_cut(open_checkpoint(checkpoint), Cut(4, config)).layouts
    assert [
        n for n, layout in layouts_of(Path("four")).items() if not same_layout(layout, shown[n])
    ] == []
    before, after = layouts_of(checkpoint), layouts_of(Path("two"))
    assert [name for name in before if not same_layout(before[name], after[name])] == []
    assert run("diff", "ckpt", "two").code == 0
    assert run("diff", "ckpt", "four").code == 0


def test_a_conversion_is_cut_by_rules_and_by_the_plan(checkpoint: Path) -> None:
    config = write(checkpoint.parent / "model.json", CODEGEN)
    rules = write(
        checkpoint.parent / "my.toml",
        'format = "restride-rules/1"\nrest = "whole"\n'
        '[[rules]]\nmatch = "lm_head.*"\nlayout = "column"\n',
    )
    to = ("--to", "deepspeed", "--tp", "2", "--dp", "1", "--zero", "1")

    assert run("convert", "ckpt", "ruled", *to, "--rules", rules).code == 0
    planned = run("convert", "ckpt", "planned", *to, "--config", config, "--plan")

    assert planned.code == 0
    assert "fused and cut against its heads" in planned.out
    ruled, cut = layouts_of(Path("ruled")), layouts_of(Path("planned"))
    assert {n for n, x in ruled.items() if x.shard_shape(0) != x.full_shape} == {
        "lm_head.weight",
        "lm_head.bias",
    }
    assert cut[QKV].pieces(0)[0].numel == 48 * 32  # plain rows in one run
    assert run("diff", "ruled", "planned").code == 0


def test_other_formats_take_no_word_of_the_next_run(checkpoint: Path) -> None:
    ran = run("convert", checkpoint.name, "out", "--config", "model.json")

    assert ran.err == (
        "restride: safetensors takes no --config; leave it out, or convert to deepspeed\n"
    )


def test_a_conversion_that_needs_a_config_leaves_nothing(checkpoint: Path) -> None:
    ran = run("convert", checkpoint.name, "out", "--to", "deepspeed", "--tp", "4", "--dp", "1")

    assert ran.code == 2
    assert "give the config.json of the model" in ran.err
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["ckpt"]
