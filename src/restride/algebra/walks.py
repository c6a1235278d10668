"""Strided walks over several addresses: everything that the rest of the package uses of them.

A walk (`_walk`) is a nest of loops that moves k addresses together. `join` (`_join`) finds every
pair of steps of two walks that stand at the same first address, as walks again, and `merge`
(`_merge`) writes many walks as few. None of them walks steps.
"""

from __future__ import annotations

from restride.algebra._join import join, restrict
from restride.algebra._merge import merge
from restride.algebra._walk import Digit, Digits, Walk, coalesce, fix

__all__ = ["Digit", "Digits", "Walk", "coalesce", "fix", "join", "merge", "restrict"]
