"""What a checkpoint says, without its bytes: catalog, values, training, and what goes out."""
