"""The real checkpoints beside the repository, which the fixture `shared` finds, by name."""

from __future__ import annotations

__all__ = ["AUTO_EP", "DRIFTED", "SHARED", "WITHOUT_ZERO", "shared_but"]

SHARED = (
    "bloom_tp2_z1",
    "codegen_fused_tp2_z0",
    "codegen_fused_tp2_z1",
    "codegen_fused_tp2dp2_z1",
    "codegen_rowcut_tp2_z1",
    "gpt2_tp1dp2_z1",
    "gptbigcode_tp2_z1",
    "llama_tied_tp2_z1",
    "llama_tp1dp2_z1",
    "llama_tp1dp2_z2",
    "llama_tp1dp2_z3",
    "llama_tp2_z1",
    "llama_tp2_z1_fp32",
    "llama_tp2_z3",
    "llama_unevenkv_tp2_z1",
    "mixtral_ep2_z1",
    "mixtral_ep2_z3",
    "mixtral_tp2_z1",
    "opt_tp2_z1",
)
AUTO_EP = ("mixtral_ep2_z1", "mixtral_ep2_z3")
DRIFTED = "gptbigcode_tp2_z1"
"""Its two ranks hold different copies of some parameters."""
WITHOUT_ZERO = "codegen_fused_tp2_z0"


def shared_but(*names: str) -> list[str]:
    """All of them but some."""
    return [name for name in SHARED if name not in names]
