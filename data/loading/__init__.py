"""From the shards of a split to micro-batches: which document comes when, and in which row."""
