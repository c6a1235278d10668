"""Copies that differ, as people read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from restride import api
from restride.checkpoint.catalog import Finding
from restride.cli.drift import show_drift
from restride.cli.output import open_page
from restride.testing.command_line import SAMPLE, run


def drift(tensor, state="weight", ranks=(0, 1), **details):
    """A finding of one pair of ranks on the mesh dp=2,tp=2."""
    coordinates = [dict(zip(("dp", "tp"), divmod(rank, 2), strict=True)) for rank in ranks]
    numbers = {"state_count": 5, "numel": 8, "different_numel": 2, "largest": 0.5}
    known = {"tensor": tensor, "state": state, "ranks": list(ranks), "coordinates": coordinates}
    severity = "warning" if "decided" in details else "error"
    return Finding(severity, "replica-drift", "", "", {**known, **numbers, **details})


def shown(capsys, *findings):
    show_drift(open_page(), findings)
    return capsys.readouterr().out.splitlines()


def cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_nothing_is_written_where_nothing_drifted(capsys):
    assert shown(capsys, Finding("note", "untracked", "tensor 'x' is")) == []


def test_layers_that_drift_alike_are_one_row(capsys):
    lines = shown(
        capsys,
        *(drift(f"h.{layer}.c_attn.{kind}") for layer in range(12) for kind in ("weight", "bias")),
    )

    assert lines[0] == (
        "error: ranks hold different copies in 24 arrays of 24 tensors [replica-drift]"
    )
    rows = [cells(line) for line in lines[2:4]]
    assert rows == [
        ["h.*.c_attn.weight", "12", "tp=0 and tp=1", "1 of 5", "2 of 8", "0.5 (weight)"],
        ["h.*.c_attn.bias", "12", "tp=0 and tp=1", "1 of 5", "2 of 8", "0.5 (weight)"],
    ]


def test_a_single_layer_keeps_its_number(capsys):
    lines = shown(capsys, drift("h.3.bias"), drift("h.3.bias", "exp_avg", largest=0.75))

    assert cells(lines[2])[:2] == ["h.3.bias", "1"]
    assert cells(lines[2])[3:] == ["2 of 5", "2 of 8", "0.75 (exp_avg)"]


def test_numbers_that_vary_are_a_range(capsys):
    lines = shown(capsys, drift("h.0.bias"), drift("h.1.bias", different_numel=7, numel=1024))

    assert cells(lines[2])[4] == "2 to 7 of 8 to 1,024"


def test_parts_of_one_array_are_added_where_only_other_coordinates_differ(capsys):
    """ZeRO cuts a master copy over dp: the drift between tp ranks is one drift."""
    lines = shown(capsys, drift("a.b", "fp32"), drift("a.b", "fp32", (2, 3), different_numel=1))

    assert cells(lines[2])[2:5] == ["tp=0 and tp=1", "1 of 5", "3 of 16"]


def test_every_pair_of_ranks_is_a_row(capsys):
    lines = shown(capsys, *(drift("a.b", ranks=(0, other)) for other in (1, 2, 3)))

    assert [cells(line)[2] for line in lines[2:5]] == [
        "tp=0 and tp=1",
        "dp=0 and dp=1",
        "dp=0,tp=0 and dp=1,tp=1",
    ]


def test_a_rank_may_differ_with_itself(capsys):
    lines = shown(capsys, drift("a.b", ranks=(1, 1)))

    assert cells(lines[2])[2] == "dp=0,tp=1, twice"
    assert "for that of one rank" not in lines[-1]


@pytest.mark.parametrize(("gap", "told"), [(None, "-"), ("inf", "inf (weight)")])
def test_a_difference_that_is_no_number_is_told_as_it_is(capsys, gap, told):
    assert cells(shown(capsys, drift("a.b", largest=gap))[2])[-1] == told


def test_what_to_do_names_the_ranks_and_a_pattern_that_can_be_pasted(capsys):
    lines = shown(capsys, drift("h.0.bias"), drift("h.1.bias"))

    assert lines[-2].endswith("refuses until it is told which one counts.")
    assert "takes tp=0 or tp=1 for that of one rank, first for" in lines[-1]
    assert "--replicas 'h.*.bias=COPY'" in lines[-1]


@pytest.mark.parametrize("kind", ["step-mismatch", "other-rank"])
def test_files_of_two_saves_or_ranks_are_not_to_be_decided_between(capsys, kind):
    mixed = Finding("error", kind, "global_steps is 7 in one and 2 in the other")

    lines = shown(capsys, mixed, drift("h.0.bias"))

    assert "--replicas" not in lines[-1]
    assert f"of different saves or ranks ({kind} above)" in lines[-1]


def test_copies_that_are_ones_by_what_was_told_of_the_cut_may_be_parts(capsys):
    told = Finding("note", "told-cut", "as was told, 1 by rule")

    lines = shown(capsys, told, drift("h.0.bias"))
    others = shown(capsys, drift("h.0.bias"))

    assert any("correct --source-config or --source-rules" in line for line in lines)
    assert "--replicas" in lines[-1]
    assert not [line for line in others if "--source-rules" in line]


def test_what_was_decided_is_told_of_each_row(capsys):
    lines = shown(
        capsys,
        drift("a.w", decided="mean"),
        drift("b.w", decided="first"),
        drift("c.w", decided="tp=1", ranks=(1, 0)),
    )

    assert lines[0].startswith("warning: ")
    assert [cells(line)[-1] for line in lines[2:]] == ["mean", "first (tp=0)", "tp=1"]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The sample, in which rank 1 has another bias."""
    copy = tmp_path / "damaged"
    shutil.copytree(SAMPLE, copy)
    catalog = api.open(copy)
    entry = next(t for t in catalog.tensors if t.name == "transformer.ln_f.bias").states["weight"]
    region = entry.regions[1]
    path = Path(catalog.root, catalog.files[region.file].name)
    content = bytearray(path.read_bytes())
    content[region.start_nbytes] ^= 1
    path.write_bytes(content)
    return copy


@pytest.mark.parametrize(
    ("rules", "decided"),
    [
        (["tp=1"], "tp=1"),
        (["1"], "dp=0,tp=1"),
        (["check", "*.ln_f.*=mean"], "mean"),
        (["*=first"], "first"),
        (["*.ln_f.bias/weight=tp=1"], "tp=1"),
        (["*.bias=dp=0,tp=1"], "dp=0,tp=1"),
    ],
)
def test_a_decision_can_be_written_with_and_without_a_pattern(damaged, tmp_path, rules, decided):
    options = [word for rule in rules for word in ("--replicas", rule)]

    ran = run("convert", damaged, tmp_path / "out", *options, "--json")

    assert ran.code == 0, ran.err
    (finding,) = ran.json["findings"]
    assert finding["details"]["decided"] == decided


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("=mean", "no rule [PATTERN=]COPY"),
        ("*.bias=", "no rule [PATTERN=]COPY"),
        ("", "no rule [PATTERN=]COPY"),
        ("*.bias=last", "'last' does not say which copy counts; say check, first, mean, own, the"),
        ("lm_head=1", "names the axis 'lm_head'"),
        ("*.biass=mean", "no tensor of 13 has a name like '*.biass'"),
        ("tp=9", "tp goes from 0 to 1"),
    ],
)
def test_a_decision_that_means_nothing_is_refused_in_one_sentence(damaged, tmp_path, text, says):
    ran = run("convert", damaged, tmp_path / "out", "--replicas", text)

    assert ran.code == 2
    assert says in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_overruled_pattern_leaves_the_check_in_place(damaged, tmp_path):
    ran = run(
        *("convert", damaged, tmp_path / "out"),
        *("--replicas", "mean", "--replicas", "*.ln_f.*=check"),
    )

    assert ran.code == 2
    assert "'transformer.ln_f.bias'" in ran.err
