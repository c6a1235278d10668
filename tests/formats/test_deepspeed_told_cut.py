"""Checkpoints that do not say how tensor-parallel ranks cut them, and users who do."""

from __future__ import annotations

import json
import shutil

import pytest

import restride
from restride import api
from restride.algebra.signature import same_layout
from restride.cli import main
from restride.comparison import check_against
from restride.errors import ExistsError, RuleError, UnsupportedError
from restride.storage.torch_zip import open_torch_zip
from restride.testing.inert_values import save_value

INFO = "universal_checkpoint_info"
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 128}
LLAMA = SIZES | {"model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 4}
GPT = {"n_embd": 64, "n_head": 8, "n_layer": 2, "vocab_size": 128}
UNEVEN = LLAMA | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
CODEGEN = GPT | {"model_type": "codegen"}
CONFIGS = {
    "llama_tp2_z1": LLAMA | {"tie_word_embeddings": False},
    "llama_tp2_z1_fp32": LLAMA | {"tie_word_embeddings": False},
    "llama_tp2_z3": LLAMA | {"tie_word_embeddings": False},
    "llama_tied_tp2_z1": LLAMA | {"tie_word_embeddings": True},
    "llama_unevenkv_tp2_z1": UNEVEN | {"tie_word_embeddings": False},
    "bloom_tp2_z1": GPT | {"model_type": "bloom", "hidden_size": 64},
    "opt_tp2_z1": SIZES | {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
    "gptbigcode_tp2_z1": GPT | {"model_type": "gpt_bigcode", "n_head": 4, "multi_query": True},
    "mixtral_tp2_z1": LLAMA | {"model_type": "mixtral", "num_local_experts": 4},
}
RULES = 'format = "restride-rules/1"\n'
WHOLE = RULES + '[[rules]]\nmatch = "**"\nlayout = "whole"\n'


def silent(shared, tmp_path, name):
    """A recorded checkpoint without what its engine wrote down of the cut."""
    path = tmp_path / name
    shutil.copytree(shared / "checkpoints" / name, path)
    for own in (path, *path.rglob("*")):  # the real ones may be read-only
        own.chmod(0o700 if own.is_dir() else 0o600)
    for file in path.rglob("*model_states.pt"):
        value = open_torch_zip(file).value
        kept = {key: item for key, item in value.items() if key != INFO}
        save_value(tmp_path / "new.pt", kept)
        (tmp_path / "new.pt").replace(file)
    return path


def written(tmp_path, content, name="config.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def require_same_layouts(ours, theirs):
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert same_layout(one.layout, other.layout), one.name
        assert list(one.states) == list(other.states)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_tells_what_the_engine_would_have_written_down(shared, tmp_path, name):
    path = silent(shared, tmp_path, name)
    config = written(tmp_path, CONFIGS[name])

    with pytest.raises(
        UnsupportedError, match=r"how 2 .*; give the config.* with --source-config$"
    ):
        api.open(path)
    told = api.open(path, source_config=config)

    assert told.is_cut_told
    assert [f.where for f in told.findings if f.kind == "told-cut"] == [str(config)]
    require_same_layouts(told, api.open(shared / "checkpoints" / name))


@pytest.mark.parametrize(
    ("name", "layout"),
    [("codegen_fused_tp2_z1", "codegen-qkv"), ("codegen_rowcut_tp2_z1", "column")],
)
def test_two_cuts_with_the_same_shards_are_told_apart_by_a_rule(shared, tmp_path, name, layout):
    path = silent(shared, tmp_path, name)
    config = written(tmp_path, CODEGEN)
    rule = f'{RULES}[[rules]]\nmatch = "**.attn.qkv_proj.weight"\nlayout = "{layout}"\n'
    rules = written(tmp_path, rule, "rules.toml")

    with pytest.raises(RuleError, match=r"qkv_proj.weight': .* in 2 ways, with .*write a rule"):
        api.open(path, source_config=config)
    told = api.open(path, source_config=config, source_rules=rules)

    require_same_layouts(told, api.open(shared / "checkpoints" / name))
    (finding,) = [f for f in told.findings if f.kind == "told-cut"]
    assert '2 by rule "**.attn.qkv_proj.weight"' in finding.message
    assert "by preset codegen" in finding.message


def test_what_is_told_goes_through_every_conversion(shared, tmp_path):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    config = written(tmp_path, CONFIGS["llama_tp2_z1"])
    known = shared / "checkpoints" / "llama_tp2_z1"

    for number, options in enumerate(
        ({"states": "all"}, {"to": "universal"}, {"to": "deepspeed", "tp": 4, "dp": 1})
    ):
        api.convert(path, tmp_path / f"told{number}", source_config=config, **options)
        more = {"config": config} if "tp" in options else {}
        api.convert(known, tmp_path / f"known{number}", **options, **more)

        report = restride.diff(tmp_path / f"told{number}", tmp_path / f"known{number}")
        assert report.verdict == "same"
    assert api.check(path, source_config=config).verdict == "ok"
    assert restride.fingerprint(path, source_config=config) == restride.fingerprint(known)
    assert restride.diff(path, known, source_config=config).verdict == "same"
    assert not check_against(path, tmp_path / "told0", source_config=config)


def test_a_run_is_resumed_with_what_it_was_told_alone(shared, tmp_path):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    config = written(tmp_path, CONFIGS["llama_tp2_z1"])
    api.convert(path, tmp_path / "out", source_config=config)

    again = api.convert(path, tmp_path / "out", source_config=config, resume=True)
    assert again.resumed_nbytes
    other = written(tmp_path, CONFIGS["llama_tp2_z1"], "other.json")
    with pytest.raises(ExistsError, match="with --source-config"):
        api.convert(path, tmp_path / "out", source_config=other, resume=True)


def copied(shared, tmp_path):
    """A model that nobody cut, of two ranks that say they are tensor-parallel."""
    path = silent(shared, tmp_path, "llama_tp2_z1")
    for file in path.rglob("*mp_rank_00*"):
        shutil.copyfile(file, file.with_name(file.name.replace("mp_rank_00", "mp_rank_01")))
    return path


def test_copies_are_not_taken_for_shards(shared, tmp_path):
    path = copied(shared, tmp_path)
    config = written(tmp_path, LLAMA | {"hidden_size": 64})

    with pytest.raises(
        RuleError, match=r"all 2 ranks hold the same: they have copies .*\(32, 64\)"
    ):
        api.open(path, source_config=config)

    whole = api.open(path, source_rules=written(tmp_path, WHOLE, "rules.toml"))
    shapes = {tensor.name: tensor.layout.full_shape for tensor in whole.tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 64)


def test_shards_are_not_taken_for_copies(shared, tmp_path):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    rules = written(tmp_path, WHOLE, "rules.toml")

    report = api.check(path, source_rules=rules)

    assert report.verdict == "findings"
    assert {finding.severity for finding in report.findings if finding.kind != "told-cut"} == {
        "error"
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (CONFIGS["llama_tp2_z1"] | {"hidden_size": 32}, "hidden size of 32"),
        (CONFIGS["llama_tp2_z1"] | {"num_key_value_heads": 2}, "2 key/value heads"),
        (CODEGEN, "config is of another model"),
        (LLAMA | {"model_type": "unheard-of"}, "unheard-of"),
    ],
)
def test_a_config_of_another_model_is_refused(shared, tmp_path, content, says):
    path = silent(shared, tmp_path, "llama_tp2_z1")

    with pytest.raises(RuleError, match=says) as caught:
        api.open(path, source_config=written(tmp_path, content))

    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ('[[rules]]\nmatch = "**.norm.weight"\nlayout = "whole"\n', "no rule says how 2 ranks"),
        ('[[rules]]\nmatch = "h.*"\nlayout = "whole"\n', "matches none of 21 parameters"),
        ('[[rules]]\nmatch = "**"\nlayout = "padded"\nrows = 9\n', "makes no shards of shapes"),
        ('[[rules]]\nmatch = "**"\nlayout = "row"\n', "all 2 ranks hold the same"),
        ('rest = "whole"\n[[rules]]\nmatch = "lm_head.*"\nlayout = "whole"\n', None),
    ],
)
def test_rules_that_leave_something_open_are_refused(shared, tmp_path, rules, says):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    file = written(tmp_path, RULES + rules, "rules.toml")

    if says is None:
        assert api.open(path, source_rules=file).is_cut_told
        return
    with pytest.raises(RuleError, match=says) as caught:
        api.open(path, source_rules=file)

    assert str(caught.value).count("rules.toml") == 1


def test_a_rest_that_is_whole_has_one_shape(shared, tmp_path):
    path = silent(shared, tmp_path, "llama_unevenkv_tp2_z1")
    rest = 'rest = "whole"\n[[rules]]\nmatch = "lm_head.*"\nlayout = "whole"\n'
    file = written(tmp_path, RULES + rest, "rules.toml")

    with pytest.raises(RuleError, match=r"whole, as the rules say of the rest makes no shards of"):
        api.open(path, source_rules=file)


@pytest.mark.parametrize("name", ["llama_tp2_z1", "llama_tp1dp2_z1"])
def test_what_nobody_needs_to_be_told_is_refused(shared, tmp_path, name):
    config = written(tmp_path, LLAMA)
    path = shared / "checkpoints" / name

    with pytest.raises(UnsupportedError, match="leave --source-config and --source-rules out"):
        api.open(path, source_config=config)
    with pytest.raises(UnsupportedError, match="leave --source-config and --source-rules out"):
        api.convert(path, tmp_path / "out", source_config=config)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json"]


def grained(path, grain, new):
    """Let the configuration in all files say a `tp_grain_size`."""
    for file in path.rglob("*_states.pt"):
        value = open_torch_zip(file).value
        if "ds_config" in value:
            parallel = {"tensor_parallel": {"tp": {"tp_grain_size": grain}}}
            save_value(new, {**value, "ds_config": {**value["ds_config"], **parallel}})
            new.replace(file)


def test_the_grain_that_the_files_say_is_kept_to(shared, tmp_path):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    config = written(tmp_path, CONFIGS["llama_tp2_z1"])
    grained(path, 64, tmp_path / "new.pt")
    assert api.open(path, source_config=config).is_cut_told

    # All 128 rows of it would be on one rank.
    grained(path, 96, tmp_path / "new.pt")
    with pytest.raises(RuleError, match=r"gate_proj.*no shards of shapes \(64, 64\), \(64, 64\)"):
        api.open(path, source_config=config)


def test_the_commands_take_what_is_told(shared, tmp_path, capsys):
    path = silent(shared, tmp_path, "llama_tp2_z1")
    told = ["--source-config", str(written(tmp_path, CONFIGS["llama_tp2_z1"]))]

    names = ("info", "check", "fingerprint", "layouts")
    for command in ([name, str(path)] for name in names):
        assert main(command) == 2
        assert "--source-config" in capsys.readouterr().err
        assert main([*command, *told]) == 0
    assert main(["diff", str(path), str(path), *told]) == 0
    assert main(["layouts", str(path), "--tp", "4", *told]) == 0
    assert "preset llama" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "out"), *told]) == 0
    assert "[told-cut]" in "".join(capsys.readouterr())
