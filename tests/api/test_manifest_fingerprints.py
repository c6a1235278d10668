"""The fingerprints of a manifest are of what a reader finds in the files, opening every one."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorded import SHARED
from restride import api
from restride.arrays.fingerprint import MODULUS, finish
from restride.checkpoint.manifest import MANIFEST_NAME
from restride.errors import CoverageError, RuleError, UnsupportedError
from restride.formats.opening import open_catalog
from restride.planning.jobs import whole_layout
from restride.testing.command_line import SAMPLE
from restride.testing.contents import manifest_from_json

TENSOR_PARALLEL_Z3 = Path(__file__).parents[1] / "data" / "deepspeed" / "tensor_parallel_z3"
TARGETS = {
    "safetensors": {"states": "all"},
    "universal": {"to": "universal"},
    "partitioned": {"to": "universal", "stage": 3},
    "ranks": {"to": "deepspeed", "replicas": "own"},
    "whole": {"to": "deepspeed", "tp": 1, "dp": 1, "zero": 0},
    "chunks": {"to": "deepspeed", "tp": 1, "dp": 3, "zero": 3},
}
# What cannot be written of some source: not of interest here.
REFUSED = (CoverageError, RuleError, UnsupportedError)


def read_back(catalog, files):
    """Fingerprints of the arrays that stand in one part of a file each."""
    parts = {(name, part.start_nbytes): part for name, file in files.items() for part in file.parts}
    found = {}
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            shape, region = entry.layout.full_shape, entry.regions[0]
            is_whole = entry.layout.pieces(0) == whole_layout(shape).pieces(0)
            if region is None or not is_whole:
                continue
            part = parts.get((catalog.files[region.file].name, region.start_nbytes))
            if part and part.nbytes == entry.layout.full_numel * entry.dtype.itemsize_nbytes:
                digits = finish(sum(part.digests) % MODULUS, entry.dtype.name, shape)
                found.setdefault(tensor.name, {})[state] = digits
    return found


def require_same_as_read_back(source, folder):
    """Convert to every target, and compare; return how many tensors had fingerprints."""
    found = 0
    for name, wanted in TARGETS.items():
        out = folder / name
        try:
            api.convert(source, out, durable=False, **{"replicas": "first", **wanted})
        except REFUSED:
            continue
        manifest = manifest_from_json((out / MANIFEST_NAME).read_bytes(), where=MANIFEST_NAME)
        assert manifest.tensors == read_back(open_catalog(out), manifest.files)
        found += len(manifest.tensors)
    return found


def test_a_manifest_has_the_fingerprints_of_what_is_read_back(tmp_path):
    assert require_same_as_read_back(SAMPLE, tmp_path)


def test_so_has_that_of_an_output_with_copies_of_model_files(tmp_path):
    """Those of ZeRO-3 go to a universal folder as they are, and two have one size."""
    assert require_same_as_read_back(TENSOR_PARALLEL_Z3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_so_has_that_of_a_real_checkpoint(name, shared, tmp_path):
    assert require_same_as_read_back(shared / "checkpoints" / name, tmp_path)
