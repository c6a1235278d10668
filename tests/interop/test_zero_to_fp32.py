"""Everything that `zero_to_fp32` reads is read here, and is the same."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

import numpy as np
import pytest

from restride import api
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

SHARED = ["gpt2_tp1dp2_z1", "llama_tp1dp2_z1", "llama_tp1dp2_z2", "llama_tp1dp2_z3"]
RECORDED = [
    "deepspeed/aligned_frozen_z2",
    "deepspeed/elastic_z1",
    "deepspeed/momentum_z1",
    "deepspeed/partitioned_z3",
    "deepspeed/persistent_momentum_z3",
    "deepspeed/round_robin_z2",
    "deepspeed/tied_frozen_z1",
    "deepspeed_optimizers/muon_z1",
    "deepspeed_optimizers/rmsprop_z3",
]
# What it does not read, and why it says so.
REFUSED = {
    "deepspeed/bf16_optimizer_z1": "is not a zero checkpoint",
    "deepspeed/tensor_parallel_z3": "Expected 2 of",
    "deepspeed/experts_z1": "is not a model state checkpoint",
    "deepspeed/numbered_fp32_z0": "not iterable",
    "deepspeed_pipeline/tied_z1": "has no attribute",
}
# Under ZeRO-1 no file says which weights are frozen, and it leaves them out; empty ones as well.
LEFT_OUT = {"base.weight", "empty"}


def peer(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


def data(root: Path, name: str) -> Path:
    return root / "tests" / "data" / name


def require_same(folder: Path) -> None:
    expected = peer(folder)
    catalog = api.open(folder)
    arrays = gather_all(catalog)
    found = {}
    for tensor in catalog.tensors:
        state = "fp32" if "fp32" in tensor.states else "weight"
        for name in (tensor.name, *tensor.aliases):
            found[name] = (tensor.states[state].dtype.name, arrays[f"{tensor.name}/{state}"])

    assert found.keys() - expected.keys() <= LEFT_OUT
    for name, value in expected.items():
        dtype, array = found[name]
        assert str(value.dtype) == f"torch.{dtype}", name
        stored = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(array.ravel(), stored), name


@pytest.mark.parametrize("name", SHARED)
def test_master_weights_of_real_models_are_those_of_the_peer(name: str, shared: Path) -> None:
    require_same(shared / "checkpoints" / name)


@pytest.mark.parametrize("name", RECORDED)
def test_master_weights_of_every_variant_are_those_of_the_peer(
    name: str, pytestconfig: pytest.Config
) -> None:
    require_same(data(pytestconfig.rootpath, name))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_peer_does_not_read_is_read(name: str, pytestconfig: pytest.Config) -> None:
    folder = data(pytestconfig.rootpath, name)
    with pytest.raises((AttributeError, TypeError, ValueError), match=REFUSED[name]):
        peer(folder)

    assert gather_all(api.open(folder))
