"""Find the layout of a partition function by running it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from msgspec.structs import replace

from restride.algebra._checks import require_int
from restride.algebra.canonical import canonicalize
from restride.algebra.fold import fold
from restride.algebra.mesh import as_mesh
from restride.arrays._frameworks import loaded_torch
from restride.arrays._markers import (
    PADDED,
    CastError,
    PartitionError,
    Runner,
    agreeing,
    random_elements,
    strip,
    trace,
)
from restride.arrays.extract import extract
from restride.errors import UnsupportedError
from restride.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from fractions import Fraction

    from numpy.typing import NDArray

    from restride.algebra.layout import Layout, Shape
    from restride.algebra.mesh import Mesh, MeshLike
    from restride.algebra.piece import Piece
    from restride.arrays._markers import Origin, Partition

__all__ = ["Probe", "Refused", "probe"]

MarkerDType: TypeAlias = Literal["int64", "float64", "int32", "float32"]

# Four times this many markers are a few hundred megabytes.
_LARGEST_ENLARGED_NUMEL: Final = 1 << 24


class Refused(Frozen):
    """A size at which the partition function could not be run.

    Attributes:
        shape: Shape of the full tensor.
        reason: What it raised.
    """

    shape: Shape
    reason: str


class Probe(Frozen):
    """What running a partition function has shown.

    Attributes:
        layout: Its layout at the shape that was asked for: proved by folding the markers, and
            compared with the function on random numbers.
        others: Its layouts at other sizes, each found and compared in the same way.
        refused: Other sizes that were tried and that the function refused.
        framework: Kind of arrays it was run on, ``"numpy"`` or ``"torch"``.
        dtype: Element type of the markers.
        is_bit_exact: Whether scaled elements are the very quotients that `extract` computes. A
            layer that multiplies by a rounded reciprocal differs in the last bit.
    """

    layout: Layout
    others: tuple[Layout, ...]
    refused: tuple[Refused, ...]
    framework: str
    dtype: str
    is_bit_exact: bool

    @property
    def checked_shapes(self) -> tuple[Shape, ...]:
        """Every shape at which the layout was found and compared, the one asked for first."""
        return (self.layout.full_shape, *(layout.full_shape for layout in self.others))

    @property
    def is_size_independent(self) -> bool:
        """Whether other sizes were checked, and all of them need as many pieces.

        The numbers in a layout belong to one shape. That they follow a rule, and did not come out
        this short by accident, is only seen at another one.
        """
        pieces = len(self.layout.all_pieces)
        return bool(self.others) and all(len(o.all_pieces) == pieces for o in self.others)


def probe(
    partition: Partition,
    shape: Iterable[int],
    *,
    mesh: MeshLike,
    framework: Literal["numpy", "torch"] | None = None,
    dtype: MarkerDType | None = None,
    scale_shape: Callable[[Shape, int], Iterable[int]] | None = None,
) -> Probe:
    """Find the layout of a partition function by running it on markers.

    Args:
        partition: Function of (full tensor, rank) that returns the shard of that rank. It is run
            several times for each rank, each time on a tensor of its own.
        shape: Shape of the full tensor.
        mesh: The ranks that it cuts for.
        framework: Kind of arrays it wants. By default PyTorch is tried where it is imported
            already, then NumPy. Say which one where a function would run on both and mean
            something else, such as ``full.transpose(0, 1)``.
        dtype: Element type that it wants. By default 64-bit integers are tried, then floats.
        scale_shape: Function of (shape, factor) that gives another shape which makes sense; called
            with 2 and 3. By default every dimension is doubled (halved where that would be large),
            then one dimension at a time, until the function accepts.

    Returns:
        The layout, and at which sizes it was found and compared on random numbers. A pure scaling
        is part of the layout; zeros that come from no element are padding.

    Raises:
        LayoutError: The shape or the mesh is no such thing.
        UnsupportedError: The function is no layout: it casts, adds up elements, moves them by
            their values, fills with something else than zeros, or fails on every kind of array.
            The message says which, and where.

    Cost:
        Five runs of the function for each rank and size, and memory for a few tensors of 64-bit
        elements. Folding is cheap where anything repeats.

    Examples:
        >>> import numpy as np
        >>> def gate_up(full, rank):
        ...     gate, up = np.split(full, 2)
        ...     return np.concatenate([np.split(gate, 2)[rank], np.split(up, 2)[rank]])
        >>> found = probe(gate_up, (8, 3), mesh={"tp": 2}, framework="numpy")
        >>> len(found.layout.all_pieces), found.checked_shapes, found.is_size_independent
        (1, ((8, 3), (16, 6)), True)
    """
    mesh = as_mesh(mesh)
    asked = _checked_shape(shape)
    runner, origins = _first_that_runs(partition, mesh, asked, framework, dtype)
    layout = _layout_of(origins, mesh, asked)
    is_bit_exact = _compare(runner, layout)
    others: list[Layout] = []
    refused: list[Refused] = []
    for other_shape in _other_shapes(asked, scale_shape):
        try:
            other = _layout_of(trace(runner, other_shape), mesh, other_shape)
            is_bit_exact &= _compare(runner, other)
        except PartitionError as error:
            refused.append(Refused(other_shape, str(error)))
            continue
        except UnsupportedError as error:
            raise error.located(f"at shape {other_shape}") from None
        others.append(other)
        if scale_shape is None:
            break
    return Probe(
        layout, tuple(others), tuple(refused), runner.framework, runner.dtype, is_bit_exact
    )


def _checked_shape(shape: Iterable[int]) -> Shape:
    checked = tuple(shape)
    for size in checked:
        require_int(f"each size in the shape {checked}", size, at_least=0)
    return checked


def _first_that_runs(
    partition: Partition,
    mesh: Mesh,
    shape: Shape,
    framework: str | None,
    dtype: str | None,
) -> tuple[Runner, list[Origin]]:
    frameworks = ("torch", "numpy") if loaded_torch() is not None else ("numpy",)
    failures: list[str] = []
    cast: CastError | None = None
    refusal: UnsupportedError | None = None
    for name in (framework,) if framework else frameworks:
        for kind in (dtype,) if dtype else ("int64", "float64"):
            runner = Runner(partition, mesh.size, name, kind)
            try:
                return runner, trace(runner, shape)
            except CastError as error:
                cast = error
            except PartitionError as error:
                failures.append(f"{name} {kind}: {error}")
            except UnsupportedError as error:
                refusal = error  # floats may be scaled where integers are not
    if refusal is not None:
        raise refusal
    if cast is not None:
        raise UnsupportedError(
            f"the partition function casts {cast}",
            remedy="a cast is an operation between layouts; probe the function without it",
        ) from cast
    raise UnsupportedError(
        f"the partition function runs on no array that was tried ({'; '.join(failures)})"
    )


def _other_shapes(
    shape: Shape, scale_shape: Callable[[Shape, int], Iterable[int]] | None
) -> Iterator[Shape]:
    if scale_shape is not None:
        for factor in (2, 3):
            yield _checked_shape(scale_shape(shape, factor))
        return
    if prod(shape) << len(shape) <= _LARGEST_ENLARGED_NUMEL:
        yield tuple(2 * size for size in shape)
        yield tuple(3 * size for size in shape)
    elif all(size % 2 == 0 for size in shape):
        yield tuple(size // 2 for size in shape)
    for axis, size in enumerate(shape):
        yield (*shape[:axis], 2 * size, *shape[axis + 1 :])


def _layout_of(origins: list[Origin], mesh: Mesh, shape: Shape) -> Layout:
    """Fold what comes from where, once for each scale."""
    whole = _fold([origin.indices for origin in origins], origins, mesh, shape)
    if all(len(origin.factors) == 1 for origin in origins):
        return whole
    used = {
        scale
        for origin in origins
        for scale in origin.factors
        if (_has_scale(origin, scale) & (origin.indices != PADDED)).any()
    }
    pieces: list[Piece] = []
    for scale in sorted(used):
        masked = [np.where(_has_scale(origin, scale), origin.indices, PADDED) for origin in origins]
        part = _fold(masked, origins, mesh, shape)
        pieces.extend(replace(piece, scale=scale) for piece in part.all_pieces)
    return canonicalize(replace(whole, all_pieces=tuple(pieces)))


def _has_scale(origin: Origin, scale: Fraction) -> NDArray[np.bool_]:
    if scale not in origin.factors:
        return np.zeros(origin.scales.shape, np.bool_)
    has_scale: NDArray[np.bool_] = origin.scales == origin.factors.index(scale)
    return has_scale


def _fold(maps: list[NDArray[np.int64]], origins: list[Origin], mesh: Mesh, shape: Shape) -> Layout:
    short, loops = strip(maps)
    return fold(
        short,
        mesh=mesh,
        full_shape=shape,
        shard_shapes=[origin.shape for origin in origins],
        inner=loops,
    )


def _compare(runner: Runner, layout: Layout) -> bool:
    """Compare the layout itself with the function, on numbers that it has not seen.

    Returns:
        Whether they agree in every bit, scaled elements included.
    """
    sample = random_elements(runner.dtype, layout.full_shape, seed=2)
    is_bit_exact = True
    for rank, shard in enumerate(runner.run(sample)):
        expected = extract(layout, sample, rank)
        if (
            shard.shape != expected.shape
            or not agreeing(expected, shard, is_exact=layout.is_exact).all()
        ):
            raise UnsupportedError(
                "the partition function gives another shard each time", where=f"rank {rank}"
            )
        is_bit_exact &= bool(np.array_equal(expected, shard))
    return is_bit_exact
