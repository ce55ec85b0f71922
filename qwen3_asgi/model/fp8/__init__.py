"""Checkpoints whose matrices are stored as float8 in blocks of 128 x 128 values."""
