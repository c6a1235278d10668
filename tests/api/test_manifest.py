"""Every output says what it holds, and a check holds every byte against that."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc

import pytest

import restride
from restride import api
from restride.checkpoint.manifest import Manifest, ManifestFile, ManifestPart, manifest_to_json
from restride.checkpoint.manifest_reading import sizes_of
from restride.errors import ExecutionError
from restride.executors import blocks, manifests
from restride.storage.manifest_files import read_manifest
from restride.testing.command_line import SAMPLE, run
from restride.testing.contents import manifest_from_json, signed

NAME = "restride.json"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    for to in ("safetensors", "universal", "deepspeed"):
        api.convert(SAMPLE, folder / to, to=to, states="all")
    return folder


@pytest.fixture
def output(outputs, tmp_path, request):
    to = getattr(request, "param", "safetensors")
    shutil.copytree(outputs / to, tmp_path / to)
    return tmp_path / to


ALL = pytest.mark.parametrize("output", ["safetensors", "universal", "deepspeed"], indirect=True)


def written_files(folder):
    return {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}


@ALL
def test_a_manifest_names_every_file_with_its_size(output):
    manifest = manifest_from_json((output / NAME).read_bytes(), where=NAME)

    files = written_files(output)
    del files[NAME]
    assert {name: file.nbytes for name, file in manifest.files.items()} == {
        name: path.stat().st_size for name, path in files.items()
    }
    assert manifest.version == restride.__version__


@ALL
def test_what_was_just_written_is_found_to_be_that(output):
    report = api.check(output)

    assert [f for f in report.findings if f.severity == "error"] == []
    total = sum(path.stat().st_size for path in written_files(output).values())
    assert report.verified_nbytes == total - (output / NAME).stat().st_size


@ALL
def test_a_manifest_has_the_fingerprint_of_every_array_that_is_not_cut(output):
    manifest = manifest_from_json((output / NAME).read_bytes(), where=NAME)

    found = pairs(manifest.tensors)
    expected = pairs(restride.fingerprint(output))
    cut = {(n, s) for n, s, _ in expected} - {(n, s) for n, s, _ in found}
    assert found <= expected
    assert {state for _, state in cut} == {
        "safetensors": set(),
        "universal": {"weight"},
        "deepspeed": {"weight", "fp32", "exp_avg", "exp_avg_sq"},
    }[output.name]


def test_another_checkpoint_can_be_held_against_the_fingerprints_of_a_manifest(output):
    same = run("check", SAMPLE, "--against", output / NAME)
    other = output.parent / "other"
    api.convert(SAMPLE, other, states="all", dtype="float16")

    assert same.code == 0, same.out
    assert run("check", other, "--against", output / NAME).code == 1


def pairs(fingerprints):
    return {
        (n, state, digits) for n, states in fingerprints.items() for state, digits in states.items()
    }


@ALL
def test_any_byte_that_is_not_what_was_written_is_found_with_its_place(output):
    files = written_files(output)
    del files[NAME]
    manifest = manifest_from_json((output / NAME).read_bytes(), where=NAME)
    largest = max(files, key=lambda name: files[name].stat().st_size)
    for part in manifest.files[largest].parts:
        content = bytearray(files[largest].read_bytes())
        at = part.start_nbytes + part.nbytes // 2
        content[at] ^= 1
        findings = found_with(output, largest, content)
        (finding,) = [f for f in findings if f.kind == "manifest-digest"]
        assert finding.severity == "error"
        assert finding.where == largest
        start, stop = finding.details["start_nbytes"], finding.details["stop_nbytes"]
        assert start <= at < stop
        assert f"byte {start} to {stop}" in finding.message
        if part.tensor:
            assert f"tensor {part.tensor!r}" in finding.message
            assert finding.details["tensor"] == part.tensor


def found_with(output, name, content):
    """Findings about the files, where one of them has another content."""
    path = output / name
    before = path.read_bytes()
    path.write_bytes(content)
    manifest = manifest_from_json((output / NAME).read_bytes(), where=NAME)
    found = manifests.FoundManifest(output, manifest, "")
    findings = list(manifests.check_manifest(found, workers=2, rows=16, on_read=lambda _: None))
    path.write_bytes(before)
    return findings


def test_files_that_are_missing_or_of_another_size_are_found(output):
    assert "is missing" in missing(output, "state.json")
    findings = found_with(output, "state.json", b"{}")

    assert [f.kind for f in findings] == ["manifest-size"]
    assert findings[0].message.startswith("state.json: the file has 2 bytes, ")


def missing(output, name):
    (output / name).rename(output / "gone")
    (finding,) = [f for f in api.check(output).findings if f.where == name]
    (output / "gone").rename(output / name)
    assert finding.kind == "manifest-size"
    return finding.message


def test_swapped_blocks_and_blocks_of_another_file_are_found(output, monkeypatch):
    for module in (blocks, manifests):
        monkeypatch.setattr(module, "BLOCK_NBYTES", 1024)
    out = output.parent / "small"
    api.convert(SAMPLE, out)
    content = (out / "model.safetensors").read_bytes()
    manifest = manifest_from_json((out / NAME).read_bytes(), where=NAME)
    part = next(p for p in manifest.files["model.safetensors"].parts if len(p.digests) > 3)
    first, second = (
        slice(part.start_nbytes + n * 1024, part.start_nbytes + (n + 1) * 1024) for n in (1, 2)
    )
    swapped = bytearray(content)
    swapped[first], swapped[second] = content[second], content[first]
    assert content[first] != content[second]

    (finding,) = found_with(out, "model.safetensors", bytes(swapped))

    assert finding.details["blocks"] == 2
    assert finding.details["start_nbytes"] == first.start


def test_the_command_tells_of_damage_with_the_exit_code_of_a_finding(output):
    path = output / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)

    ran = run("check", output)

    assert ran.code == 1
    assert "optimizer.safetensors: 1 of " in ran.out
    assert run("check", output, "--json").json["verdict"] == "findings"


def notes(output):
    return [f for f in api.check(output).findings if f.kind == "manifest-unused"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda text: text.replace(b'"version": "', b'"version": "9.'), "not as it was written"),
        (lambda _: b"", "no manifest"),
        (lambda text: bytes(len(text)), "no manifest"),
    ],
    ids=["edited", "empty", "zeros"],
)
def test_a_manifest_that_is_damaged_is_an_error_and_none_is_nothing(output, spoil, problem):
    # A machine that died without a sync may leave it so, and the files that it is of.
    path = output / NAME
    path.write_bytes(spoil(path.read_bytes()))
    report = api.check(output)
    (finding,) = [f for f in report.findings if f.kind == "manifest-damaged"]

    assert finding.severity == "error"
    assert problem in finding.message
    assert report.verdict == "findings"

    path.unlink()
    assert api.check(output).verdict == "ok"
    assert api.check(output).verified_nbytes == 0


@pytest.mark.parametrize("is_link", [True, False])
def test_a_manifest_that_is_no_file_is_an_error(output, is_link):
    path = output / NAME
    path.unlink()
    if is_link:
        path.symlink_to("elsewhere")
    else:
        path.mkdir()

    (finding,) = [f for f in api.check(output).findings if f.kind == "manifest-damaged"]

    assert finding.severity == "error"


def test_a_file_that_a_manifest_describes_in_no_way_of_ours_is_an_error(output):
    value = json.loads((output / NAME).read_bytes())
    value["files"]["model.safetensors"]["parts"][0]["start_nbytes"] = 8
    (output / NAME).write_bytes(signed(value))

    (finding,) = [f for f in api.check(output).findings if f.severity == "error"]

    assert finding.kind == "manifest-damaged"
    assert finding.message.startswith(
        "restride.json: $.files['model.safetensors']: a part starts at byte 8, not 0; the bytes"
    )


def test_a_manifest_that_takes_the_place_of_one_that_is_read_is_told_of(output):
    manifest = read_manifest(output / NAME, where=NAME)
    content = (output / NAME).read_bytes()
    (output / NAME).unlink()
    (output / NAME).write_bytes(content)

    assert sizes_of(manifest)["state.json"] == (output / "state.json").stat().st_size
    with pytest.raises(ExecutionError, match=r"restride\.json: was changed while it was read"):
        manifest.files["state.json"]


def test_of_the_files_of_a_thousand_ranks_one_is_in_memory_at_a_time(tmp_path):
    parts = tuple(ManifestPart(4 * n, 4, (n,), f"layers.{n}.weight", "fp32") for n in range(300))
    files = {f"rank{rank}.pt": ManifestFile(1200, parts) for rank in range(200)}
    path = tmp_path / NAME
    path.write_bytes(manifest_to_json(Manifest("1", "0", 4, files, {})))
    assert path.stat().st_size > 10 << 20

    tracemalloc.start()
    try:
        manifest = read_manifest(path, where=NAME)
        assert all(file == files["rank0.pt"] for file in manifest.files.values())
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_nbytes < 4 << 20


def test_a_pipe_is_no_manifest_and_nobody_waits_for_it(output):
    (output / NAME).unlink()
    os.mkfifo(output / NAME)

    (finding,) = [f for f in api.check(output).findings if f.severity == "error"]

    assert finding.kind == "manifest-damaged"
    assert "is not a regular file" in finding.message


def test_a_manifest_of_another_version_is_a_note(output):
    path = output / NAME
    path.write_bytes(path.read_bytes().replace(b"restride-manifest/2", b"restride-manifest/3"))

    (note,) = notes(output)

    assert note.severity == "note"
    assert "this version reads" in note.message


def test_a_manifest_of_other_files_is_a_note(output):
    value = json.loads((output / NAME).read_bytes())
    manifest = manifest_from_json((output / NAME).read_bytes(), where=NAME)
    other = type(manifest)(value["version"], value["job"], 4096, {}, {})
    (output / NAME).write_bytes(manifest_to_json(other))

    (note,) = notes(output)

    assert "of other files" in note.message
    assert api.check(output).verified_nbytes == 0


@pytest.mark.parametrize("output", ["deepspeed", "universal"], indirect=True)
def test_a_save_of_an_output_is_held_against_the_manifest_beside_it(output):
    (folder,) = [path for path in output.iterdir() if path.is_dir()]

    assert 0 < api.check(folder).verified_nbytes < api.check(output).verified_nbytes


def test_two_conversions_of_one_checkpoint_are_the_same_to_the_last_byte(output):
    api.convert(SAMPLE, output.parent / "again", states="all", workers=1, budget_nbytes=1 << 20)

    for name, path in written_files(output).items():
        assert path.read_bytes() == (output.parent / "again" / name).read_bytes(), name
