"""Text files -> shards of tokens -> batches. Knows nothing of models.

Nothing is imported here: tokenising processes start by importing this package, and must not pay for torch.
"""
