"""Writers of shards: MDS and WebDataset behind one interface."""

from matmix.data.writers.base import Shard, ShardFormat, SplitWriter
from matmix.data.writers.files import write_atomic
from matmix.data.writers.mds import MdsFormat
from matmix.data.writers.webdataset import WebDatasetFormat

__all__ = ["MdsFormat", "Shard", "ShardFormat", "SplitWriter", "WebDatasetFormat", "write_atomic"]
