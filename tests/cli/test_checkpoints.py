"""`info`, `check`, `convert` and `demo` on the sample, for people and for machines."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.algebra.serial import layout_from_json
from restride.algebra.signature import same_layout
from restride.layouts import codegen_qkv
from restride.testing.command_line import SAMPLE, run

if TYPE_CHECKING:
    from collections.abc import Callable

FUSED = "transformer.h.0.attn.qkv_proj.weight"
EXPECTED = json.loads((SAMPLE / "expected.json").read_text())["sha256"]


def test_info_describes_each_tensor_for_machines() -> None:
    content = run("info", SAMPLE, "--json").json

    assert content["format"] == "deepspeed zero-1"
    assert content["mesh"] == {"dp": 2, "tp": 2}
    assert len(content["tensors"]) == 13
    fused = content["tensors"][FUSED]
    assert fused["shape"] == [96, 32]
    assert fused["dtype"] == "bfloat16"
    assert set(fused["states"]) == {"weight", "fp32", "exp_avg", "exp_avg_sq", "step"}
    assert fused["states"]["exp_avg"] == {"dtype": "float32", "shape": [96, 32]}


def test_the_layout_that_info_gives_is_the_one_the_engine_cut_with() -> None:
    content = run("info", SAMPLE, "--json").json

    layout = layout_from_json(content["tensors"][FUSED]["layout"])

    assert same_layout(layout, codegen_qkv((96, 32), mesh={"tp": 2}, heads=8))


def test_check_adds_the_verdict_and_the_findings_for_machines() -> None:
    content = run("check", SAMPLE, "--json").json

    assert content["verdict"] == "ok"
    assert content["findings"] == []
    assert content["compared_nbytes"] > 0
    assert set(content["tensors"]) == set(run("info", SAMPLE, "--json").json["tensors"])


def test_a_lost_file_is_one_line_and_not_one_for_every_array_that_it_leaves_a_hole_in(
    shared: Path, tmp_path: Path, copied: Callable[[Path, Path], Path]
) -> None:
    damaged = copied(shared / "checkpoints" / "llama_tp2_z1", tmp_path / "run")
    next(damaged.rglob("*pp_rank_0_mp_rank_01_optim_states.pt")).unlink()

    lines = run("check", damaged).out.splitlines()
    kinds = [finding["kind"] for finding in run("check", damaged, "--json").json["findings"]]

    assert [line.endswith("[missing-file]") for line in lines[:2]] == [False, True]
    assert kinds.count("hole") > 6
    assert sum(line.endswith("[hole]") for line in lines) == 5
    assert lines[-2] == f"... and {kinds.count('hole') - 5} more [hole]; --json lists all"


def test_a_finding_exits_with_one_and_is_told_once_per_line(tmp_path: Path) -> None:
    damaged = drifted_copy(tmp_path)

    for_people, for_machines = run("check", damaged), run("check", damaged, "--json")

    assert (for_people.code, for_machines.code) == (1, 1)
    content = for_machines.json
    assert content["verdict"] == "findings"
    assert [finding["kind"] for finding in content["findings"]] == [
        "replica-drift",
        "checksum-differs",
    ]
    finding = content["findings"][0]
    assert finding["details"]["ranks"] == [0, 1]
    assert finding["details"]["coordinates"] == [{"tp": 0}, {"tp": 1}]
    lines = for_people.out.splitlines()
    assert lines[2] == "error: ranks hold different copies in 1 array of 1 tensor [replica-drift]"
    assert " ".join(lines[4].split()) == (
        "transformer.ln_f.bias 1 tp=0 and tp=1 1 of 5 1 of 32 7.63e-06 (weight)"
    )
    assert lines[-2].startswith("A file changed after it was written (checksum-differs above)")
    assert lines[-1] == "2 errors in 65 arrays"


def test_a_conversion_of_replicas_that_differ_is_refused_with_the_way_to_decide(
    tmp_path: Path,
) -> None:
    damaged = drifted_copy(tmp_path)

    refused = run("convert", damaged, tmp_path / "out")
    decided = run("convert", damaged, tmp_path / "out", "--replicas", "first", "--json")

    assert refused.code == 2
    assert "--replicas" in refused.err or "first" in refused.err
    assert refused.err.count("\n") == 1
    assert decided.code == 0
    assert decided.json["findings"][0]["severity"] == "warning"


def drifted_copy(folder: Path) -> Path:
    """A copy of the sample in which rank 1 holds another bias than rank 0."""
    copy = folder / "drifted"
    shutil.copytree(SAMPLE, copy)
    catalog = api.open(copy)
    entry = next(t for t in catalog.tensors if t.name == "transformer.ln_f.bias").states["weight"]
    region = entry.regions[1]
    assert region is not None
    path = Path(catalog.root, catalog.files[region.file].name)
    content = bytearray(path.read_bytes())
    content[region.start_nbytes] ^= 1
    path.write_bytes(content)
    return copy


def test_the_weights_are_converted_bit_for_bit_under_their_own_names(tmp_path: Path) -> None:
    out = tmp_path / "out"

    content = run("convert", SAMPLE, out, "--json").json

    assert content["files"] == ["model.safetensors"]
    assert content["tensors"] == 13
    assert digests(out / "model.safetensors") == {
        key.removesuffix("/weight"): digest
        for key, digest in EXPECTED.items()
        if key.endswith("/weight")
    }


def test_all_states_are_converted_bit_for_bit_as_the_peer_converts_them(tmp_path: Path) -> None:
    out = tmp_path / "out"

    ran = run("convert", SAMPLE, out, "--states", "all", "--max-shard-size", "50kB")

    assert ran.code == 0
    assert json.loads((out / "state.json").read_text())
    found: dict[str, str] = {}
    for path in sorted(out.glob("optimizer-*.safetensors")):
        assert path.stat().st_size < 60_000
        found |= digests(path)
    assert {k: v for k, v in found.items() if not k.endswith("/step")} == {
        key: digest for key, digest in EXPECTED.items() if not key.endswith("/weight")
    }


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a safetensors file, read without our own reader."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        ).hexdigest()
        for name, entry in header.items()
    }


def test_the_dtype_of_the_weights_comes_from_the_master_copy(tmp_path: Path) -> None:
    run("convert", SAMPLE, tmp_path / "out", "--dtype", "float32")

    found = digests(tmp_path / "out" / "model.safetensors")

    assert found[FUSED] == EXPECTED[f"{FUSED}/fp32"]


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")

    for options in ((), ("--force",), ("--force", "--dry-run")):
        refused = run("convert", SAMPLE, out, *options)
        assert refused.code == 2
        assert refused.err == (
            f"restride: {out}: holds precious, which restride did not write; "
            "move it away or remove it yourself, or name another output\n"
        )
    assert (out / "precious").read_text() == "mine"
    (out / "precious").unlink()
    assert run("convert", SAMPLE, out).code == 0
    refused = run("convert", SAMPLE, out)
    assert refused.code == 2
    assert "or replace all of it with --force" in refused.err
    assert run("convert", SAMPLE, out, "--force").code == 0
    assert (out / "model.safetensors").exists()


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    ran = run("convert", SAMPLE, tmp_path / "out", "--memory", "1kB")

    assert ran.code == 2
    assert "budget" in ran.err
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_is_unknown_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    ran = run("convert", SAMPLE, tmp_path / "out", "--dtype", "float31")

    assert ran.code == 2
    assert "bfloat16" in ran.err
    assert ran.err.count("\n") == 1


def test_what_was_converted_can_be_read_and_checked_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("convert", SAMPLE, out)

    content = run("check", out, "--json").json

    assert content["verdict"] == "ok"
    assert content["format"].startswith("safetensors")
    assert set(content["tensors"]) == set(run("info", SAMPLE, "--json").json["tensors"])


def test_the_demo_compares_every_state_with_the_conversion_of_the_peer() -> None:
    ran = run("demo", "--json")

    assert ran.code == 0
    assert ran.json == {
        "verdict": "ok",
        "pieces": 1,
        "arrays": 65,
        "compared": 52,
        "different": [],
    }
    assert len(EXPECTED) == 52


def test_the_demo_would_notice_a_wrong_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = api.convert
    # Rounding twice is what a careless conversion would do.
    monkeypatch.setattr(
        api,
        "convert",
        lambda source, out, states: convert(source, out, states=states, dtype="float16"),
    )

    ran = run("demo", "--json")

    assert ran.code == 1
    assert ran.json["verdict"] == "findings"
    assert f"{FUSED}/weight" in ran.json["different"]
    assert f"{FUSED}/exp_avg" not in ran.json["different"]
    told = run("demo").out
    assert f"{FUSED}/weight is not what DeepSpeed's own conversion makes of it\n" in told
    assert "conversion: the same" not in told


def test_the_sample_is_small() -> None:
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) < 300_000


@pytest.mark.interop
def test_the_peer_needs_the_number_of_boxes_that_the_demo_says() -> None:
    from deepspeed.checkpoint.affine import block_gather_map
    from deepspeed.module_inject.fusedqkv_utils import codegen_block_layout

    for ranks, boxes in ((2, 11), (4, 12)):
        block, ids = codegen_block_layout(96, ranks, 4 * ranks)
        pieces = block_gather_map((96, 32), ids, block, 0).pieces_by_rank
        assert {len(pieces[rank]) for rank in range(ranks)} == {boxes}


def test_files_that_no_ranks_wrote_name_none(tmp_path):
    converted = tmp_path / "converted"
    assert run("convert", SAMPLE, converted).code == 0

    assert run("info", converted).out.splitlines()[0] == f"{converted}: safetensors"


def test_all_that_a_universal_folder_does_not_say_of_the_next_run_is_asked_for_at_once(
    tmp_path: Path,
) -> None:
    assert run("convert", SAMPLE, tmp_path / "universal", "--to", "universal").code == 0
    convert = ("convert", tmp_path / "universal", tmp_path / "out", "--to", "deepspeed")

    ran = run(*convert)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("say what the next run has: --dp N --zero STAGE\n")
    assert run(*convert, "--dp", "2").err.endswith("say what the next run has: --zero STAGE\n")
    assert run(*convert, "--dp", "2", "--zero", "0").code == 0


def test_what_python_wrote_is_what_the_command_line_would_have_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.convert(SAMPLE, out)

    assert run("convert", SAMPLE, out, "--resume", "--json").json["read_nbytes"] == 0
    refused = run("convert", SAMPLE, out, "--resume", "--states", "all", "--replicas", "first")
    assert "without --states all, without --replicas first;" in refused.err


@pytest.mark.parametrize(
    ("read", "told", "last"),
    [
        ("headers", 2, "not all was read: no copies were compared, and no bytes held against "),
        ("copies", 3, "not all was read: no bytes held against checksums"),
        ("all", 3, "ok: 264 kB of files are what was written"),
    ],
)
def test_a_check_that_reads_less_says_so_at_its_end(read: str, told: int, last: str) -> None:
    lines = run("check", SAMPLE, "--read", read).out.splitlines()[1:]

    assert len(lines) == told
    assert lines[0].startswith("ok: all 65 arrays are whole")
    assert lines[-1].startswith(last)
    assert run("check", SAMPLE, "--read", read, "--json").json["read"] == read


def test_a_check_that_reads_less_says_so_where_it_finds_something_too(tmp_path: Path) -> None:
    damaged = shutil.copytree(SAMPLE, tmp_path / "run")
    next(damaged.rglob("*_rank_1_mp_rank_01_optim_states.pt")).unlink()

    ran = run("check", damaged, "--read", "headers")

    assert ran.code == 1
    assert ran.out.splitlines()[-1].startswith("not all was read: no copies were compared")
