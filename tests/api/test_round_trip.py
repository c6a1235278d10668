"""A checkpoint that went around through other ranks, stages and formats is what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from restride import api
from restride.algebra.signature import same_layout
from restride.comparison import diff, fingerprint
from restride.testing.command_line import SAMPLE

if TYPE_CHECKING:
    from pathlib import Path


def sharded(tp: int, dp: int, zero: int) -> dict[str, object]:
    return {"to": "deepspeed", "tp": tp, "dp": dp, "zero": zero}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama.json"
    path.write_text('{"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}')
    return path


def test_every_state_comes_back_from_other_ranks_and_stages_bit_for_bit(
    shared: Path, tmp_path: Path, llama: Path
) -> None:
    source = shared / "checkpoints" / "llama_tp2_z1"
    cuts = [sharded(2, 2, 1), sharded(4, 1, 3), sharded(1, 4, 2), sharded(2, 2, 1)]
    at = source
    for number, cut in enumerate(cuts):
        at = api.convert(at, tmp_path / str(number), **cut, config=llama).out

    first, last = (api.open(tmp_path / number).tensors for number in ("0", "3"))
    assert [tensor.states for tensor in first] == [tensor.states for tensor in last]
    assert diff(source, at).verdict == diff(tmp_path / "0", at).verdict == "same"


def test_a_permuted_fused_weight_comes_back_too(tmp_path: Path) -> None:
    codegen = tmp_path / "codegen.json"
    codegen.write_text('{"model_type": "codegen", "n_head": 16, "n_embd": 32}')
    at = SAMPLE
    for number, cut in enumerate([sharded(4, 1, 3), sharded(1, 4, 2), sharded(2, 2, 1)]):
        options = {**cut, "config": codegen, "plan": False}
        at = api.convert(at, tmp_path / str(number), **options).out

    for before, after in zip(api.open(SAMPLE).tensors, api.open(at).tensors, strict=True):
        assert same_layout(before.layout, after.layout), before.name
    assert diff(SAMPLE, at).verdict == "same"


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        (
            "llama_tp2_z1_fp32",
            [sharded(*cut) for cut in ((1, 1, 1), (2, 2, 2), (4, 1, 3), (4, 2, 1), (1, 3, 3))],
        ),
        ("codegen_fused_tp2_z0", [sharded(2, 2, 1), sharded(1, 2, 3)]),
        ("llama_tp1dp2_z3", [sharded(1, 1, 1), sharded(1, 3, 3)]),
    ],
)
def test_fingerprints_are_those_of_every_other_sharding_and_format(
    name: str, cuts: list[dict[str, object]], shared: Path, tmp_path: Path, llama: Path
) -> None:
    source = shared / "checkpoints" / name
    expected = fingerprint(source)
    if name.startswith("llama"):
        cuts = [{**cut, "config": llama} for cut in cuts]
    others = [*cuts, {"to": "universal"}, {"to": "safetensors", "states": "all"}]

    for number, options in enumerate(others):
        found = fingerprint(api.convert(source, tmp_path / str(number), **options).out)
        for tensor, states in found.items():
            for state, digits in states.items():
                # ZeRO-3 keeps no weight and universal folders none of their own: not all is in all.
                assert expected[tensor].get(state, digits) == digits, (options, tensor, state)
        kept = {(tensor, state) for tensor, states in found.items() for state in states}
        for tensor, states in expected.items():
            assert {(tensor, s) for s in states if s not in {"weight", "step"}} <= kept, options
