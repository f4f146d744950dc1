"""Engines: how one model is spread over many devices, behind one interface."""

from matmix.train.engine.base import Engine
from matmix.train.engine.config import EngineConfig
from matmix.train.process.distributed import Distributed

__all__ = ["Engine", "EngineConfig", "build_engine"]


def build_engine(config: EngineConfig, distributed: Distributed) -> Engine:
    """The engine that `config.name` asks for. Raises ValueError where its mesh does not fit the ranks."""
    if config.kind == "deepspeed":
        from matmix.train.engine.deepspeed.engine import ZeroEngine

        return ZeroEngine(config, distributed)
    from matmix.train.engine.fsdp import FsdpEngine

    return FsdpEngine(config, distributed)
