"""Checkpoints that the real engine saved, as universal folders of both shapes and back again."""

from __future__ import annotations

from pathlib import Path

import pytest

from restride import api
from restride.errors import UnsupportedError
from restride.formats.opening import open_training
from restride.testing.gather import gather_all

RECORDED = Path(__file__).parents[2] / "data" / "deepspeed"
NAMES = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_says_of_every_tensor_what_its_source_says(name, stage, tmp_path):
    source = api.open(RECORDED / name)
    if stage == 3 and "momentum" in name:
        with pytest.raises(UnsupportedError, match=r"no state 'exp_avg'.*--stage 1"):
            api.convert(RECORDED / name, tmp_path / "out", to="universal", stage=stage)
        return

    api.convert(RECORDED / name, tmp_path / "out", to="universal", stage=stage)

    made = api.open(tmp_path / "out")
    assert [t.name for t in made.tensors] == [t.name for t in source.tensors]
    for tensor, original in zip(made.tensors, source.tensors, strict=True):
        assert (tensor.kind, tensor.layout) == (original.kind, original.layout), tensor.name
        assert (tensor.is_frozen, tensor.aliases) == (original.is_frozen, original.aliases)
        assert tensor.trained_dtype == original.trained_dtype
    found, expected = gather_all(made), gather_all(source)
    for key, array in expected.items():
        is_dropped = key.endswith("/weight") and f"{key.removesuffix('weight')}fp32" in expected
        assert key in found or is_dropped
        if key in found:
            assert found[key].tobytes() == array.tobytes(), key
    here, there = (open_training(catalog) for catalog in (made, source))
    assert [group.names for group in here.groups] == [group.names for group in there.groups]
    assert [group.settings for group in here.groups] == [group.settings for group in there.groups]
    # A name of the module that no file has a tensor of is dropped with the empty one it stood for.
    assert here.order == tuple(name for name in there.order if name in here.order)
    dropped = {*there.order} - {*here.order}
    assert dropped.isdisjoint(name for t in source.tensors for name in (t.name, *t.aliases))
