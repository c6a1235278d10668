"""How many ranks share the experts of each of DeepSpeed's own layers.

A layer is built for a number of expert-parallel ranks, which the groups of the optimizer name. With
ZeRO the model file of the first rank lists what that has of a layer. Without, only the groups are
there; where they name several numbers, a layer is of the one with which all groups are as large as
they are.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

from restride.errors import CorruptError, UnsupportedError
from restride.formats.deepspeed._experts.group_order import said_size
from restride.formats.deepspeed._experts.native import expert_name
from restride.formats.deepspeed.expert_settings import any_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from restride.formats.deepspeed._experts.native import NativeLayer
    from restride.formats.deepspeed._run import Run

__all__ = ["rank_counts"]

_MOST_WAYS: Final = 1 << 12


def rank_counts(run: Run, layers: Sequence[NativeLayer], said: Sequence[int]) -> dict[int, int]:
    """Count the ranks that share the experts of each layer, by its number.

    Args:
        run: The files.
        layers: The layers.
        said: Numbers of ranks that groups of the optimizer name.

    Raises:
        CorruptError: What the first rank lists of a layer is another part of it.
        UnsupportedError: Groups name several numbers, and nothing tells which is that of a layer.
    """
    held = _held(run)
    if len(said) > 1 and run.models[0].param_shapes is None:
        return _by_size(run, layers, said)
    found: dict[int, int] = {}
    for layer in layers:
        own = held.get(layer.prefix, 0)
        alone = said[0] if len(said) == 1 else None
        ranks = alone or (layer.count // own if own else 1)
        if layer.count % ranks or (own and own * ranks != layer.count):
            raise CorruptError(
                f"layer {layer.number} has {layer.count} experts, {own} of them on the first of "
                f"{ranks} expert-parallel ranks",
                where=f"{run.models[0].root.where}: param_shapes",
            )
        if len(said) > 1 and ranks not in said:
            raise _unknown(run, layer, said)
        found[layer.number] = ranks
    return found


def _held(run: Run) -> dict[str, int]:
    """How many experts of each layer the first rank trains, by what their names begin with."""
    held: dict[str, int] = {}
    for group in run.models[0].param_shapes or ():
        for parts in map(expert_name, group):
            if parts is not None:
                held[parts[0]] = max(held.get(parts[0], 0), parts[1] + 1)
    return held


def _by_size(run: Run, layers: Sequence[NativeLayer], said: Sequence[int]) -> dict[int, int]:
    """Which number each layer has, by the sizes of the groups of the first rank."""
    sizes, are_flat = _sizes(run)
    measures = [_measure(run, layer, are_flat=are_flat) for layer in layers]
    options = [[size for size in said if layer.count % size == 0] for layer in layers]
    if prod(map(len, options)) > _MOST_WAYS:
        raise _unknown(run, layers[0], said)
    ways = [way for way in product(*options) if _totals(layers, way, measures) == sizes]
    if len(ways) != 1:
        different = [n for n, chosen in enumerate(zip(*ways, strict=True)) if len({*chosen}) > 1]
        raise _unknown(run, layers[different[0] if different else 0], said)
    return {layer.number: size for layer, size in zip(layers, ways[0], strict=True)}


def _totals(
    layers: Sequence[NativeLayer], way: Iterable[int], measures: Sequence[int]
) -> dict[int, int]:
    totals: dict[int, int] = {}
    for layer, size, measure in zip(layers, way, measures, strict=True):
        totals[size] = totals.get(size, 0) + layer.count // size * measure
    return totals


def _measure(run: Run, layer: NativeLayer, *, are_flat: bool) -> int:
    """Elements of one expert where groups are flat, else its tensors."""
    buffers = run.models[0].buffer_names
    shapes = [
        shape for rest, shape in layer.shapes.items() if f"{layer.prefix}.0.{rest}" not in buffers
    ]
    return sum(map(prod, shapes)) if are_flat else len(shapes)


def _sizes(run: Run) -> tuple[dict[int, int], bool]:
    """How large the groups of each number of ranks are on the first rank, and if they are flat."""
    state = run.models[0].optimizer
    if state is None:
        return {}, False
    flats = state.get("fp32_groups_flat")
    listed = (state.get("optimizer_state_dict") or state).at("param_groups").elements()
    buffers = flats.elements() if flats else ()
    sizes: dict[int, int] = {}
    for number, group in enumerate(listed):
        size = said_size(group)
        if size is not None:
            own = len(group.at("params").integers())
            if flats is not None:
                own = prod(buffers[number].tensor().shape) if number < len(buffers) else 0
            sizes[size] = sizes.get(size, 0) + own
    return sizes, flats is not None


def _unknown(run: Run, layer: NativeLayer, said: Sequence[int]) -> UnsupportedError:
    return UnsupportedError(
        f"has layers with experts on {any_of(said)} ranks, and nothing tells on how many those of "
        f"layer {layer.number} are",
        where=str(run.folder.path),
        remedy="save with ZeRO-1, where the first rank lists its experts, or a model whose layers "
        "have one ep_size",
    )
