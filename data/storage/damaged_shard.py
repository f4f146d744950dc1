"""Shards that cannot be used, told apart from errors that say nothing of the data (no network, a full disk)."""


class DamagedShard(ValueError):
    """A shard whose bytes are not what the manifest promises; `where` names it."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where = where

    def __reduce__(self) -> tuple:
        return DamagedShard, (self.where, str(self)[len(self.where) + 1 :])


def damaged(where: str, why: str) -> DamagedShard:
    """The error for a shard whose contents are not what the index promises."""
    return DamagedShard(where, f"is damaged: {why}; fetch or prepare the data again")
