"""Reads the checkpoints of the papers' own code."""
