"""Checkpoints: written whole or not at all, and read at any number of ranks."""
