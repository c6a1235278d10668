"""Bytes in files: positioned reads and writes, outputs that appear whole, and inert pickles."""
