"""What model files say of the cut: maps, and for older converters lists of patterns."""

from __future__ import annotations

import numpy as np
import pytest

from restride import api
from restride.algebra.mesh import as_mesh
from restride.algebra.signature import same_layout
from restride.errors import UnsupportedError
from restride.formats.deepspeed.reader import read_catalog
from restride.formats.deepspeed.target import DeepSpeedTarget
from restride.formats.deepspeed.training import read_training
from restride.formats.deepspeed.writer import lay_out
from restride.layouts import codegen_qkv, padded, replicated, split, sub_params
from restride.storage.torch_zip import open_torch_zip
from restride.testing.exporting import write_export
from restride.testing.gather import gather_all
from restride.testing.saved_values import edit_file
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run
from restride.testing.zero_runs import distinct

MESH = as_mesh("tp=2")
STATES = ("weight", "fp32", "exp_avg")


def write(tmp_path, layouts, extra=None):
    """Write parameters of these layouts for two ranks, from one that has them whole."""
    parameters = {
        name: Parameter(
            layout.full_shape,
            {
                state: distinct(layout.full_shape, 10_000 * n + 1000 * m)
                for m, state in enumerate(STATES)
            },
        )
        for n, (name, layout) in enumerate(layouts.items())
    }
    write_zero_run(tmp_path / "run", ZeroRun(1, 1, parameters, extra=extra or {}))
    source = read_catalog(tmp_path / "run")
    export = lay_out(source, read_training(source), DeepSpeedTarget(2, 3, 2), layouts)
    write_export(source, export, tmp_path / "out")
    return source


def without_maps(folder):
    for path in (folder / "step").glob("mp_rank_*"):
        edit_file(path, lambda value: value["universal_checkpoint_info"].pop("affine_map") and None)


def info_of(folder):
    value = open_torch_zip(folder / "step" / "mp_rank_00_model_states.pt").value
    return value["universal_checkpoint_info"]


def require_read_as(folder, layouts, source):
    read = read_catalog(folder)
    for tensor in read.tensors:
        assert same_layout(tensor.layout, layouts[tensor.name]), tensor.name
    expected, found = gather_all(source), gather_all(read)
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_lists_alone_say_the_same_as_the_maps(tmp_path):
    layouts = {
        "embed.weight": split((6, 3), mesh=MESH),
        "q.weight": split((5, 3), mesh=MESH, sizes=[3, 2]),
        "down.weight": split((3, 4), mesh=MESH, dim=1),
        "qkv.weight": sub_params(
            (8, 3), mesh=MESH, sizes=[4, 2, 2], widths=[[3, 1], [1, 1], [0, 2]]
        ),
        "norm.weight": replicated((3,), mesh=MESH),
        "q.bias": split((5,), mesh=MESH, sizes=[3, 2]),
    }

    source = write(tmp_path, layouts)
    require_read_as(tmp_path / "out", layouts, source)
    without_maps(tmp_path / "out")

    require_read_as(tmp_path / "out", layouts, source)


LISTS = {
    "universal_checkpoint_info": {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": [".*norm.*"],
        "parameter_with_row_parallelism_patterns": [".*down.*"],
    }
}


def test_a_model_that_says_it_in_lists_has_lists_alone(tmp_path):
    """A universal folder is marked by them, and an engine of such a model asks for the marks."""
    layouts = {
        "embed.weight": split((6, 3), mesh=MESH),
        "down.weight": split((3, 4), mesh=MESH, dim=1),
        "norm.weight": replicated((3,), mesh=MESH),
    }

    source = write(tmp_path, layouts, LISTS)

    require_read_as(tmp_path / "out", layouts, source)
    assert "affine_map" not in info_of(tmp_path / "out")
    api.convert(tmp_path / "out", tmp_path / "folder", to="universal")
    (path,) = tmp_path.glob("folder/*/zero/down.weight/fp32.pt")
    assert open_torch_zip(path).value["cat_dim"] == 1


def test_maps_are_there_where_lists_would_say_something_else(tmp_path):
    layouts = {
        "qkv.weight": codegen_qkv((48, 3), mesh=MESH, heads=16),
        "norm.weight": replicated((3,), mesh=MESH),
    }

    source = write(tmp_path, layouts, LISTS)

    require_read_as(tmp_path / "out", layouts, source)
    assert "affine_map" in info_of(tmp_path / "out")


def test_a_padded_vocabulary_is_described_by_its_size(tmp_path):
    layouts = {
        "embed.weight": padded((5, 3), mesh=MESH, rows=8, fill="undefined"),
        "norm.weight": replicated((3,), mesh=MESH),
    }

    source = write(tmp_path, layouts)

    require_read_as(tmp_path / "out", layouts, source)
    info = info_of(tmp_path / "out")
    assert info["original_vocab_size"] == 5
    assert list(info["affine_map"]["params"]) == ["^norm\\.weight$"]


def test_a_second_vocabulary_of_another_size_is_none(tmp_path):
    """DeepSpeed's converter cuts every one in the list to the size of the first."""
    layouts = {
        "embed.weight": split((6, 3), mesh=MESH),
        "embed_positions.weight": split((10, 3), mesh=MESH),
    }

    source = write(tmp_path, layouts)

    info = info_of(tmp_path / "out")
    assert info["vocabulary_parameter_patterns"] == ["^embed\\.weight$"]
    assert info["original_vocab_size"] == 6
    require_read_as(tmp_path / "out", layouts, source)


def test_padding_of_anything_else_has_no_words(tmp_path):
    layouts = {"up.weight": padded((3, 5), mesh=MESH, rows=6, dim=1)}

    with pytest.raises(UnsupportedError, match=r"^parameter 'up.weight': .* padded addresses"):
        write(tmp_path, layouts)


def test_what_the_source_says_besides_is_carried_with_the_version_of_the_maps(tmp_path):
    layouts = {"norm.weight": replicated((3,), mesh=MESH)}
    said = {"universal_checkpoint_version": 0.2, "pipeline_replicated": ["norm"]}

    write(tmp_path, layouts, {"universal_checkpoint_info": said})

    info = info_of(tmp_path / "out")
    assert info["universal_checkpoint_version"] == 0.4
    assert info["pipeline_replicated"] == ["norm"]
