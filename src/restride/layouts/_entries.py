"""The rows of the catalogue."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from restride import layouts
from restride.layouts._entry import Entry, Parameter

if TYPE_CHECKING:
    from restride.layouts._entry import Build
    from restride.layouts._text import Kind

__all__ = ["ENTRIES"]


def _need(name: str, kind: Kind, text: str) -> Parameter:
    return Parameter(name, kind, text, is_required=True)


_SHAPE: Final = _need("shape", "shape", "shape of the full tensor")
_MESH: Final = _need("mesh", "mesh", "names and sizes of the axes of ranks")
_AXIS: Final = Parameter("axis", "text", "mesh axis that is cut, where there are several")
_DIM: Final = Parameter("dim", "int", "dimension that is cut, 0 by default")
_GRAIN: Final = Parameter("grain", "int", "DeepSpeed's tp_grain_size, 1 by default")
_FILL: Final = Parameter("fill", "text", "what the padding holds: zero or undefined")
_HEADS: Final = Parameter("heads", "int", "key/value heads, where they are known")
_NEED_HEADS: Final = _need("heads", "int", "attention heads")
_HIDDEN: Final = _need("hidden", "int", "hidden size of the model: rows of q")
_HIDDEN_2: Final = Parameter("hidden", "int", "hidden size, needed with two key/value heads")
_ALIGNMENT: Final = Parameter("alignment", "int", "the partition is a multiple of this")


def _entry(
    topic: str,
    builder: Build,
    summary: str,
    parameters: tuple[Parameter, ...],
    **example: str,
) -> Entry:
    name = builder.__name__.replace("_", "-")
    return Entry(name, builder, summary, topic, (*parameters, _AXIS), MappingProxyType(example))


_BASIC, _FUSED, _FLAT = "plain cuts", "fused weights", "flat partitions and experts"

ENTRIES: Final = (
    Entry(
        "replicated",
        layouts.replicated,
        "Every rank holds the whole tensor, scaled where the layer stores it so.",
        _BASIC,
        (_SHAPE, _MESH, Parameter("scale", "fraction", "exact factor: shard = full * scale")),
        MappingProxyType({"shape": "8", "mesh": "tp=2", "scale": "1/2"}),
    ),
    _entry(
        _BASIC,
        layouts.split,
        "One run of rows per rank: column-, row- and vocabulary-parallel weights.",
        (_SHAPE, _MESH, _DIM, Parameter("sizes", "ints", "rows of each rank, even by default")),
        shape="8x6",
        mesh="tp=3",
        dim="1",
    ),
    _entry(
        _BASIC,
        layouts.chunked,
        "Rounded up, last ranks short or empty: torch.chunk, FSDP2, DTensor.",
        (_SHAPE, _MESH, _DIM),
        shape="9x2",
        mesh="dp=4",
    ),
    _entry(
        _BASIC,
        layouts.padded,
        "Padded at the end until it cuts evenly: a padded vocabulary.",
        (_SHAPE, _MESH, _need("rows", "int", "size of the padded dimension"), _DIM, _FILL),
        shape="13x2",
        mesh="tp=4",
        rows="16",
    ),
    _entry(
        _BASIC,
        layouts.segmented,
        "Runs of rows that are cut or held whole by all, each on its own.",
        (
            _SHAPE,
            _MESH,
            _need("segments", "segments", "rows of each segment: widths per rank if it is cut"),
            _DIM,
        ),
        shape="10x2",
        mesh="tp=2",
        segments="8:4,4;2",
    ),
    _entry(
        _BASIC,
        layouts.sub_params,
        "Several parameters fused along a dimension, each cut on its own.",
        (
            _SHAPE,
            _MESH,
            _need("sizes", "ints", "rows of each sub-parameter"),
            Parameter("widths", "table", "rows of each rank, for each sub-parameter"),
            _DIM,
        ),
        shape="16x2",
        mesh="tp=2",
        sizes="8,4,4",
    ),
    _entry(
        _BASIC,
        layouts.block_gather,
        "A chosen list of equal blocks for each rank.",
        (
            _SHAPE,
            _MESH,
            _need("ids", "table", "blocks of each rank, in shard order"),
            _need("block", "int", "rows of one block"),
            _DIM,
            Parameter("allow_shared", "flag", "let ranks hold the same block, as replicas"),
        ),
        shape="12x2",
        mesh="tp=2",
        ids="0,2,4;1,3,5",
        block="2",
    ),
    _entry(
        _FUSED,
        layouts.gate_up,
        "Gate and up projection fused, each half cut.",
        (_SHAPE, _MESH, _GRAIN, _DIM),
        shape="16x2",
        mesh="tp=4",
    ),
    _entry(
        _FUSED,
        layouts.codegen_qkv,
        "CodeGen: rows permuted, then cut evenly; one piece for the whole parameter.",
        (_SHAPE, _MESH, _NEED_HEADS),
        shape="48x2",
        mesh="tp=2",
        heads="16",
    ),
    _entry(
        _FUSED,
        layouts.bigcode_qkv,
        "GPTBigCode: queries cut, the one key/value head whole on every rank.",
        (_SHAPE, _MESH, _HIDDEN, _HEADS, _GRAIN),
        shape="20x2",
        mesh="tp=2",
        hidden="16",
    ),
    _entry(
        _FUSED,
        layouts.bloom_qkv,
        "Bloom, Falcon: q, k and v interleaved head by head, cut on heads.",
        (_SHAPE, _MESH, _HEADS, _GRAIN),
        shape="36x2",
        mesh="tp=2",
        heads="3",
    ),
    _entry(
        _FUSED,
        layouts.glm_qkv,
        "GLM, MPT, Baichuan: equal thirds q, k, v, each cut.",
        (_SHAPE, _MESH, _HEADS, _HIDDEN_2, _GRAIN),
        shape="24x2",
        mesh="tp=4",
        heads="8",
    ),
    _entry(
        _FUSED,
        layouts.chatglm_qkv,
        "ChatGLM2 and 3: many query heads, two key/value heads.",
        (_SHAPE, _MESH, _HIDDEN, _GRAIN),
        shape="24x2",
        mesh="tp=2",
        hidden="16",
    ),
    _entry(
        _FUSED,
        layouts.qwen_qkv,
        "QWen: as GLM, but no rank may be left without queries.",
        (_SHAPE, _MESH, _HEADS, _HIDDEN_2, _GRAIN),
        shape="24x2",
        mesh="tp=2",
        heads="4",
    ),
    _entry(
        _FUSED,
        layouts.phi3_qkv,
        "Phi-3: q, k and v of unequal size, each cut on key/value heads.",
        (
            _SHAPE,
            _MESH,
            _need("query_heads", "int", "query heads"),
            _need("heads", "int", "key/value heads"),
            _GRAIN,
        ),
        shape="32x16",
        mesh="tp=2",
        query_heads="4",
        heads="2",
    ),
    _entry(
        _FUSED,
        layouts.yuan_value,
        "Yuan's shared-QK value heads: two runs of rows to a rank.",
        (_SHAPE, _MESH, _NEED_HEADS),
        shape="16x2",
        mesh="tp=2",
        heads="8",
    ),
    _entry(
        _FUSED,
        layouts.yuan_output,
        "Yuan's output: two runs of columns to a rank; the bias whole, divided by the ranks.",
        (_SHAPE, _MESH, _NEED_HEADS),
        shape="2x12",
        mesh="tp=2",
        heads="6",
    ),
    _entry(
        _FUSED,
        layouts.conv1d_column,
        "GPT-2's Conv1D (in, out) with its outputs cut.",
        (_SHAPE, _MESH, _HEADS, _GRAIN),
        shape="8x8",
        mesh="tp=2",
    ),
    _entry(
        _FUSED,
        layouts.conv1d_row,
        "GPT-2's Conv1D (in, out) transposed, then its inputs cut.",
        (_SHAPE, _MESH, _HEADS, _GRAIN),
        shape="8x8",
        mesh="tp=2",
    ),
    _entry(
        _FLAT,
        layouts.flat_chunks,
        "One parameter cut by element, rounded up and padded: ZeRO-3, FSDP.",
        (_SHAPE, _MESH, _ALIGNMENT, _FILL),
        shape="7x3",
        mesh="dp=4",
    ),
    _entry(
        _FLAT,
        layouts.zero_flat,
        "Parameters end to end in one buffer, padded and cut: ZeRO-1 and 2, FSDP1.",
        (
            _need("shapes", "shapes", "shapes of the parameters, in the order of the buffer"),
            _MESH,
            _ALIGNMENT,
            Parameter("parameter_alignment", "int", "each parameter starts at a multiple of this"),
        ),
        shapes="4x5;3;2x4",
        mesh="dp=2",
    ),
    _entry(
        _FLAT,
        layouts.experts,
        "Stacked experts by any placement table; replicas allowed.",
        (_SHAPE, _MESH, Parameter("placement", "table", "experts of each rank, even by default")),
        shape="6x4",
        mesh="ep=3",
        placement="0,3;1,4;2,5",
    ),
)
