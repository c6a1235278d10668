"""DeepSpeed's own converter takes our sharded files: its folder of them is ours of their source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from restride import api

from .test_universal import files_below, require_same, without_flat_partitions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.interop

# A source, and ranks and stages that it is written for before the peer converts it.
TARGETS: dict[str, tuple[dict[str, int], ...]] = {
    # Other ranks, more and fewer of either kind, through all stages.
    "llama_tp2_z1": ({"tp": 1, "dp": 3, "zero": 2}, {"tp": 2, "dp": 2, "zero": 3}),
    "llama_tp1dp2_z3": ({"tp": 1, "dp": 1, "zero": 1}, {"tp": 1, "dp": 3, "zero": 3}),
    # Maps of eleven boxes, a source without ZeRO, biases.
    "codegen_fused_tp2_z0": ({"tp": 2, "dp": 1, "zero": 1}, {"tp": 1, "dp": 2, "zero": 3}),
    "codegen_fused_tp2_z1": ({"tp": 2, "dp": 3, "zero": 2}, {"tp": 2, "dp": 1, "zero": 3}),
    # Uneven heads, a fused weight, a vocabulary, a tied weight.
    "llama_unevenkv_tp2_z1": ({"tp": 2, "dp": 2, "zero": 1}, {"tp": 2, "dp": 2, "zero": 3}),
    "bloom_tp2_z1": ({"tp": 2, "dp": 2, "zero": 2}, {"tp": 1, "dp": 2, "zero": 3}),
    "opt_tp2_z1": ({"tp": 2, "dp": 1, "zero": 3}, {"tp": 1, "dp": 1, "zero": 2}),
    "gpt2_tp1dp2_z1": ({"tp": 1, "dp": 3, "zero": 2}, {"tp": 1, "dp": 2, "zero": 3}),
    "llama_tied_tp2_z1": ({"tp": 2, "dp": 2, "zero": 2}, {"tp": 2, "dp": 1, "zero": 3}),
    "mixtral_ep2_z1": ({"tp": 1, "dp": 4, "ep": 4, "zero": 2}, {"tp": 1, "dp": 2, "zero": 3}),
    "mixtral_ep2_z3": ({"tp": 1, "dp": 2, "ep": 2, "zero": 1}, {"tp": 1, "dp": 4, "zero": 3}),
}
CASES = [
    pytest.param(name, target, id=f"{name}-{'-'.join(f'{k}{v}' for k, v in target.items())}")
    for name, targets in TARGETS.items()
    for target in targets
]
# The half of a tied weight that the peer writes under its second name: see test_universal.py.
WRONG = ("llama_tied_tp2_z1", "zero/lm_head.weight/fp32.pt")
# The second name of a router, of which files of ZeRO-3 have nothing.
LACKING = {f"zero/model.layers.{layer}.mlp.gate.gate.weight/fp32.pt" for layer in range(2)}


def label(name: str, target: dict[str, int]) -> str:
    return f"{name}-{'-'.join(map(str, target.values()))}"


@pytest.fixture(scope="module")
def folders(
    convert_as_peer: Callable[..., str], shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`sharded`, our files for every target, and `peer`, what DeepSpeed makes of them."""
    out = tmp_path_factory.mktemp("folders")
    for name, targets in TARGETS.items():
        for target in targets:
            sharded = out / "sharded" / label(name, target)
            options: dict[str, Any] = {"to": "deepspeed", **target}
            api.convert(shared / "checkpoints" / name, sharded, **options)
            assert not convert_as_peer(sharded, out / "peer" / label(name, target))
    return out


@pytest.mark.parametrize(("name", "target"), CASES)
def test_the_folder_of_the_peer_is_that_of_the_source(
    name: str, target: dict[str, int], folders: Path, shared: Path, tmp_path: Path
) -> None:
    theirs = folders / "peer" / label(name, target) / "step"
    api.convert(folders / "sharded" / label(name, target), tmp_path / "again", to="universal")
    stage = 3 if target["zero"] == 3 else 1
    source = shared / "checkpoints" / name
    api.convert(source, tmp_path / "first", to="universal", stage=stage)

    again = tmp_path / "again" / (tmp_path / "again" / "latest_universal").read_text()
    first = tmp_path / "first" / (tmp_path / "first" / "latest_universal").read_text()
    assert files_below(again) == files_below(theirs)
    for file in sorted(files_below(theirs)):
        ours, peers = (torch.load(folder / file, weights_only=False) for folder in (again, theirs))
        if (name, file) == WRONG:
            ours["param"] = ours["param"][: len(peers["param"])]
        require_same(ours, without_flat_partitions(peers), file)
        # Whatever was between: the states of the source, by every bit.
        if file.endswith(("/fp32.pt", "/exp_avg.pt", "/exp_avg_sq.pt")) and file not in LACKING:
            before = torch.load(first / file, weights_only=False)
            if (name, file) == WRONG:
                before["param"] = before["param"][: len(peers["param"])]
            values = [x["param"] if isinstance(x, dict) else x for x in (peers, before)]
            assert torch.equal(values[0].reshape(-1), values[1].reshape(-1)), file
