"""Choose which states of a catalog go out, under which key and in which dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from restride.checkpoint.dtypes import DTYPES
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from restride.checkpoint.catalog import Catalog, Finding, StateEntry, TensorEntry
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.output import Output

__all__ = [
    "COPIED",
    "Export",
    "Selected",
    "States",
    "Target",
    "cast_target",
    "require_states",
    "select_optimizer",
    "select_weights",
]

States: TypeAlias = Literal["weights", "all"]
Target: TypeAlias = Literal["safetensors", "universal", "deepspeed"]

COPIED: Final = "bytes"

# What a cast can produce; everything else is copied or refused.
_CAST_TARGETS: Final = ("float32", "bfloat16", "float16", "float64")


def require_states(states: object) -> None:
    """Refuse what does not say which states are meant: another word must not mean one of the two.

    Raises:
        UnsupportedError: It is neither ``"weights"`` nor ``"all"``.

    Examples:
        >>> require_states("all")
    """
    if states not in {"weights", "all"}:
        raise UnsupportedError(
            f"{states!r} does not say which states are meant", remedy="say weights or all"
        )


class Selected(Frozen):
    """One array to write.

    Attributes:
        key: Name in the output.
        tensor: Name of the tensor.
        state: Name of the state that is read; `COPIED` where it is a run of bytes of a file.
        entry: Where it is.
        dtype: Type to write.
    """

    key: str
    tensor: str
    state: str
    entry: StateEntry
    dtype: DType


class Export(Frozen):
    """Files that are about to be written, and what they are written from.

    Attributes:
        output: The files.
        sources: What is read for each of `output.tensors`, in the same order.
        findings: What has no place in the output, or is not the same in it.
    """

    output: Output
    sources: tuple[Selected, ...]
    findings: tuple[Finding, ...] = ()


def cast_target(name: str) -> DType:
    """Look up a dtype that weights can be cast to.

    Raises:
        UnsupportedError: There is none of that name, or weights cannot be cast to it.
    """
    if name not in _CAST_TARGETS:
        raise UnsupportedError(
            f"weights cannot be cast to {name}", remedy=f"choose {', '.join(_CAST_TARGETS)}"
        )
    return DTYPES[name]


def select_weights(catalog: Catalog, dtype: DType | None = None) -> Iterator[Selected]:
    """Yield one array per tensor, under the tensor's own name.

    Without `dtype` that is the weight as it was trained: the stored one, or, where a checkpoint has
    none, the master copy rounded to the type of the training. With `dtype`, parameters are read
    from the state that has that very type, else from the master copy, so that no value is rounded
    twice. Buffers and integers are kept as they are: a mask or a table of indices has no other
    dtype.

    Raises:
        UnsupportedError: A parameter has no weight and no master copy, or the cast is not known.
    """
    if dtype is not None:
        dtype = cast_target(dtype.name)
    for tensor in catalog.tensors:
        state = _weight_state(tensor, dtype)
        entry = tensor.states[state]
        asked = dtype or (None if "weight" in tensor.states else tensor.trained_dtype)
        is_cast = asked is not None and tensor.kind == "parameter" and entry.dtype.kind == "float"
        wanted = asked if is_cast and asked is not None else entry.dtype
        if wanted != entry.dtype and entry.dtype.name not in _CAST_TARGETS:
            raise UnsupportedError(
                f"{entry.dtype.name} cannot be cast to {wanted.name}",
                where=f"tensor {tensor.name!r}",
            )
        yield Selected(tensor.name, tensor.name, state, entry, wanted)


def select_optimizer(catalog: Catalog) -> Iterator[Selected]:
    """Yield every other state, under ``TENSOR/STATE``, in the dtype it is stored in."""
    for tensor in catalog.tensors:
        for state, entry in tensor.states.items():
            if state != "weight":
                yield Selected(f"{tensor.name}/{state}", tensor.name, state, entry, entry.dtype)


def _weight_state(tensor: TensorEntry, dtype: DType | None) -> str:
    states = tensor.states
    if dtype is None and "weight" in states:
        return "weight"
    if "weight" in states and (states["weight"].dtype == dtype or tensor.kind == "buffer"):
        return "weight"
    if "fp32" in states:
        return "fp32"
    if "weight" in states:
        return "weight"
    raise UnsupportedError(
        f"the checkpoint has no weight, only {', '.join(sorted(states)) or 'nothing'}",
        where=f"tensor {tensor.name!r}",
        remedy="leave the tensor out or read the checkpoint that has its weights",
    )
