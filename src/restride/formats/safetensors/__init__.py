"""Read and write safetensors: single files, sharded ones with their index, folders of them.

Weights are stored under the names of the model, other states as ``PARAMETER/STATE``.
"""

from restride.formats.safetensors.reader import read_catalog
from restride.formats.safetensors.writer import lay_out

__all__ = ["lay_out", "read_catalog"]
