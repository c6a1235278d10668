"""Read and write DeepSpeed's own checkpoints: ZeRO-0 to ZeRO-3, pipelines, experts, any ranks.

From files to tensors: `_files` finds them by their names, `_model` and `_optimizer` say what one of
them holds, and `_run` has all by rank. Which rank has which part of a parameter is in `_partitions`
under ZeRO-1 and ZeRO-2, in `_chunks` under ZeRO-3 and in `_whole` without ZeRO; how tensor-parallel
ranks cut it, in `_placement`. `_tensors` makes the entries of a catalog of that, for `reader`, and
`training` reads what is no tensor. `writer` goes the other way, by the modules in `_writing`. What
experts and pipelines have of their own is in `_experts` and `_pipeline`; `maps`, `maps_out` and
`placements` are DeepSpeed's own descriptions of layouts.
"""

from restride.formats.deepspeed.maps import from_affine_map
from restride.formats.deepspeed.reader import read_catalog

__all__ = ["from_affine_map", "read_catalog"]
