"""A tiny model with layers of DeepSpeed's own mixture of experts, called as those of transformers.

Its router draws no numbers, and every token reaches its experts, so that a run can be repeated bit
for bit. An expert has weights and biases of odd sizes. With `residual`, one more beside the experts
of a layer sees every token.

With an `Mpu`, tensor-parallel ranks see the same tokens. They cut the experts where `is_cut` says
so (`enable_expert_tensor_parallelism`), the one beside them as well.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

HIDDEN = 6
WIDTH = 5
# What the models say of their parameters, as Megatron-DeepSpeed does; the others are cut in rows.
REPLICATED = "tp_replicated_parameter_patterns"
BY_COLUMNS = "parameter_with_row_parallelism_patterns"

__all__ = ["Mpu", "build", "cut_dim"]


class Mpu:
    """Neighbouring ranks are tensor-parallel ones: what DeepSpeed asks a model-parallel unit for.

    Args:
        rank: The rank.
        tp: Tensor-parallel ranks.
    """

    def __init__(self, rank: int, tp: int) -> None:
        import deepspeed.moe.mappings
        import torch
        from torch import distributed

        world = distributed.get_world_size()
        self.rank, self.tp, self.dp = rank, tp, world // tp
        rows = [[*range(first, first + tp)] for first in range(0, world, tp)]
        columns = [[*range(first, world, tp)] for first in range(tp)]
        made = [(ranks, distributed.new_group(ranks)) for ranks in [*rows, *columns]]
        self._tensor, self._data = (group for ranks, group in made if rank in ranks)

        def gather(tokens: Any, dim: int = 0) -> Any:
            """Gloo does not gather into a flat tensor, which DeepSpeed asks for."""
            parts = [torch.empty_like(tokens) for _ in range(tp)]
            distributed.all_gather(parts, tokens.contiguous(), group=self._tensor)
            return torch.cat(parts, dim)

        deepspeed.moe.mappings._gather_tokens = gather

    def get_model_parallel_rank(self) -> int:
        return self.rank % self.tp

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.rank // self.tp

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self._data


def cut_dim(name: str) -> int | None:
    """Dimension along which tensor-parallel ranks cut a tensor of an expert."""
    if name.endswith("down.weight"):
        return 1
    return 0 if ".up." in f".{name}" else None


def build(  # noqa: C901 - the parts of one model
    vocabulary: int,
    rank: int,
    ep: int | tuple[int, ...],
    *,
    experts: tuple[int, ...] = (4, 8),
    residual: bool = False,
    is_data_first: bool = False,
    mpu: Mpu | None = None,
    is_cut: bool = False,
) -> Any:
    """Build the model of a rank.

    Args:
        vocabulary: Number of tokens.
        rank: The rank.
        ep: Expert-parallel ranks, of each layer where they differ.
        experts: Number of experts of each layer.
        residual: Whether an expert beside them sees every token.
        is_data_first: Whether neighbouring ranks hold the same experts.
        mpu: The tensor-parallel ranks.
        is_cut: Whether they cut the experts.
    """
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    sizes = (ep,) * len(experts) if isinstance(ep, int) else ep
    # The ranks have 3 and 2 of 5 columns.
    cutters = mpu.get_model_parallel_world_size() if mpu is not None and is_cut else 1
    own = mpu.get_model_parallel_rank() if mpu is not None and is_cut else 0
    width = len(range(own, WIDTH, cutters))

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, tokens: Any) -> Any:
            return added(tokens)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return gradient

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, tokens: Any) -> Any:
            return tokens.view_as(tokens)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return added(gradient)

    def added(tensor: Any) -> Any:
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor, group=mpu.get_model_parallel_group())  # type: ignore[union-attr]
        return tensor

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, width)
            self.down = nn.Linear(width, HIDDEN)

        def forward(self, tokens: Any) -> Any:
            if cutters == 1:
                return self.down(torch.relu(self.up(tokens)))
            inner = torch.relu(self.up(Same.apply(tokens)))
            return Sum.apply(nn.functional.linear(inner, self.down.weight)) + self.down.bias

    class Native(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(to_json_string=lambda: json.dumps({"hidden": HIDDEN}))
            self.embed = nn.Embedding(vocabulary, HIDDEN)
            self.layers = nn.ModuleList()
            for count, size in zip(experts, sizes, strict=True):
                layer = nn.Module()
                layer.norm = nn.LayerNorm(HIDDEN)
                layer.moe = MoE(
                    HIDDEN,
                    Expert(),
                    num_experts=count,
                    ep_size=size,
                    k=1,
                    capacity_factor=count,
                    use_residual=residual,
                    use_rts=False,
                    enable_expert_tensor_parallelism=is_cut,
                )
                self.layers.append(layer)
            self.head = nn.Linear(HIDDEN, vocabulary, bias=False)
            self.register_buffer("positions", torch.arange(3))
            if mpu is not None:
                said = {REPLICATED: [".*"]}
                if is_cut:
                    said = {
                        REPLICATED: [
                            r"embed\..*",
                            r"head\..*",
                            r".*\.norm\..*",
                            r".*\.wg\.weight",
                            r".*\.coefficient\..*",
                            r".*\.down\.bias",
                        ],
                        BY_COLUMNS: [r".*\.down\.weight"],
                    }
                self.universal_checkpoint_info = {"universal_checkpoint_version": 0.2, **said}

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
    if cutters > 1:  # those of other ranks draw as many numbers as their experts have
        numbers = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "experts" not in name and ".mlp." not in name and "norm" not in name:
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=numbers))
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for number, layer in enumerate(layers):
        # Experts of a layer are copies of one: give each the same weights, whoever holds it.
        size, world = layer.ep_size, torch.distributed.get_world_size()
        place = rank // (world // size) if is_data_first else rank % size
        if cutters > 1 and not is_data_first:
            place = rank // cutters % size
        first = place * layer.num_local_experts
        modules = [*enumerate(layer.deepspeed_moe.experts.deepspeed_experts, first)]
        if cutters > 1 and residual:
            modules.append((999, layer.mlp))
        for number_of_expert, expert in modules:
            numbers = torch.Generator().manual_seed(1000 * number + number_of_expert)
            for name, parameter in expert.named_parameters():
                shape, dim = [*parameter.shape], cut_dim(name)
                if dim is not None:
                    shape[dim] = WIDTH
                full = 0.3 * torch.randn(shape, generator=numbers)
                if dim is not None and cutters > 1:
                    start = sum(len(range(n, WIDTH, cutters)) for n in range(own))
                    full = full.narrow(dim, start, width)
                parameter.data.copy_(full)
    return model
