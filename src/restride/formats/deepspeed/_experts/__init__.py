"""Experts: those that AutoEP stacks, and the modules of DeepSpeed's own MoE layer (native)."""
