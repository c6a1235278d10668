"""DeepSpeed's own descriptions of layouts, both ways.

`from_affine_map` and `to_affine_map` take and give one map of ``universal_checkpoint_info`` in the
stored form, version 1; `from_affine_maps` and `to_affine_maps` whole documents of them.
`from_expert_placement`, `to_expert_placement` and `to_expert_map` do the same for the placement of
experts that AutoEP stores. Nothing of DeepSpeed is imported.
"""

from restride.formats.deepspeed.maps import from_affine_map
from restride.formats.deepspeed.maps_out import from_affine_maps, to_affine_map, to_affine_maps
from restride.formats.deepspeed.placements import (
    from_expert_placement,
    to_expert_map,
    to_expert_placement,
)

__all__ = [
    "from_affine_map",
    "from_affine_maps",
    "from_expert_placement",
    "to_affine_map",
    "to_affine_maps",
    "to_expert_map",
    "to_expert_placement",
]
