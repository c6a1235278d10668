"""Layouts applied to NumPy arrays and PyTorch tensors.

`extract` cuts a shard out, `rebuild` puts shards together, `move` turns shards of one layout into
shards of another, and `probe` finds the layout of a partition function by running it.

PyTorch is not imported here: it is there already when a tensor is handed in.
"""
