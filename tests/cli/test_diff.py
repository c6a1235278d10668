"""`diff`, `fingerprint` and `check --against`, for people and for machines."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from restride import api
from restride.checkpoint.manifest import manifest_to_json
from restride.testing.command_line import SAMPLE, run
from restride.testing.contents import manifest_from_json


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    api.convert(SAMPLE, tmp_path / "out", states="all")
    return tmp_path / "out"


@pytest.fixture
def master(tmp_path: Path) -> Path:
    api.convert(SAMPLE, tmp_path / "master", dtype="float32")
    return tmp_path / "master"


def test_a_conversion_is_the_same(converted: Path) -> None:
    for_people, for_machines = (
        run("diff", SAMPLE, converted),
        run("diff", SAMPLE, converted, "--json"),
    )

    assert (for_people.code, for_machines.code) == (0, 0)
    assert for_people.out.splitlines()[-1].startswith("same: 65 arrays, ")
    assert for_people.out.splitlines()[-1].endswith(", the same bits")
    assert for_machines.json["verdict"] == "same"
    assert for_machines.json["compared"] == 65
    assert for_machines.json["differences"] == []


def test_differences_exit_with_one_and_are_told_one_a_line(master: Path) -> None:
    for_people, for_machines = run("diff", SAMPLE, master), run("diff", SAMPLE, master, "--json")

    assert (for_people.code, for_machines.code) == (1, 1)
    content = for_machines.json
    assert len(content["only_a"]) == 52
    assert len(content["differences"]) == 13
    row = content["differences"][0]
    assert row["dtypes"] == ["bfloat16", "float32"]
    assert row["first_index"] == row["first_coordinates"][0] * 32 + row["first_coordinates"][1]
    assert abs(row["first_values"][0] - row["first_values"][1]) <= row["largest"]
    assert "only in A: fp32, exp_avg, exp_avg_sq, step of 13 tensors" in for_people.out
    last = for_people.out.splitlines()[-1]
    assert last == "different: 13 of 13 arrays differ, 52 arrays only in A"


def exchanged(
    source: Path, target: Path, first: tuple[str, slice], other: tuple[str, slice]
) -> Path:
    """A copy of safetensors in which some rows of two tensors changed places."""
    shutil.copytree(source, target)
    (target / "restride.json").unlink(missing_ok=True)
    content = bytearray((target / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    places = []
    for name, rows in (first, other):
        row_nbytes = header[name]["shape"][1] * 2
        at = start + header[name]["data_offsets"][0]
        places.append(slice(at + rows.start * row_nbytes, at + rows.stop * row_nbytes))
    content[places[0]], content[places[1]] = content[places[1]], content[places[0]]
    (target / "model.safetensors").write_bytes(content)
    return target


def test_heads_that_changed_places_are_called_so_whatever_the_other_is_cut_into(
    tmp_path: Path,
) -> None:
    api.convert(SAMPLE, tmp_path / "out")
    fused = "transformer.h.0.attn.qkv_proj.weight"
    heads = (fused, slice(0, 4)), (fused, slice(4, 8))
    swapped = exchanged(tmp_path / "out", tmp_path / "swapped", *heads)

    for_people, for_machines = run("diff", SAMPLE, swapped), run("diff", SAMPLE, swapped, "--json")

    assert (
        f"{fused}, weight: the same rows in another order, in blocks of 4: 0-3 of B are 4-7 of A; "
        "4-7 of B are 0-3 of A"
    ) in for_people.out.splitlines()
    (row,) = for_machines.json["differences"]
    assert row["moves"] == {
        "along": "rows",
        "block": 4,
        "run_count": 2,
        "runs": [[0, 4, 4], [4, 0, 4]],
        "tensor": "",
    }


def test_a_budget_that_is_just_enough_to_compare_is_enough_where_rows_moved(tmp_path: Path) -> None:
    api.convert(SAMPLE, tmp_path / "out")
    fused = "transformer.h.0.attn.qkv_proj.weight"
    heads = (fused, slice(0, 4)), (fused, slice(4, 8))
    swapped = exchanged(tmp_path / "out", tmp_path / "swapped", *heads)
    diff = ("diff", tmp_path / "out", swapped, "--memory")

    refused = run(*diff, "1KB").err
    ran = run(*diff, refused.split("--memory ")[1].split(" ")[0])

    assert ran.code == 1
    assert ran.out.splitlines()[-1] == "different: 1 of 13 arrays differs"


def test_tensors_that_changed_places_are_called_so(tmp_path: Path) -> None:
    api.convert(SAMPLE, tmp_path / "out")
    names = "transformer.wte.weight", "lm_head.weight"
    both = exchanged(tmp_path / "out", tmp_path / "both", *((name, slice(0, 32)) for name in names))
    some = exchanged(tmp_path / "out", tmp_path / "some", *((name, slice(0, 31)) for name in names))

    lines = run("diff", SAMPLE, both, "--states", "weights").out.splitlines()
    rows = run("diff", SAMPLE, both, "--states", "weights", "--json").json["differences"]
    assert f"{names[0]}, weight: in B it is what A has as {names[1]}" in lines
    assert [row["moves"]["tensor"] for row in rows] == list(names[::-1])
    assert "what A has as" not in run("diff", SAMPLE, some, "--states", "weights").out


@pytest.mark.parametrize("other", ["transformer.wte.weight", "lm_head.weight"])
def test_tensors_of_which_one_alone_has_what_the_other_had_are_not_called_exchanged(
    tmp_path: Path, other: str
) -> None:
    """The other one has the same elements, in another order."""
    api.convert(SAMPLE, tmp_path / "out")
    names = "transformer.wte.weight", "lm_head.weight"
    both = exchanged(tmp_path / "out", tmp_path / "both", *((name, slice(0, 32)) for name in names))
    turned = exchanged(both, tmp_path / "turned", (other, slice(0, 1)), (other, slice(1, 2)))

    assert "what A has as" in run("diff", SAMPLE, both, "--states", "weights").out
    assert "what A has as" not in run("diff", SAMPLE, turned, "--states", "weights").out


def test_names_of_which_each_has_its_own_are_told_how_they_are_matched(tmp_path: Path) -> None:
    api.convert(SAMPLE, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"lm_head.bias"', b'"lm_tail.bias"'))
    (tmp_path / "out" / "restride.json").unlink()

    ran = run("diff", SAMPLE, tmp_path / "out", "--states", "weights")

    assert ran.out.splitlines()[-1] == (
        "different: 0 of 12 arrays differ, 1 array only in A, 1 array only in B; --rename OLD=NEW "
        "compares those of A under the names of B"
    )


def test_what_only_one_has_is_one_line_and_how_to_leave_it_out(tmp_path: Path) -> None:
    run("convert", SAMPLE, tmp_path / "weights")
    ran = run("diff", tmp_path / "weights", SAMPLE)

    assert ran.code == 1
    only, last = ran.out.splitlines()[2:]
    assert only == "only in B: fp32, exp_avg, exp_avg_sq, step of 13 tensors"
    assert last.startswith("different: 0 of 13 arrays differ, 52 arrays only in B; ")
    assert last.endswith("--states weights compares the weights alone")


def test_what_could_not_be_read_is_not_the_same() -> None:
    """Moments whose numbers have no names would be left out on both sides."""
    pipeline = Path(__file__).parents[1] / "data" / "deepspeed_pipeline" / "fp32_tied_z0"
    for_people = run("diff", pipeline, pipeline)
    for_machines = run("diff", pipeline, pipeline, "--json")
    weights = run("diff", pipeline, pipeline, "--states", "weights")
    fingerprints = run("fingerprint", pipeline)

    assert (for_people.code, for_machines.code, weights.code) == (1, 1, 0)
    assert "not compared, A: the optimizer's states are numbered" in for_people.out
    assert for_people.out.splitlines()[-1].startswith("incomplete: 17 arrays, ")
    assert for_machines.json["verdict"] == "incomplete"
    assert [own["side"] for own in for_machines.json["unread"]] == ["A", "B"]
    assert for_machines.json["unread"][0]["kind"] == "unmatched-states"
    assert fingerprints.code == 2
    assert "the weights alone with --states weights" in fingerprints.err
    assert run("fingerprint", pipeline, "--states", "weights").code == 0
    for command in (("info",), ("check",), ("fingerprint",), ("diff", pipeline)):
        assert run(*command, pipeline, "--pp-tied", "embed=0,5").code == 0


def test_tensors_of_another_name_are_named(converted: Path) -> None:
    ran = run("diff", converted, SAMPLE, "--states", "weights", "--rename", r"(.*)wte(.*)=\1x\2")

    assert ran.code == 1
    assert "only in A: transformer.wte.weight (weight)" in ran.out
    assert "only in B: transformer.wte.weight (weight)" in ran.out
    assert "--states" not in ran.out


def test_a_tolerance_compares_values_and_says_what_was_widened(master: Path) -> None:
    near = run("diff", SAMPLE, master, "--states", "weights", "--rtol", "0.004")

    assert near.code == 0
    assert "13 arrays of them widened exactly" in near.out.splitlines()[-1]


@pytest.mark.parametrize("rule", ["=x", "x"])
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    refused = run("diff", SAMPLE, SAMPLE, "--rename", rule)

    assert refused.code == 2
    assert "is no rule OLD=NEW" in refused.err


def test_fingerprints_replace_no_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "damaged").write_text('{"format": "restride-fingerprint/2", "tensors": 3}')
    os.mkfifo(tmp_path / "pipe")
    api.convert(SAMPLE, tmp_path / "out")
    names = ["mine", "damaged", "out/restride.json", "out/model.safetensors"]
    before = [tmp_path.joinpath(name).read_bytes() for name in names]

    for name in (*names, "pipe"):
        kind = "no file" if name == "pipe" else "no file of fingerprints that can be read"
        for options in ((), ("--force",)):
            refused = run("fingerprint", SAMPLE, "-o", tmp_path / name, *options)
            assert refused.code == 2
            assert refused.err == (
                f"restride: {tmp_path / name}: it exists already, and is {kind}; "
                "choose another name, or move that away or remove it yourself\n"
            )

    assert [tmp_path.joinpath(name).read_bytes() for name in names] == before


def test_fingerprints_are_written_once_and_checked_against(converted: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.json"

    first = run("fingerprint", SAMPLE, "-o", file)
    again = run("fingerprint", SAMPLE, "-o", file)
    forced = run("fingerprint", converted, "-o", file, "--force", "--json")

    assert (first.code, again.code, forced.code) == (0, 2, 0)
    assert "--force" in again.err
    assert json.loads(file.read_text()) == forced.json
    file.write_bytes(b"")
    assert run("fingerprint", converted, "-o", file, "--force").code == 0
    assert json.loads(file.read_text()) == forced.json
    checked = run("check", SAMPLE, "--against", file)
    assert checked.code == 0
    last = checked.out.splitlines()[-1]
    assert last == f"ok: all 65 fingerprints in {file} are those of the checkpoint"


@pytest.mark.parametrize("name", [".", "missing/f.json"])
def test_a_place_where_no_fingerprints_can_be_written_is_refused_before_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(api, "fingerprint", lambda *_, **__: pytest.fail("tensors were read"))

    refused = run("fingerprint", SAMPLE, "-o", tmp_path / name)

    assert refused.code == 2
    assert str(tmp_path / name) in refused.err
    assert list(tmp_path.iterdir()) == []


def test_the_place_of_fingerprints_that_was_meant_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prints").mkdir()
    monkeypatch.chdir(tmp_path)

    assert run("fingerprint", SAMPLE, "-o", "print/f").err.endswith("did you mean 'prints/f'?\n")


def test_of_weights_alone_a_check_says_which_fingerprints_to_take(
    converted: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    run("convert", converted, weights)
    run("fingerprint", SAMPLE, "-o", tmp_path / "all.json")
    run("fingerprint", SAMPLE, "-o", tmp_path / "weights.json", "--states", "weights")

    by_all = run("check", weights, "--against", tmp_path / "all.json")
    by_weights = run("check", weights, "--against", tmp_path / "weights.json")

    assert by_all.out.endswith(
        "52 errors in 13 arrays; of weights alone, take the fingerprints with --states weights\n"
    )
    assert by_weights.code == 0, by_weights.out


def test_a_check_against_other_fingerprints_is_a_finding(master: Path, tmp_path: Path) -> None:
    run("fingerprint", master, "-o", tmp_path / "f.json")

    checked = run("check", SAMPLE, "--against", tmp_path / "f.json", "--json")

    assert checked.code == 1
    kinds = [finding["kind"] for finding in checked.json["findings"]]
    assert kinds == ["fingerprint-differs"] * 13 + ["fingerprint-unknown"]


def test_a_check_is_against_an_output_by_its_folder_and_a_manifest_by_any_name(
    converted: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_bytes((converted / "restride.json").read_bytes())

    for against in (converted, converted / "restride.json", kept):
        checked = run("check", SAMPLE, "--against", against)
        assert checked.code == 0, checked.err
        assert f"all 65 fingerprints in {against} are those of the checkpoint" in checked.out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "it is no JSON (it is empty)"),
        ('{"a":\n ]', "it is no JSON (line 2, column 2: expecting value)"),
        ("{}", "$.format: it is no file of fingerprints: those have the format "),
    ],
)
def test_a_check_against_another_file_says_what_is_wrong_with_it(
    tmp_path: Path, content: str, problem: str
) -> None:
    (tmp_path / "f.json").write_text(content)

    checked = run("check", SAMPLE, "--against", tmp_path / "f.json")

    assert checked.code == 2
    assert checked.err.startswith(f"restride: {tmp_path}/f.json: {problem}")


def test_a_check_waits_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    checked = run("check", SAMPLE, "--against", tmp_path / "pipe")

    assert checked.code == 2
    assert checked.err.endswith(
        "pipe: is not a regular file; name a file that `restride fingerprint -o` wrote, or an "
        "output of a conversion\n"
    )


def test_a_check_against_an_output_whose_arrays_are_cut_says_how_many_it_compared(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    run("convert", SAMPLE, out, "--to", "deepspeed", "--tp", 1, "--dp", 4, "--zero", 3)

    partial = run("check", SAMPLE, "--against", out)
    manifest = manifest_from_json((out / "restride.json").read_bytes(), where="")
    (tmp_path / "none.json").write_bytes(manifest_to_json(replace(manifest, tensors={})))
    none = run("check", SAMPLE, "--against", tmp_path / "none.json")

    assert partial.code == 0
    assert f"note: 52 arrays not compared: {out} has no fingerprint of them [" in partial.out
    assert partial.out.endswith(f"ok: all 13 fingerprints in {out} are those of the checkpoint\n")
    assert none.code == 2
    assert "has no fingerprint, as every array of the output is cut" in none.err


def test_a_check_against_a_folder_that_is_no_output_says_what_to_name(tmp_path: Path) -> None:
    checked = run("check", SAMPLE, "--against", tmp_path)

    assert checked.code == 2
    assert checked.err.endswith(
        ": is a folder without restride.json; name a file that `restride fingerprint -o` wrote, or "
        "an output of a conversion; `restride diff` compares two checkpoints\n"
    )


def test_of_a_file_nothing_is_said_of_ranks(converted: Path) -> None:
    lines = run("check", converted).out.splitlines()

    assert lines[1] == "ok: all 65 arrays are whole"


def test_fingerprints_are_listed_one_a_line() -> None:
    lines = run("fingerprint", SAMPLE, "--states", "weights").out.splitlines()

    assert lines[0].split() == ["fingerprint", "tensor", "state"]
    assert len(lines) == 14
    assert all(len(line.split()[0]) == 32 for line in lines[1:])


def test_what_is_wrong_in_one_of_two_checkpoints_is_said_with_its_name(
    shared: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(shared / "checkpoints/llama_tp2_z1", mixed)
    name = "step/bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    other = name.replace("rank_0_mp_rank_01", "rank_1_mp_rank_00")
    shutil.copyfile(shared / "checkpoints/llama_tp1dp2_z1" / other, mixed / name)

    said = run("diff", SAMPLE, mixed).err

    assert said.startswith(f"restride: {mixed}: {name}: optimizer_state_dict")
    assert said.endswith("put all files of one save, and only those, into the folder\n")
