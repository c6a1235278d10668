"""Round a buffer of floats: the kernel does the common cases, `casts` all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from restride.arrays import _kernel
from restride.arrays.memory import address_of

if TYPE_CHECKING:
    from restride.arrays.casts import NamedDType

__all__ = ["rounded"]

_WIDE: Final = "float32"
_NARROW: Final = ("bfloat16", "float16")


def rounded(buffer: memoryview, source: NamedDType, target: NamedDType) -> memoryview:
    """Convert floats, with the results of `restride.arrays.casts.cast`.

    Args:
        buffer: Contiguous elements of type `source`.
        source: What the bits are.
        target: What they should be.

    Returns:
        The bytes of the converted elements, or of the same ones where the types are the same.

    Raises:
        UnsupportedError: As for `cast`.
    """
    if source.name == target.name:
        return buffer
    kernel, (count, rest) = _kernel.KERNEL, divmod(buffer.nbytes, 4)
    if kernel is not None and not rest and source.name == _WIDE and target.name in _NARROW:
        result = bytearray(2 * count)
        is_bfloat16 = target.name == _NARROW[0]
        kernel.round(address_of(result), address_of(buffer), count, is_bfloat16=is_bfloat16)
        return memoryview(result)
    import numpy as np  # noqa: PLC0415 - takes longer than most conversions do besides

    from restride.arrays.casts import cast  # noqa: PLC0415 - imports it, too

    return cast(np.frombuffer(buffer, np.uint8), source, target).data
