"""The field's vocabulary: how frameworks cut tensors, each rule as a function that gives a layout.

Every builder has the signature ``builder(shape, *, mesh, ..., axis=None)``. `mesh` is written as
users write it (``{"tp": 4}`` or ``"tp=4,dp=2"``); `axis` names the mesh axis that is cut, along all
others the tensor is replicated. A builder refuses what the partition it describes refuses, and says
what would work.

`restride.layouts.catalogue` lists them for people and machines, `restride.layouts.fused_names`
knows weights that are fused by their name and shape.
"""

from restride.layouts.codegen import codegen_qkv
from restride.layouts.flat import FlatGroup, FlatMember, flat_chunks, zero_flat, zero_group
from restride.layouts.fused_qkv import bloom_qkv, chatglm_qkv, glm_qkv, qwen_qkv
from restride.layouts.gathered import block_gather, experts
from restride.layouts.grouped_qkv import bigcode_qkv, phi3_qkv
from restride.layouts.lifting import lift
from restride.layouts.permuted import conv1d_column, conv1d_row, permuted, transposed
from restride.layouts.replicated import replicated
from restride.layouts.segmented import Segment, gate_up, segmented, sub_params
from restride.layouts.sizes import autotp_sizes, chunk_sizes, even_sizes
from restride.layouts.split import chunked, padded, split
from restride.layouts.yuan import yuan_output, yuan_value

__all__ = [
    "FlatGroup",
    "FlatMember",
    "Segment",
    "autotp_sizes",
    "bigcode_qkv",
    "block_gather",
    "bloom_qkv",
    "chatglm_qkv",
    "chunk_sizes",
    "chunked",
    "codegen_qkv",
    "conv1d_column",
    "conv1d_row",
    "even_sizes",
    "experts",
    "flat_chunks",
    "gate_up",
    "glm_qkv",
    "lift",
    "padded",
    "permuted",
    "phi3_qkv",
    "qwen_qkv",
    "replicated",
    "segmented",
    "split",
    "sub_params",
    "transposed",
    "yuan_output",
    "yuan_value",
    "zero_flat",
    "zero_group",
]
