"""The real transformers loads what a conversion writes: all keys, and the reference's logits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from restride.testing.command_line import run

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.interop

NOTHING = {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}


@dataclass(frozen=True, slots=True)
class Written:
    options: tuple[str, ...]
    dtype: str
    file_count: int


WRITTEN = {
    "as trained": Written((), "bfloat16", 1),
    "float32": Written(("--dtype", "float32"), "float32", 1),
    "as trained in several files": Written(("--max-shard-size", "100kB"), "bfloat16", 2),
    "float32 in several files": Written(
        ("--dtype", "float32", "--max-shard-size", "100kB"), "float32", 4
    ),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("name", ["llama_tied_tp2_z1", "llama_tp1dp2_z3"])
def test_from_pretrained_gives_the_logits_of_the_reference(
    shared: Path, tmp_path: Path, name: str, written: Written
) -> None:
    checkpoint = shared / "checkpoints" / name
    # The sizes of the recipe that wrote the checkpoints.
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings="tied" in name,
    )
    ran = run("convert", str(checkpoint), str(tmp_path / "model"), *written.options)
    assert (ran.code, ran.err) == (0, "")
    config.save_pretrained(tmp_path / "model")

    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )

    assert {key for key in NOTHING if not said[key]} == NOTHING
    assert loaded.dtype == getattr(torch, written.dtype)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == written.file_count
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        wanted = reference(checkpoint, config, loaded.dtype)(tokens).logits
        assert torch.equal(loaded(tokens).logits, wanted)
        assert wanted.std() > 0


def reference(checkpoint: Path, config: Any, dtype: Any) -> Any:
    """Model with the master copies that the peer's own converter made, rounded by torch."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    masters = safetensors_torch.load_file(checkpoint / "reference.safetensors")
    filled = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            master = masters[f"{name}/fp32"]
            parameter.copy_(master.reshape(parameter.shape))
            filled.add(f"{name}/fp32")
    assert filled == {key for key in masters if key.endswith("/fp32")}
    return model.eval()
