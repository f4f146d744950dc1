"""Tile sizes that were measured: one file for each GPU architecture, read as plain data."""
