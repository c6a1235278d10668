"""What the writer puts into each kind of file."""
