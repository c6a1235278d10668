"""What goes out: turn a format and its options into files, tensors and what they are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from restride.checkpoint.output import Output, OutputFile
from restride.checkpoint.selection import Export, cast_target, select_optimizer, select_weights
from restride.errors import UnsupportedError

if TYPE_CHECKING:
    from restride.checkpoint.catalog import Catalog
    from restride.checkpoint.dtypes import DType
    from restride.checkpoint.selection import Selected, States, Target

__all__ = ["lay_out_export"]


def lay_out_export(
    catalog: Catalog,
    *,
    to: Target,
    states: States = "weights",
    dtype: str | None = None,
    max_shard_nbytes: int | None = None,
) -> Export:
    """Describe what a conversion writes, before anything is read of a tensor.

    Args:
        catalog: The source.
        to: Format of the output.
        states: Only the weights, or everything. A universal folder always has everything.
        dtype: Type of the weights in safetensors, where it is not the one they were trained in.
        max_shard_nbytes: Largest file of safetensors.

    Raises:
        FormatError, ExecutionError: What goes with the tensors cannot be read.
        UnsupportedError: The format has no place for something, or takes no such option.
    """
    if to == "safetensors":
        wanted = cast_target(dtype) if dtype is not None else None
        return _lay_out_safetensors(catalog, states, wanted, max_shard_nbytes)
    if to == "universal":
        _refuse_options(dtype=dtype, max_shard_nbytes=max_shard_nbytes)
        return _lay_out_universal(catalog)
    raise UnsupportedError(
        f"cannot write {to!r}", remedy="formats to write are safetensors and universal"
    )


def _lay_out_safetensors(
    catalog: Catalog, states: States, dtype: DType | None, max_shard_nbytes: int | None
) -> Export:
    """Describe the output files, and which state goes where, in the same order."""
    from restride.formats.safetensors import lay_out  # noqa: PLC0415 - only when it is written

    selected = list(select_weights(catalog, dtype))
    outputs = [lay_out(_targets(selected), stem="model", max_shard_nbytes=max_shard_nbytes)]
    if states == "all":
        moments = list(select_optimizer(catalog))
        if moments:
            outputs.append(
                lay_out(_targets(moments), stem="optimizer", max_shard_nbytes=max_shard_nbytes)
            )
        selected += moments
        values = msgspec.json.format(msgspec.json.encode(dict(catalog.values)), indent=1) + b"\n"
        outputs.append(Output((OutputFile("state.json", len(values), ((0, values),)),)))
    return Export(Output.joined(outputs), tuple(selected))


def _lay_out_universal(catalog: Catalog) -> Export:
    """The same for a universal folder, which only DeepSpeed's own checkpoints have all parts of."""
    from restride.formats.deepspeed.companions import read_companions  # noqa: PLC0415
    from restride.formats.universal import lay_out  # noqa: PLC0415 - only when it is written

    if not catalog.format.startswith("deepspeed"):
        raise UnsupportedError(
            f"a universal folder cannot be made of {catalog.format}: it has no loader state, "
            "scheduler and parameter groups",
            where=catalog.root,
            remedy="convert the DeepSpeed checkpoint itself",
        )
    return lay_out(catalog, read_companions(catalog))


def _refuse_options(**given: object) -> None:
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise UnsupportedError(
            f"a universal folder takes no {' and no '.join(named)}: it has every state as it is "
            "stored, one file each",
            remedy="leave it out, or convert with --to safetensors",
        )


def _targets(selected: list[Selected]) -> list[tuple[str, DType, tuple[int, ...]]]:
    return [(item.key, item.dtype, item.entry.layout.full_shape) for item in selected]
