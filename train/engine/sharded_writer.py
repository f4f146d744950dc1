"""Writes tensors through torch.distributed.checkpoint, every rank its own shards, and `index.json` beside torch's own
index. To import that library takes half a second, which a start has no use for."""

import dataclasses
import json
import logging
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from matmix.data.storage.files import open_durable
from matmix.train.engine.base import find_os_error
from matmix.train.engine.full_state import MODEL
from matmix.train.engine.sharded_files import INDEX, MOMENTS, SUBDIRECTORY
from matmix.train.process.distributed import is_distributed

# It logs two lines for every tensor at the debug level, for whoever listens to the root logger.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)
# It warns where one process is what we want. Once and for all: filters set for a while would be another thread's, too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class _Writer(dcp.FileSystemWriter):
    """Writes our index beside torch's, and weights and moments into files of their own."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        Path(self.path).mkdir(exist_ok=True)  # torch would make the folders above as well, where they were moved away
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix, results = plan.storage_data.prefix, []
        for kind, is_weight in (("", True), (MOMENTS, False)):
            if items := [item for item in plan.items if item.index.fqn.startswith(MODEL) == is_weight]:
                place = dataclasses.replace(plan.storage_data, prefix=f"{kind}{prefix}")
                part = dataclasses.replace(plan, items=items, storage_data=place)
                results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for part in results for result in part}
        index = {}
        for key, entry in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in entry.chunks:
                place = places[MetadataIndex(key, chunk.offsets)]
                chunks.append([list(chunk.offsets), list(chunk.sizes), place.relative_path, place.offset, place.length])
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            index[key] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        with open_durable(Path(self.path) / INDEX) as file:
            file.write(json.dumps(index).encode())


@torch.no_grad()
def write_sharded(state: dict[str, torch.Tensor], directory: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes `state` into a folder of the checkpoint `directory`, on all ranks together: a tensor from one of them, a
    DTensor from all that hold a shard of it. Raises OSError on every rank if any rank could not write."""
    writer = _Writer(directory / SUBDIRECTORY)
    try:
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=not is_distributed())
    except CheckpointException as failure:
        for rank, (error, _) in sorted(failure.failures.items()):
            if (cause := find_os_error(error)) is not None:
                where = f" (rank {rank})" if is_distributed() else ""
                raise OSError(cause.errno, f"{cause.strerror or cause}{where}") from None
        raise RuntimeError(f"saving failed: {failure}") from None
