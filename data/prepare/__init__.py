"""From files of texts or pictures to datasets of shards."""
