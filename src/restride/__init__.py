"""Describe, prove and move the tensors of distributed training checkpoints.

Importing the package loads nothing else: each public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from restride import api, deepspeed, errors, layouts
    from restride.algebra.coverage import prove
    from restride.algebra.layout import Layout
    from restride.algebra.mesh import Mesh
    from restride.algebra.piece import Axis, Piece
    from restride.algebra.signature import signature
    from restride.api import check, convert, open  # noqa: A004 - restride.open reads well
    from restride.arrays.extract import extract
    from restride.arrays.move import move
    from restride.arrays.probe import probe
    from restride.arrays.rebuild import rebuild
    from restride.comparison import diff, fingerprint
    from restride.planning.transfers import plan_transfer

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Layout",
    "Mesh",
    "Piece",
    "api",
    "check",
    "convert",
    "deepspeed",
    "diff",
    "errors",
    "extract",
    "fingerprint",
    "layouts",
    "move",
    "open",
    "plan_transfer",
    "probe",
    "prove",
    "rebuild",
    "signature",
]

_HOMES = {
    "Axis": "restride.algebra.piece",
    "Layout": "restride.algebra.layout",
    "Mesh": "restride.algebra.mesh",
    "Piece": "restride.algebra.piece",
    "check": "restride.api",
    "convert": "restride.api",
    "diff": "restride.comparison",
    "extract": "restride.arrays.extract",
    "fingerprint": "restride.comparison",
    "move": "restride.arrays.move",
    "open": "restride.api",
    "plan_transfer": "restride.planning.transfers",
    "probe": "restride.arrays.probe",
    "prove": "restride.algebra.coverage",
    "rebuild": "restride.arrays.rebuild",
    "signature": "restride.algebra.signature",
}


if not TYPE_CHECKING:  # to a checker, a name that is not above is a mistake

    def __getattr__(name: str) -> object:
        if name in {"api", "deepspeed", "errors", "layouts"}:
            return import_module(f"restride.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'restride' has no attribute {name!r}")
        found: object = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
