"""The tensors of all pipeline stages as those of one checkpoint.

Most tensors are on one stage only, and stay as they are. A tied one is on several: each keeps a
copy with states of its own, cut in the flat buffers of that stage. Together they are replicas, to
be compared like any others: the stages add their gradients up, and only if the optimizers of all
of them do the same do the copies stay equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from restride.algebra.mesh import Mesh
from restride.errors import CorruptError
from restride.formats.deepspeed._states import replicas_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from restride.checkpoint.catalog import TensorEntry
    from restride.formats.deepspeed._run import Run

__all__ = ["joined_mesh", "joined_tensors"]


def joined_mesh(runs: Sequence[Run]) -> Mesh:
    """Name the ranks of all stages; one stage has no axis for it."""
    stages = (("pp", len(runs)),) if len(runs) > 1 else ()
    return Mesh((*stages, *runs[0].mesh.axes))


def joined_tensors(stages: Sequence[Sequence[TensorEntry]]) -> tuple[TensorEntry, ...]:
    """List the tensors of all stages, each once, in the order of the model.

    Raises:
        CorruptError: Stages that share a tensor contradict each other.
    """
    found: dict[str, dict[int, TensorEntry]] = {}
    for stage, tensors in enumerate(stages):
        for tensor in tensors:
            found.setdefault(tensor.name, {})[stage] = tensor
    outer = Mesh((("pp", len(stages)),))
    return tuple(
        next(iter(held.values())) if len(held) == 1 else _tied(held, outer)
        for held in found.values()
    )


def _tied(held: Mapping[int, TensorEntry], outer: Mesh) -> TensorEntry:
    first = next(iter(held.values()))
    where = f"tensor {first.name!r}"
    for stage, tensor in held.items():
        if (tensor.kind, tensor.layout) != (first.kind, first.layout):
            raise CorruptError(
                f"is a {tensor.kind} of shape {tensor.layout.full_shape} on pipeline stage "
                f"{stage}, and a {first.kind} of shape {first.layout.full_shape} on stage "
                f"{min(held)}, or cut another way",
                where=where,
            )
    names = dict.fromkeys(name for tensor in held.values() for name in tensor.states)
    states = {
        name: replicas_of(
            {stage: tensor.states[name] for stage, tensor in held.items() if name in tensor.states},
            outer,
            where,
        )
        for name in names
    }
    return replace(
        first,
        states=states,
        is_frozen=all(tensor.is_frozen for tensor in held.values()),
        aliases=tuple(dict.fromkeys(a for tensor in held.values() for a in tensor.aliases)),
    )
