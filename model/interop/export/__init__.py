"""Writes models as directories that transformers loads by itself."""
