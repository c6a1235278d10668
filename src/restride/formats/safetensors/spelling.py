"""How safetensors spells dtypes, file names and the states of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.algebra.layout import Layout
from restride.algebra.mesh import Mesh
from restride.algebra.piece import Axis, Piece
from restride.checkpoint.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from restride.algebra.layout import Shape
    from restride.checkpoint.dtypes import DType

__all__ = [
    "DEFAULT_METADATA",
    "DTYPE_BY_CODE",
    "INDEX_SUFFIX",
    "LARGEST_HEADER_NBYTES",
    "METADATA_KEY",
    "SUFFIX",
    "VALUES_NAME",
    "WRITTEN_WITH",
    "split_state",
    "whole_layout",
]

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
METADATA_KEY: Final = "__metadata__"
# Transformers refuses files that do not say which framework their tensors are meant for.
DEFAULT_METADATA: Final[Mapping[str, str]] = {"format": "pt"}
VALUES_NAME: Final = "state.json"
WRITTEN_WITH: Final = "restride_written_with"
"""Key of the metadata: what one conversion wrote, as files or as what their names start with."""
# The limit of the reference implementation.
LARGEST_HEADER_NBYTES: Final = 100_000_000

DTYPE_BY_CODE: Final[dict[str, DType]] = {
    code: DTYPES[name]
    for code, name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }.items()
}

# States of the optimizers of torch and DeepSpeed. A slash alone proves nothing: the names of models
# that come from TensorFlow or JAX have slashes too.
_STATES: Final = frozenset(
    {
        "acc_delta",
        "ax",
        "error_feedback",
        "eta",
        "exp_avg",
        "exp_avg_diff",
        "exp_avg_sq",
        "exp_avg_sq_col",
        "exp_avg_sq_row",
        "exp_inf",
        "fp32",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "mu",
        "mu_product",
        "prev",
        "server_error",
        "square_avg",
        "step",
        "step_size",
        "sum",
        "worker_error",
    }
)
_ONE_RANK: Final = Mesh(())


def split_state(key: str, *, is_state: bool | None = None) -> tuple[str, str]:
    """Split a key into the name of the parameter and its state.

    Args:
        key: The key.
        is_state: Whether it is one of a state, where the file says so: optimizers have states of
            any name. Where nothing says it, the name does.

    Examples:
        >>> split_state("h.0.attn.weight/exp_avg"), split_state("bert/encoder/kernel")
        (('h.0.attn.weight', 'exp_avg'), ('bert/encoder/kernel', 'weight'))
        >>> split_state("w/hessian", is_state=True), split_state("w/step", is_state=False)
        (('w', 'hessian'), ('w/step', 'weight'))
    """
    name, _, state = key.rpartition("/")
    is_split = state in _STATES if is_state is None else is_state
    return (name, state) if name and is_split and state else (key, "weight")


def whole_layout(shape: Shape) -> Layout:
    """The layout of a tensor that stands whole in its file: one rank, row-major.

    Examples:
        >>> whole_layout((2, 3)).pieces(0)
        (Piece(axes=(Axis(extent=6, full_stride=1, rank_stride=0, shard_stride=1),), full_base=0, \
rank_base=0, shard_base=0, scale=Fraction(1, 1)),)
    """
    numel = Layout(_ONE_RANK, shape, ((1, shape),), ()).full_numel
    axes = (Axis(numel, 1, 0, 1),) if numel > 1 else ()
    return Layout(_ONE_RANK, shape, ((1, shape),), (Piece(axes),) if numel else ())
