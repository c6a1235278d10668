"""Read and write DeepSpeed's universal folders, which an engine of any parallelism resumes from.

One folder a parameter, one file a state: ``zero/PARAMETER/STATE.pt``.
"""

from restride.formats.universal.reader import read_catalog
from restride.formats.universal.training import read_training
from restride.formats.universal.writer import lay_out

__all__ = ["lay_out", "read_catalog", "read_training"]
