"""What a value is: a struct that cannot be changed.

A class made by `dataclasses` costs a quarter of a millisecond: its methods are written as text and
compiled. Every command would make two hundred of them before it reads a byte. Those of msgspec are
made thirty times faster, and their instances five times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, dataclass_transform

import msgspec

if TYPE_CHECKING:
    from inspect import Signature

__all__ = ["Frozen"]


class _FrozenMeta(msgspec.StructMeta):
    """Says the signature as it is written. That of msgspec evaluates every annotation.

    It would fail, and with it ``help()``: most of ours name what only a type checker imports.
    """

    @property
    def __signature__(self) -> Signature:
        import inspect  # noqa: PLC0415 - only who asks for a signature pays

        names, defaults = self.__struct_fields__, self.__struct_defaults__
        without = [inspect.Parameter.empty] * (len(names) - len(defaults))
        notes: dict[str, object] = {}
        for base in reversed(self.__mro__):
            notes |= inspect.get_annotations(base)
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default,
                annotation=notes[name],
            )
            for name, default in zip(names, (*without, *defaults), strict=True)
        ]
        return inspect.Signature(parameters, return_annotation=None)


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Frozen(msgspec.Struct, metaclass=_FrozenMeta, frozen=True):
    """The base of all values: fields, `__post_init__`, equality, hash and repr as of a dataclass.

    Args of the class, beside it: ``cache_hash=True`` where instances are looked up often,
    ``gc=False`` where fields hold only numbers and text. A changed copy is made by
    `msgspec.structs.replace`.

    Examples:
        >>> class Place(Frozen):
        ...     row: int
        ...     column: int = 0
        >>> Place(3)
        Place(row=3, column=0)
        >>> Place(3) == Place(3, 0)
        True
    """
