"""From files of pictures to a dataset of picture shards."""
