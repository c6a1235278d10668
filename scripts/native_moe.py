"""A tiny model with layers of DeepSpeed's own mixture of experts, called as those of transformers.

Its router draws no numbers, and every token reaches its experts, so that a run can be repeated bit
for bit. An expert has weights and biases of odd sizes. With `residual`, one more beside the experts
of a layer sees every token.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

HIDDEN = 6
__all__ = ["build"]


def build(
    vocabulary: int,
    rank: int,
    ep: int,
    *,
    experts: tuple[int, ...] = (4, 8),
    residual: bool = False,
    is_data_first: bool = False,
) -> Any:
    """Build the model of a rank.

    Args:
        vocabulary: Number of tokens.
        rank: The rank.
        ep: Expert-parallel ranks.
        experts: Number of experts of each layer.
        residual: Whether an expert beside them sees every token.
        is_data_first: Whether neighbouring ranks hold the same experts.
    """
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, 5)
            self.down = nn.Linear(5, HIDDEN)

        def forward(self, tokens: Any) -> Any:
            return self.down(torch.relu(self.up(tokens)))

    class Native(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(to_json_string=lambda: json.dumps({"hidden": HIDDEN}))
            self.embed = nn.Embedding(vocabulary, HIDDEN)
            self.layers = nn.ModuleList()
            for count in experts:
                layer = nn.Module()
                layer.norm = nn.LayerNorm(HIDDEN)
                layer.moe = MoE(
                    HIDDEN,
                    Expert(),
                    num_experts=count,
                    ep_size=ep,
                    k=1,
                    capacity_factor=count,
                    use_residual=residual,
                    use_rts=False,
                )
                self.layers.append(layer)
            self.head = nn.Linear(HIDDEN, vocabulary, bias=False)
            self.register_buffer("positions", torch.arange(3))

        def forward(self, input_ids: Any, labels: Any, **_: Any) -> Any:
            hidden = self.embed(input_ids)
            extra: Any = 0.0
            for layer in self.layers:
                mixed, loss, _ = layer.moe(layer.norm(hidden))
                hidden, extra = hidden + mixed, extra + loss
            scores = self.head(hidden).float().flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, labels.flatten()) + 0.01 * extra
            return SimpleNamespace(loss=loss)

    torch.manual_seed(0)
    model = Native()
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for number, layer in enumerate(layers):
        # Experts of a layer are copies of one: give each the same weights, whoever holds it.
        place = rank // (torch.distributed.get_world_size() // ep) if is_data_first else rank % ep
        first = place * layer.num_local_experts
        for own, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts, first):
            numbers = torch.Generator().manual_seed(1000 * number + own)
            for parameter in expert.parameters():
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=numbers))
    return model
