"""The layer around a state-space scan as one operation."""
