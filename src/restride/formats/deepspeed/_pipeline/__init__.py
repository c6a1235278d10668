"""Pipelines: their layers and stages, read, numbered and cut anew."""
