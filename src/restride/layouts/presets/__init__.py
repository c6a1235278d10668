"""Layouts of whole models: tables for known families, and rule files for all others.

`autotp_layouts` gives the layout of every parameter as DeepSpeed's AutoTP cuts it, from a Hugging
Face ``config.json``; `read_rules` and `rule_layouts` do so by rules that a user writes.
"""

from restride.layouts.presets._config import Settings, read_settings
from restride.layouts.presets._models import (
    how_to_write,
    known_models,
    name_pattern,
    nearest_models,
    shown_models,
)
from restride.layouts.presets.autotp import autotp_cuts, autotp_layouts, fused_layout, is_head
from restride.layouts.presets.fitting import require_model_of, require_no_other_model
from restride.layouts.presets.from_shards import ShardCuts
from restride.layouts.presets.rule_file import (
    Matched,
    Rules,
    matched_layouts,
    read_rules,
    rule_layouts,
)

__all__ = [
    "Matched",
    "Rules",
    "Settings",
    "ShardCuts",
    "autotp_cuts",
    "autotp_layouts",
    "fused_layout",
    "how_to_write",
    "is_head",
    "known_models",
    "matched_layouts",
    "name_pattern",
    "nearest_models",
    "read_rules",
    "read_settings",
    "require_model_of",
    "require_no_other_model",
    "rule_layouts",
    "shown_models",
]
