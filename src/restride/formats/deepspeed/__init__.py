"""Read DeepSpeed checkpoints: ZeRO-1 to ZeRO-3, any tensor and data parallelism, AutoEP."""

from restride.formats.deepspeed.maps import from_affine_map
from restride.formats.deepspeed.reader import read_catalog

__all__ = ["from_affine_map", "read_catalog"]
