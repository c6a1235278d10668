"""Layouts applied to NumPy arrays and PyTorch tensors.

`extract` cuts a shard out, `rebuild` puts shards together, `move` turns shards of one layout into
shards of another, and `probe` finds the layout of a partition function by running it.

PyTorch is not imported here: it is there already when a tensor is handed in.
"""

from __future__ import annotations

from restride.arrays.extract import extract
from restride.arrays.move import move
from restride.arrays.probe import Probe, probe
from restride.arrays.rebuild import rebuild

__all__ = ["Probe", "extract", "move", "probe", "rebuild"]
