"""What `check` compares, and says that it did."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from restride import api
from restride.algebra.coverage import holders
from restride.errors import PlanError
from restride.executors.events import NullObserver
from restride.testing.command_line import SAMPLE


@pytest.mark.parametrize("name", ["gptbigcode_tp2_z1", "llama_tp2_z1", "llama_tp1dp2_z2"])
def test_of_a_tensor_of_which_ranks_share_a_part_that_part_is_counted(name, shared):
    report = api.check(shared / "checkpoints" / name)

    held = [
        (one.numel * entry.dtype.itemsize_nbytes, len(one.ranks))
        for tensor in report.catalog.tensors
        for entry in tensor.states.values()
        for one in holders(entry.layout)
    ]
    assert report.compared_nbytes == sum(nbytes for nbytes, ranks in held if ranks > 1) > 0


class _Reads(NullObserver):
    """Counts what is read of tensors and of files."""

    nbytes = 0

    def on_finish(self, event, /):
        self.nbytes += event.read_nbytes


def changed(folder, tensor, state):
    """Change one byte of an array in a file."""
    catalog = api.open(folder)
    (entry,) = [found.states[state] for found in catalog.tensors if found.name == tensor]
    region = next(region for region in entry.regions if region is not None)
    path = Path(catalog.root, catalog.files[region.file].name)
    content = bytearray(path.read_bytes())
    content[region.start_nbytes + 3] ^= 1
    path.write_bytes(content)


@pytest.fixture
def source(tmp_path):
    return Path(shutil.copytree(SAMPLE, tmp_path / "source"))


def kinds(path, read):
    observer = _Reads()
    report = api.check(path, read=read, observer=observer)
    assert report.read == read
    assert (report.verified_nbytes > 0) == (read == "all")
    assert (report.compared_nbytes + report.rounded_nbytes > 0) == (read != "headers")
    assert (observer.nbytes > 0) == (read != "headers")
    return {finding.kind for finding in report.findings if finding.severity == "error"}


def test_a_check_reads_as_much_as_it_is_told_to_and_finds_what_that_shows(source, tmp_path):
    api.convert(source, tmp_path / "out", to="deepspeed")
    for folder, of_bytes in ((source, "checksum-differs"), (tmp_path / "out", "manifest-digest")):
        changed(folder, "transformer.h.0.attn.out_proj.weight", "exp_avg")
        assert kinds(folder, "headers") == kinds(folder, "copies") == set()
        assert kinds(folder, "all") == {of_bytes}

        changed(folder, "transformer.h.0.mlp.fc_in.weight", "fp32")
        assert kinds(folder, "headers") == set()
        assert kinds(folder, "copies") == {"master-mismatch"}
        assert kinds(folder, "all") == {of_bytes, "master-mismatch"}


def test_headers_alone_tell_of_files_that_are_gone_or_of_another_size(source, tmp_path):
    out = tmp_path / "out"
    api.convert(source, out, states="all")
    with (out / "state.json").open("a") as file:
        file.write("\n")
    next(source.rglob("*_rank_1_mp_rank_01_optim_states.pt")).unlink()

    assert kinds_of_headers(out) == {"manifest-size"}
    assert "missing-file" in kinds_of_headers(source)


def kinds_of_headers(path):
    report = api.check(path, read="headers")
    assert report.verdict == "findings"
    return {finding.kind for finding in report.findings if finding.severity == "error"}


def test_nothing_else_can_be_read():
    with pytest.raises(PlanError, match="'some' does not say what is to be read; say headers, c"):
        api.check(SAMPLE, read="some")
