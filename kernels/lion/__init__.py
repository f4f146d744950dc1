"""LION's mixing as one operation."""
