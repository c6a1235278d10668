"""What moves, decided before the first byte does: transfers, steps, and the memory they take."""
