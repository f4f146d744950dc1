"""From the shards of a split to micro-batches: the order of documents, and how they are put into rows."""
