"""Every optimizer that the engine takes: states under their own names, none invented, none lost.

The oracle loads the files with torch and slices the partitions by hand: end to end for ZeRO-1 and
ZeRO-2, parameter by parameter for ZeRO-3, and whole where Muon keeps its momentum whole.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from restride import api
from restride.testing.documents import tables_of
from restride.testing.gather import gather_all

if TYPE_CHECKING:
    from collections.abc import Callable

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "deepspeed_optimizers"
# Moments by optimizer, and what it counts once for all parameters of a group.
NAMES = {
    name.strip("`"): (arrays.split(", ") if arrays else [], scalars.split(", ") if scalars else [])
    for name, arrays, scalars in tables_of(ROOT / "docs" / "formats.md")[2]
}
MUON = {True: {"momentum_buffer"}, False: {"exp_avg", "exp_avg_sq"}}


def load(folder: Path, pattern: str) -> list[Any]:
    files = sorted((folder / "step").glob(pattern))
    return [torch.load(file, weights_only=False) for file in files]


def by_hand(folder: Path) -> dict[str, Any]:
    """Slice every state of every parameter out of the flat tensors of all ranks."""
    model = load(folder, "*model_states.pt")[0]
    files = [file["optimizer_state_dict"] for file in load(folder, "*optim_states.pt")]
    is_partitioned = "fp32_flat_groups" in files[0]
    found: dict[str, Any] = {}
    for number, shapes in enumerate(model["param_shapes"]):
        masters = "fp32_flat_groups" if is_partitioned else "single_partition_of_fp32_groups"
        base = "optimizer_state_dict" if is_partitioned else "base_optimizer_state"
        ranks = [{"fp32": file[masters][number], **own(file[base], number)} for file in files]
        for key, value in ranks[0].items():
            if not torch.is_tensor(value):
                continue
            flats = [rank[key] for rank in ranks]
            for name, tensor in sliced(shapes, flats, is_partitioned=is_partitioned).items():
                found[f"{name}/{key}"] = tensor
    return found


def own(base: dict[str, Any], number: int) -> dict[str, Any]:
    return base["state"].get(number, {})


def sliced(shapes: dict[str, Any], flats: list[Any], *, is_partitioned: bool) -> dict[str, Any]:
    if not flats[0].ndim:
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        return dict.fromkeys(shapes, flats[0])
    total = sum(prod(shape) for shape in shapes.values())
    found: dict[str, Any] = {}
    if is_partitioned:
        start = 0
        for name, shape in shapes.items():
            width = -(-prod(shape) // len(flats))
            whole = torch.cat([flat[start : start + width] for flat in flats])
            found[name] = whole[: prod(shape)].view(shape)
            start += width
        return found
    if sum(map(len, flats)) > total + 4 * len(flats):  # Muon: whole wherever there is a part of it
        for flat in flats:
            names = list(shapes)
            # Here the first rank has a part of the first parameter only, the last of all.
            held = names if len(flat) == total else names[:1]
            for name, part in zip(held, flat.split([prod(shapes[n]) for n in held]), strict=True):
                assert torch.equal(found.setdefault(name, part.view(shapes[name])).ravel(), part)
        return found
    joined, start = torch.cat(flats), 0
    for name, shape in shapes.items():
        found[name] = joined[start : start + prod(shape)].view(shape)
        start += prod(shape)
    return found


def require_same(folder: Path, out: Path) -> set[str]:
    """Compare with the oracle, before and after a conversion; the names of the states."""
    expected = by_hand(folder)
    api.convert(folder, out, states="all")
    for read in (gather_all(api.open(folder)), gather_all(api.open(out))):
        optimized = {key for key in read if not key.endswith("/weight")}
        assert optimized == expected.keys()
        for key, tensor in expected.items():
            stored = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(read[key].ravel(), stored), key
    return {key.rpartition("/")[2] for key in expected}


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir()))
def test_recorded_states_are_those_that_torch_loads(name: str, tmp_path: Path) -> None:
    states = require_same(RECORDED / name, tmp_path / "out")

    optimizer, _, _ = name.rpartition("_z")
    arrays, scalars = NAMES.get(optimizer, ((*MUON[True], *MUON[False]), ()))
    assert states == {"fp32", *arrays, *scalars}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_has_states_by_the_kind_of_group(stage: int) -> None:
    catalog = api.open(RECORDED / f"muon_z{stage}")
    groups: Any = catalog.values["optimizer"]
    entries = {tensor.name: tensor for tensor in catalog.tensors}

    assert len(groups["param_groups"]) == 2
    for group in groups["param_groups"]:
        for name in group["params"]:
            assert entries[name].states.keys() - {"weight", "fp32"} == MUON[group["use_muon"]]
    momentum = entries["0.weight"].states["momentum_buffer"]
    assert momentum.dtype.name == "bfloat16"
    # Both ranks update a part of it; under ZeRO-3 each keeps its own part of the momentum.
    held = [momentum.layout.shard_numel(rank) for rank in range(2)]
    assert held == ([21, 21] if stage == 3 else [42, 42])
    assert not catalog.findings


@pytest.mark.slow
def test_every_optimizer_of_torch_at_every_stage(
    engine: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    engine(
        script=["record_optimizer_checkpoints", "train"],
        variant={"names": [*NAMES]},
        out=tmp_path / "runs",
        world=2,
    )

    assert json.loads((tmp_path / "runs" / "refused.json").read_text()) == {}
    for name, (arrays, scalars) in NAMES.items():
        for stage in (1, 2, 3):
            label = f"{name}_z{stage}"
            states = require_same(tmp_path / "runs" / label, tmp_path / label)
            assert states == {"fp32", *arrays, *scalars}, label
