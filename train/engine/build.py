"""Builds the engine that a configuration names; what only one of them needs is imported with it."""

from matmix.train.activation import check_float8
from matmix.train.engine.base import Engine
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import Mesh, make_mesh
from matmix.train.process.distributed import Distributed


def build_engine(config: EngineConfig, distributed: Distributed, mesh: Mesh | None = None) -> Engine:
    """Returns the engine of `config.name`; mesh: that of the run. Raises ValueError (one line) if it does not fit."""
    if config.fp8:
        check_float8(config.fp8, distributed.device)
    mesh = mesh or make_mesh(config, distributed)
    if config.kind == "deepspeed":
        from matmix.train.engine.zero import PartitionedEngine, ZeroEngine

        return (PartitionedEngine if config.zero_stage else ZeroEngine)(config, distributed, mesh)
    from matmix.train.engine.fsdp import FsdpEngine

    return FsdpEngine(config, distributed, mesh)
