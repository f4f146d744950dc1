"""What the labels of a batch mean beyond ids and values."""

IGNORED = -100
"""Label of a position that is not predicted (the `ignore_index` of torch's cross-entropy)."""
