"""Writes models as directories, most of which transformers loads by itself."""
