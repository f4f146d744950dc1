"""Directories that others made, trained from as they are (`data.reader`), without a preparation."""
