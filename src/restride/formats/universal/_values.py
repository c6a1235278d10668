"""What a universal folder stores besides tensors, as JSON values: those of its source."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from restride.checkpoint.catalog import Finding
from restride.checkpoint.values import StoredTensor
from restride.errors import UnsupportedError
from restride.formats.deepspeed._values import JsonWriter
from restride.formats.universal._order import in_order
from restride.storage.ranges import FilePool

if TYPE_CHECKING:
    from restride.formats.deepspeed._values import Json
    from restride.formats.deepspeed.model_files import ModelFiles
    from restride.formats.universal._optimizer_state import OptimizerState

__all__ = ["read_values"]

# What became tensors, and the flat partitions of one rank that no engine looks at.
_CONSUMED: Final = frozenset(
    {
        "param_groups",
        "optimizer_state_dict",
        "fp32_flat_groups",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "universal_checkpoint_info",
        "ds_zero_partition_groups",
    }
)
_MAP_KEYS: Final = frozenset({"affine_map", "affine_maps"})


def read_values(
    models: ModelFiles | None, optimizer: OptimizerState | None, findings: list[Finding]
) -> dict[str, Json]:
    """Read what is no tensor, in the form that the catalog of a DeepSpeed checkpoint has.

    Args:
        models: The model files, where there are some.
        optimizer: The optimizer without its arrays, where it is there.
        findings: Tensors that are left behind are added to it.

    Raises:
        CorruptError: The values of a file unfold beyond any measure, or groups are not counted
            alike.
    """
    values: dict[str, Json] = dict(models.values) if models else {}
    if optimizer is None:
        return values
    with FilePool() as pool:
        writer = JsonWriter(lambda tensor: _read(pool, tensor), skipped_keys=_MAP_KEYS)
        entries = writer.entries(
            {key: entry for key, entry in optimizer.root.items() if key not in _CONSUMED}
        )
        groups = [writer.of(group) for group in optimizer.groups]
        for number, part in enumerate(optimizer.parts):
            entries |= {
                f"state.{number}.{key}": writer.of(entry)
                for key, entry in part.items()
                if not isinstance(entry.value, StoredTensor)
            }
    for where in writer.left_behind:
        message = f"{where} is too large for a value: only DeepSpeed's own forms carry it"
        findings.append(Finding("warning", "not-carried", message, where))
    members = None
    if models is not None and models.trained_names:
        try:
            members = optimizer.members(in_order(models, optimizer), models.order)
        except UnsupportedError as error:
            findings.append(Finding("warning", "unknown-group", str(error), error.where))
    listed: list[Json] = []
    for number, group in enumerate(groups):
        plain = dict(group) if isinstance(group, dict) else {}
        plain["params"] = list(members[number]) if members else []
        listed.append(plain)
    return {**values, "optimizer": {**entries, "param_groups": listed}}


def _read(pool: FilePool, tensor: StoredTensor) -> bytes:
    buffer = bytearray(prod(tensor.shape) * tensor.storage.dtype.itemsize_nbytes)
    pool.read_exact(tensor.storage.file, tensor.start_nbytes, buffer)
    return bytes(buffer)
