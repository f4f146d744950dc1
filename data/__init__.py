"""From text files to shards of tokens and from shards to batches. It knows nothing of models.

Nothing is imported here: tokenising processes start by importing this package, and must not pay for torch.
"""
