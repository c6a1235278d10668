"""Layouts of whole models: tables for known families, and rule files for all others.

`autotp_layouts` gives the layout of every parameter as DeepSpeed's AutoTP cuts it, from a Hugging
Face ``config.json``; `read_rules` and `rule_layouts` do so by rules that a user writes.
"""

from restride.layouts.presets.autotp import autotp_layouts, known_models
from restride.layouts.presets.rule_file import Rules, read_rules, rule_layouts

__all__ = ["Rules", "autotp_layouts", "known_models", "read_rules", "rule_layouts"]
