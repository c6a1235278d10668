"""Pipelines beside DeepSpeed's own converter, and the real engine with other stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.errors import ReplicaError
from restride.testing.gather import gather_all

from .test_universal import files_below, require_same

if TYPE_CHECKING:
    from collections.abc import Callable

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

TIED = "tied_modules.embed.weight"
ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "deepspeed_pipeline"
CONVERTED = ["shared_z1", "tensor_z1", "tied_z1"]
# The last stage stops the peer: it looks for the shapes in the model files, and the file of
# BF16_Optimizer without ZeRO has them in the optimizer files.
REFUSED = "bf16_z0"
# Its stages hold different copies of a tied layer: see below.
DRIFTED = "uneven_z1"
# The variant of scripts/record_pipeline_checkpoints.py, on one stage.
TIED_Z1 = {
    "pp": 1,
    "dp": 1,
    "groups": True,
    "frozen": True,
    "layers": ["embed", "block", "function", "block", "norm", "embed_as_head"],
    "config": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": True},
    },
}


@pytest.fixture(scope="module")
def peer(convert_as_peer: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed's own converter makes of pipelines."""
    out = tmp_path_factory.mktemp("peer")
    for name in (*CONVERTED, DRIFTED):
        assert not convert_as_peer(RECORDED / name, out / name)
    return out


@pytest.mark.parametrize("name", CONVERTED)
def test_every_tensor_of_every_stage_is_that_of_the_peer(
    name: str, peer: Path, tmp_path: Path
) -> None:
    theirs = peer / name / "step"

    api.convert(RECORDED / name, tmp_path / "ours", to="universal")

    ours = tmp_path / "ours" / "step_universal"
    for file in sorted(files_below(theirs)):
        a, b = (torch.load(folder / file, weights_only=False) for folder in (ours, theirs))
        require_same(a, b, file)
    # The peer has no frozen weights of pipelines: it looks for them in the model files.
    frozen = {tensor.name for tensor in api.open(RECORDED / name).tensors if tensor.is_frozen}
    added = files_below(ours) - files_below(theirs)
    assert added == {f"zero/{tensor}/fp32.pt" for tensor in frozen}


def test_of_copies_that_drifted_the_peer_takes_the_one_that_it_reads_last(
    peer: Path, tmp_path: Path
) -> None:
    """It says nothing. The fragments of both stages have the same names, and replace each other."""
    with pytest.raises(ReplicaError):
        api.convert(RECORDED / DRIFTED, tmp_path / "checked", to="universal")
    states = ["fp32", "exp_avg", "exp_avg_sq"]
    theirs = [peer / DRIFTED / "step" / "zero" / TIED / f"{state}.pt" for state in states]

    same = {}
    for stage in range(2):
        out = tmp_path / str(stage)
        api.convert(RECORDED / DRIFTED, out, to="universal", replicas=f"pp={stage}")
        ours = [out / "step_universal" / "zero" / TIED / f"{state}.pt" for state in states]
        same[stage] = all(
            torch.equal(torch.load(one)["param"], torch.load(other)["param"])
            for one, other in zip(ours, theirs, strict=True)
        )

    assert same == {0: False, 1: True}


def test_what_the_peer_cannot_convert_is_converted(
    convert_as_peer: Callable[..., str], tmp_path: Path
) -> None:
    said = convert_as_peer(RECORDED / REFUSED, tmp_path / "theirs")
    assert "param_shapes must contain dictionaries" in said

    api.convert(RECORDED / REFUSED, tmp_path / "ours", to="universal")

    source, ours = (gather_all(api.open(path)) for path in (RECORDED / REFUSED, tmp_path / "ours"))
    expected = {key for key in source if not key.endswith("/weight")}
    assert expected == ours.keys()
    for key in expected:
        assert ours[key].tobytes() == source[key].tobytes(), key


def test_the_real_engine_resumes_two_stages_on_one(
    engine: Callable[..., list[str]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    api.convert(RECORDED / "tied_z1", tmp_path / "ours", to="universal")

    engine(
        script=["record_pipeline_checkpoints", "resume"],
        variant={**TIED_Z1, "load": tmp_path / "ours"},
        out=tmp_path / "held",
    )

    held = load_file(tmp_path / "held" / "reference_pp0_tp0.safetensors")
    saved = [load_file(file) for file in sorted((RECORDED / "tied_z1").glob("reference_*"))]
    assert len(saved) == 2
    assert held.keys() == saved[0].keys() | saved[1].keys()
    for stage in saved:
        for key, tensor in stage.items():
            assert torch.equal(held[key], tensor), key
