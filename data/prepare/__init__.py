"""From text files to a dataset of token shards."""
