"""Checkpoints without ZeRO: every rank has its optimizer whole, inside its model file."""
