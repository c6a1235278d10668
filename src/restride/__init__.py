"""Describe, prove and move the tensors of distributed training checkpoints.

Checkpoints, as the command line has them; paths are files or folders of any known format:

    restride.open(path)             what is in it: names, shapes, layouts, findings; reads no tensor
    restride.check(path)            whether it is whole and consistent: its verdict and findings
    restride.convert(path, out)     write it as safetensors, or for other ranks
    restride.diff(a, b)             which arrays differ, and where
    restride.fingerprint(path)      digests that are the same under every sharding and format

Layouts, on arrays of NumPy or tensors of torch:

    restride.layouts                builders of what frameworks cut, as layouts.codegen_qkv
    restride.probe(function, ...)   the layout of any other cut, found by running it
    restride.prove(layout)          that it covers its tensor, or the element where it does not
    restride.extract, rebuild       one rank's shard out of the full tensor, and back
    restride.plan_transfer, move    from the shards of one layout to those of another
    restride.deepspeed              DeepSpeed's stored form of a layout

Sizes are in bytes where a name ends in ``_nbytes``, and in elements where it ends in ``numel``.
Whatever is refused raises a subclass of `restride.errors.RestrideError`, with what would work.
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
    from restride.api import check, convert, diff, fingerprint, open  # noqa: A004 - restride.open reads well
    from restride.arrays.extract import extract
    from restride.arrays.move import move
    from restride.arrays.probe import probe
    from restride.arrays.rebuild import rebuild
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
    "diff": "restride.api",
    "extract": "restride.arrays.extract",
    "fingerprint": "restride.api",
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
