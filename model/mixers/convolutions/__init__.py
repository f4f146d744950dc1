"""Mixers that are convolutions along the sequence."""
