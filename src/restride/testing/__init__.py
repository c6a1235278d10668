"""The kit that tests are made of: oracles, strategies, slow writers, and hostile files."""
