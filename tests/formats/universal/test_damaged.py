"""A universal folder is read and written again, or refused, whatever one of its files says."""

from __future__ import annotations

import shutil
from functools import lru_cache
from math import prod
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from restride import api
from restride.errors import RestrideError
from restride.formats.opening import open_training
from restride.storage.torch_zip import open_torch_zip
from restride.testing.mutations import damaged_pickles
from restride.testing.zero_files import Parameter, ZeroRun, write_zero_run

STATES = ("weight", "fp32", "exp_avg", "exp_avg_sq")


def parameter(shape, cut=None, group=0):
    values = {
        state: np.arange(prod(shape), dtype=np.float32).reshape(shape) + 100 * max(place - 1, 0)
        for place, state in enumerate(STATES)
    }
    return Parameter(shape, values, cut, group)


@lru_cache
def folder(stage):
    """A right folder in either shape; examples are made of copies."""
    root = Path(mkdtemp())
    parameters = {
        "up": parameter((4, 2), (0, (3, 1))),
        "norm": parameter((3,), group=1),
        "down": parameter((2, 4), (1, (2, 2))),
    }
    write_zero_run(root / "in", ZeroRun(1, 2, parameters))
    api.convert(root / "in", root / "out", to="universal", stage=stage)
    return root


@pytest.fixture(scope="module", autouse=True)
def _cleaned():
    yield
    for stage in (1, 3):
        shutil.rmtree(folder(stage))


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), stage=st.sampled_from([1, 3]))
def test_a_damaged_file_is_refused_or_harmless(tmp_path_factory, data, stage):
    root = tmp_path_factory.mktemp("damaged")
    made = root / "made"
    shutil.copytree(folder(stage) / "out", made)
    names = sorted(made.rglob("*_model_states.pt")) + sorted(made.rglob("zero/**/*.pt"))
    victim = data.draw(st.sampled_from(names))
    content, read = victim.read_bytes(), open_torch_zip(victim)
    storages = {
        storage.key: content[storage.start_nbytes :][: storage.nbytes]
        for storage in read.storages.values()
    }
    pickle = read.records["data.pkl"]
    stream = content[pickle.start_nbytes :][: pickle.nbytes]
    victim.write_bytes(data.draw(damaged_pickles(stream, storages)))

    try:
        open_training(api.open(made))
        api.convert(made, root / "other", to="universal", stage=4 - stage)
    except RestrideError:
        assert sorted(path.name for path in root.iterdir()) == ["made"]
    else:
        assert api.open(root / "other").format.startswith("deepspeed universal")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_file_that_two_ranks_wrote_at_one_time_is_told_of_and_read(tmp_path, stage):
    """Whoever copies files of a checkpoint beside a universal folder copies such ones, too."""
    shutil.copytree(folder(stage) / "out", tmp_path / "out")
    before = api.open(tmp_path / "out")
    path = min((tmp_path / "out").rglob("*model_states.pt"))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 16] ^= 1
    path.write_bytes(content)

    catalog = api.open(tmp_path / "out")

    (found,) = (finding for finding in catalog.findings if finding not in before.findings)
    assert (found.severity, found.kind, found.where) == ("warning", "written-twice", path.name)
    assert catalog.tensors == before.tensors
    report = api.convert(tmp_path / "out", tmp_path / "again", to="universal")
    assert [finding for finding in report.findings if finding.kind == "written-twice"] == [found]
