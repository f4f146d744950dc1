"""The documents of one split of a prepared dataset: written into numbered shards, and read again in any order."""
