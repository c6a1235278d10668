"""Partition functions of real frameworks, restated in NumPy.

Each says how a framework cuts one kind of tensor, at any size and for some numbers of ranks, and
how few pieces describe the whole tensor on all ranks. The interop tests run the frameworks' own
functions; these are here so that everybody can test against the shapes that occur in practice.

They were read in DeepSpeed 0.19.8, PyTorch 2.13, Megatron-LM, vLLM, TensorRT-LLM and transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from restride.testing._cutting import (
    Array,
    Cut,
    Partition,
    evenly,
    joined,
    padded,
    part,
    sizes,
    split,
    together,
    torch_chunk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PARTITIONS", "Partition"]

_POWERS = (2, 4, 8)
_partitions: list[Partition] = []


def _partition(
    name: str,
    shape: Callable[[int], tuple[int, ...]],
    *,
    pieces: int,
    ranks: tuple[int, ...] = _POWERS,
) -> Callable[[Cut], Cut]:
    def register(cut: Cut) -> Cut:
        _partitions.append(Partition(name, shape, cut, ranks, pieces))
        return cut

    return register


# --- DeepSpeed AutoTP


_partition("deepspeed column", lambda s: (64 * s, 8 * s), pieces=1)(evenly())
_partition("deepspeed row", lambda s: (8, 64 * s), pieces=1)(evenly(1))


@_partition("deepspeed column, 6 kv heads", lambda s: (48 * s, 8), ranks=(4,), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return split(full, sizes(full.shape[0], ranks, 6))[rank]


@_partition("deepspeed vocabulary", lambda s: (100 * s, 8), ranks=(3, 7), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return split(full, sizes(full.shape[0], ranks))[rank]


def codegen_rows(full: Array, ranks: int, rank: int) -> Array:
    """Reorder the rows of CodeGen's fused QKV and cut them.

    The rows are four blocks of (q, k, v) each; DeepSpeed deals the parts of the thirds out so that
    every rank gets whole heads of all three.
    """
    blocks = full.reshape(4, 3, ranks, -1, *full.shape[1:])
    dealt = blocks.transpose(0, 2, 1, *range(3, blocks.ndim))
    return dealt.reshape(ranks, -1, *full.shape[1:])[rank]


@_partition("deepspeed codegen", lambda s: (384 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return codegen_rows(full, ranks, rank)


@_partition("deepspeed bigcode", lambda s: (80 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    return np.concatenate([part(full[: 64 * size], ranks, rank), full[64 * size :]])


_partition("deepspeed glm, all heads", lambda s: (192 * s, 8), pieces=1)(
    together(lambda s: [64 * s] * 3)
)
_partition("deepspeed chatglm, 2 kv heads", lambda s: (96 * s, 8), ranks=(2,), pieces=2)(
    together(lambda s: [64 * s, 16 * s, 16 * s])
)
_partition("deepspeed phi3", lambda s: (128 * s, 8), ranks=(2, 4), pieces=2)(
    together(lambda s: [64 * s, 32 * s, 32 * s])
)


def _yuan(full: Array, ranks: int, rank: int, axis: int) -> Array:
    """Two runs of value heads: one below the middle, one above."""
    return joined(np.split(full, 2, axis), ranks, rank, axis)


@_partition("deepspeed yuan value", lambda s: (64 * s, 8), ranks=(2, 4), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return _yuan(full, ranks, rank, 0)


@_partition("deepspeed yuan output", lambda s: (8, 64 * s), ranks=(2, 4), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return _yuan(full, ranks, rank, 1)


_partition("gate and up", lambda s: (128 * s, 8), pieces=1)(together(lambda s: [64 * s] * 2))


@_partition("conv1d transposed", lambda s: (64 * s, 16 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full.T, ranks, rank, 1)


@_partition("sub-parameters, uneven", lambda s: (96 * s, 8), ranks=(3,), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    parts = split(full, [48 * size, 24 * size, 24 * size])
    return np.concatenate([split(part, sizes(part.shape[0], ranks))[rank] for part in parts])


_partition("conv2d output channels", lambda s: (64 * s, 8, 3, 3), pieces=1)(evenly())
_partition("conv2d input channels", lambda s: (8, 64 * s, 3, 3), pieces=1)(evenly(1))
# --- ZeRO and FSDP


@_partition("zero-3 flat with padding", lambda s: (64 * s - 3, 5), ranks=(4, 7), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    flat = full.reshape(-1)
    share = -(-flat.size // ranks)
    return padded(flat, share * ranks).reshape(ranks, -1)[rank]


@_partition("zero-1 flat group", lambda s: (832 * s,), ranks=(4, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    align = 2 * ranks
    return padded(full, -(-full.size // align) * align).reshape(ranks, -1)[rank]


@_partition("fsdp2 chunks, empty shards", lambda s: (10, 8 * s), ranks=(7,), pieces=1)
@_partition("fsdp2 chunks", lambda s: (9 * s + 1, 8), ranks=(4,), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return torch_chunk(full, ranks, rank)


@_partition("fsdp2 over tensor parallel", lambda s: (64 * s, 8), ranks=(4, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    replica, tensor = divmod(rank, ranks // 2)
    return part(part(full, ranks // 2, tensor), 2, replica)


@_partition("zero flat over a codegen shard", lambda s: (384 * s, 8), ranks=(4,), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(codegen_rows(full, 2, 1).reshape(-1), ranks, rank)


@_partition("zero flat, 5 over a codegen shard", lambda s: (384 * s, 8), ranks=(5,), pieces=13)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    flat = codegen_rows(full, 2, 1).reshape(-1)
    share = -(-flat.size // ranks)
    return padded(flat, share * ranks).reshape(ranks, -1)[rank]


@_partition("zero flat over a row shard", lambda s: (8 * s, 64 * s), ranks=(4,), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(part(full, 2, 1, 1).reshape(-1), ranks, rank)


# --- Megatron-LM


def _grouped(full: Array, parts: Sequence[Array], groups: int) -> Array:
    """Deal the groups of each part out, one group of every part after the other."""
    width = full.shape[-1]
    return np.concatenate([part.reshape(groups, -1, width) for part in parts], 1)


@_partition("megatron qkv, 8 groups", lambda s: (128 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    parts = split(full, [64 * size, 32 * size, 32 * size])
    return part(_grouped(full, parts, 8), ranks, rank)


@_partition("megatron qkv, all heads", lambda s: (96 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(_grouped(full, np.split(full, 3), 8), ranks, rank)


@_partition("megatron qkv with gate", lambda s: (192 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    q, k, v = split(full, [128 * size, 32 * size, 32 * size])
    q = q.reshape(8, 2, 2, 4 * size, 8).transpose(0, 2, 1, 3, 4)
    return part(_grouped(full, [q, k, v], 8), ranks, rank)


@_partition("megatron padded vocabulary", lambda s: (100 * s + 1, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    align = 16 * ranks
    return part(padded(full, -(-full.shape[0] // align) * align), ranks, rank)


@_partition("megatron interleaved glu", lambda s: (128 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    gate, up = (part(half, ranks, rank).reshape(-1, 4, 8) for half in np.split(full, 2))
    return np.stack([gate, up], 1).reshape(-1, 8)


@_partition("megatron experts fc1", lambda s: (16, 32 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return joined(np.split(part(full, ranks, rank), 2, 1), 2, 1, 1)


@_partition("megatron experts fc2", lambda s: (16, 8, 16 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(part(full, ranks, rank), 2, 1, 2)


@_partition("interleaved pipeline stages", lambda s: (4, 4, 2, 8 * s), ranks=(2, 4), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return full.reshape(-1, ranks, 2, full.shape[-1])[:, rank]


_partition("mamba2 input", lambda s: (320 * s + 16, 4), pieces=3)(
    together(lambda s: [128 * s, 128 * s, 32 * s, 32 * s, 16])
)
_partition("mamba2 convolution", lambda s: (256 * s, 4), pieces=2)(
    together(lambda s: [128 * s, 64 * s, 64 * s])
)


@_partition("mamba2 input, one group", lambda s: (288 * s + 16, 4), pieces=3)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    z, x, b, c, dt = split(full, [128 * size, 128 * size, 16 * size, 16 * size, 16])
    cut = [part(block, ranks, rank) for block in (z, x, dt)]
    return np.concatenate([cut[0], cut[1], b, c, cut[2]])


_partition("gated delta net input", lambda s: (384 * s + 32, 4), pieces=3)(
    together(lambda s: [64 * s, 64 * s, 128 * s, 128 * s, 16, 16])
)


@_partition("gated delta net from grouped heads", lambda s: (192 * s, 4), ranks=(8,), pieces=1)
@_partition("gated delta net from grouped heads", lambda s: (192 * s, 4), ranks=(2, 4), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    heads = part(full.reshape(8, -1, 4), ranks, rank)
    parts = split(heads, [4 * size, 4 * size, 8 * size, 8 * size], 1)
    return np.concatenate([part.reshape(-1, 4) for part in parts])


_partition("grouped heads kept", lambda s: (384 * s, 4), pieces=1)(evenly())


@_partition("b and a from grouped heads", lambda s: (32, 4 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    heads = part(full.reshape(8, 4, -1), ranks, rank)
    return np.concatenate([part.reshape(-1, full.shape[1]) for part in np.split(heads, 2, 1)])


# --- latent attention, vLLM, TensorRT-LLM


_partition("latent kv", lambda s: (8, 16 * s, 16), pieces=1)(evenly())


@_partition("latent kv absorbed", lambda s: (8, 16 * s, 16), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    return part(full, ranks, rank)[:, : 8 * size].transpose(0, 2, 1)


@_partition("latent kv_a, rope rows halved", lambda s: (40 * s, 8), ranks=(2,), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    rope = full[32 * size :].reshape(4 * size, 2, 8).transpose(1, 0, 2)
    return np.concatenate([full[: 32 * size], rope.reshape(-1, 8)])


@_partition("replicated", lambda s: (56 * s, 8), ranks=(2, 4), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return full


@_partition("latent q_b, rope rows halved", lambda s: (8, 12 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    plain, rope = split(part(full, ranks, rank), [8 * size, 4 * size], 1)
    rope = rope.reshape(-1, 2 * size, 2, 8).transpose(0, 2, 1, 3).reshape(-1, 4 * size, 8)
    return np.concatenate([plain, rope], 1)


@_partition("vllm qkv, kv heads replicated", lambda s: (96 * s, 8), ranks=(8,), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    q, k, v = split(full, [64 * size, 16 * size, 16 * size])
    kv = [part(block, 4, rank // (ranks // 4)) for block in (k, v)]
    return np.concatenate([part(q, ranks, rank), *kv])


_partition("vllm qkv", lambda s: (128 * s, 8), pieces=2)(
    together(lambda s: [64 * s, 32 * s, 32 * s])
)


@_partition("vllm fused experts w13", lambda s: (2, 8, 16 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return joined(list(full), ranks, rank, 1)


@_partition("tensorrt experts, up first", lambda s: (2, 8, 16 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return joined([full[1], full[0]], ranks, rank, 1)


@_partition("experts in turn", lambda s: (16, 4 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return full[rank::ranks]


# --- Hugging Face conversions with tensor parallelism


def _rope_halved(full: Array, size: int) -> Array:
    rows = full.reshape(8, 4 * size, 2, 16).transpose(0, 2, 1, 3)
    return rows.reshape(full.shape)


@_partition("rope permutation, column", lambda s: (64 * s, 16), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    return part(_rope_halved(full, size), ranks, rank)


@_partition("rope permutation, row", lambda s: (64 * s, 16), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    return part(_rope_halved(full, size), ranks, rank, 1)


@_partition("gpt-2 conv1d to linear", lambda s: (16 * s, 48 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return joined(np.split(full.T, 3), ranks, rank)


@_partition("neox heads", lambda s: (8, 3, 4 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full.transpose(1, 0, 2, 3), ranks, rank, 1)


@_partition("falcon groups", lambda s: (8, 4, 4 * s, 8), ranks=(8,), pieces=1)
@_partition("falcon groups", lambda s: (8, 4, 4 * s, 8), ranks=(2, 4), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    groups = part(full, ranks, rank)
    return np.concatenate([groups[:, part].reshape(-1, 8) for part in (slice(2), 2, 3)])


@_partition("dbrx experts transposed", lambda s: (8, 16 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full, ranks, rank).transpose(0, 2, 1)


@_partition("gpt-oss gate and up taken apart", lambda s: (4, 8, 32 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return joined([full[..., ::2], full[..., 1::2]], ranks, rank, 2).transpose(0, 2, 1)


_partition("gpt-oss gate and up kept", lambda s: (4, 8, 32 * s), pieces=1)(evenly(2))


@_partition("mxfp4 blocks, rows", lambda s: (4, 16 * s, 2, 4, 16), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full.transpose(0, 2, 1, 3, 4), ranks, rank, 2)


_partition("mxfp4 blocks, groups", lambda s: (4, 8, 8 * s, 16), pieces=1)(evenly(2))


@_partition("maxtext stacked kernel", lambda s: (4, 8, 8, 4 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full[2].transpose(1, 2, 0), ranks, rank)


# --- packed weights, in units smaller than an element


_partition("gptq words", lambda s: (8, 64 * s), pieces=1)(evenly(1))


@_partition("gptq nibbles", lambda s: (64, 16 * s), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    return part(full.reshape(8, 8, 16 * size).transpose(0, 2, 1), ranks, rank, 1)


@_partition("awq nibbles", lambda s: (8, 16 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return part(full[..., [0, 2, 4, 6, 1, 3, 5, 7]], ranks, rank, 1)


def _marlin_order() -> Array:
    """Order of the 1024 nibbles of one tile."""
    order: list[int] = []
    for thread in range(32):
        column, row = thread // 4, 2 * (thread % 4)
        tile = [
            16 * at + column + 8 * block
            for block in (0, 1)
            for at in (row, row + 1, row + 8, row + 9)
        ]
        for lane in range(4):
            order.extend(nibble + 256 * lane for nibble in tile)
    return np.array(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


@_partition("marlin nibbles", lambda s: (32, 128 * s), ranks=(2,), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    shard = part(full, ranks, rank, 1)
    columns = shard.shape[1]
    tiles = shard.reshape(2, 16, columns // 16, 16).transpose(0, 2, 1, 3)
    return tiles.reshape(-1, 1024)[:, _marlin_order()].reshape(2, -1)


@_partition("q4_0 structs", lambda s: (8 * s, 32), ranks=(2,), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    pairs = np.stack([full[:, :16], full[:, 16:]], -1).reshape(8 * size, 32)
    return part(np.pad(pairs, [(0, 0), (4, 0)]), ranks, rank)


# --- activations and tables


@_partition("context zigzag", lambda s: (32 * s, 8), pieces=2)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    chunks = full.reshape(2 * ranks, -1, 8)
    return chunks[[rank, 2 * ranks - 1 - rank]]


@_partition("context striped", lambda s: (16 * s, 8), pieces=1)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    return full[rank::ranks]


@_partition("context zigzag, 2 sequences", lambda s: (192 * s, 8), pieces=4)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:
    sequences = split(full, [128 * size, 64 * size])
    chosen = [rank, 2 * ranks - 1 - rank]
    return np.concatenate(
        [part.reshape(2 * ranks, -1, 8)[chosen].reshape(-1, 8) for part in sequences]
    )


@_partition("experts by table", lambda s: (64, 2 * s, 4), ranks=(4,), pieces=30)
def _(full: Array, size: int, ranks: int, rank: int) -> Array:  # noqa: ARG001
    table = np.random.RandomState(3).permutation(64)
    return part(full[table], ranks, rank)


_partition("heads to sequence", lambda s: (8 * s, 8, 4), pieces=1)(evenly(1))
PARTITIONS: tuple[Partition, ...] = tuple(_partitions)
