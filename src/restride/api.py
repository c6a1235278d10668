"""Open, check, convert and compare checkpoints: the seam for the command line and for notebooks.

Each name is imported when it is first used: who only looks at headers does not load the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from restride.checking import CheckReport, check
    from restride.checkpoint.catalog import Catalog
    from restride.comparison import (
        ArrayDifference,
        DiffReport,
        check_against,
        diff,
        fingerprint,
        read_fingerprints,
    )
    from restride.conversion import ConvertReport, PartExecutor, convert
    from restride.exports import Wanted
    from restride.projecting import ConvertProjection, dry_run

__all__ = [
    "ArrayDifference",
    "CheckReport",
    "ConvertProjection",
    "ConvertReport",
    "DiffReport",
    "PartExecutor",
    "Wanted",
    "check",
    "check_against",
    "convert",
    "diff",
    "dry_run",
    "fingerprint",
    "open",
    "read_fingerprints",
]

_HOMES: Final = {
    "ArrayDifference": "restride.comparison",
    "CheckReport": "restride.checking",
    "ConvertProjection": "restride.projecting",
    "ConvertReport": "restride.conversion",
    "DiffReport": "restride.comparison",
    "PartExecutor": "restride.conversion",
    "Wanted": "restride.exports",
    "check": "restride.checking",
    "check_against": "restride.comparison",
    "convert": "restride.conversion",
    "diff": "restride.comparison",
    "dry_run": "restride.projecting",
    "fingerprint": "restride.comparison",
    "read_fingerprints": "restride.comparison",
}


if not TYPE_CHECKING:  # to a checker, a name that is not above is a mistake

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'restride.api' has no attribute {name!r}")
        found: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)


def open(  # noqa: A001 - reads as restride.open
    path: str | PathLike[str],
    *,
    pp_tied: Mapping[str, Sequence[int]] | None = None,
    source_config: str | PathLike[str] | None = None,
    source_rules: str | PathLike[str] | None = None,
) -> Catalog:
    """Find out what is in a checkpoint, without loading a tensor.

    Args:
        path: A DeepSpeed checkpoint (its folder, or one of its tags), a universal folder, a
            safetensors file or a folder of them.
        pp_tied: As for `restride.convert`, of a pipeline without ZeRO.
        source_config: As for `restride.convert`.
        source_rules: Likewise.

    Returns:
        Tensors, states, layouts, and where their bytes are.

    Raises:
        FormatError: It is no checkpoint that is known, or one that is damaged.
        UnsupportedError: It is one that this version cannot read, or what is told is not so, or
            matters to nothing.
        RuleError: What is told of the cut is not so.
        ExecutionError: A file cannot be read.

    Cost:
        Reads headers only; time grows with the number of tensors, not with their size.
    """
    from restride.formats.opening import Told, open_catalogs  # noqa: PLC0415 - as the others are

    return open_catalogs(path, told=Told(pp_tied, source_config, source_rules))[0]
