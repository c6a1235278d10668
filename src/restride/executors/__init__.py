"""What moves bytes, and all that keeps a run of it: order, progress, journal, digests."""
