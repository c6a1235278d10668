"""Describe, prove and move the tensors of distributed training checkpoints."""

__version__ = "0.1.0"
