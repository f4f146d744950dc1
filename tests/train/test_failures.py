"""Errors of libraries that become one line with advice."""

import dataclasses
import errno

import pytest
import torch

from matmix.train.config import FaultsConfig, RunConfig
from matmix.train.engine.config import EngineConfig
from matmix.train.errors import NonFiniteError, OutOfMemoryError, PeerError
from matmix.train.failures import explained, explaining

_GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB."
_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "10485760 bytes. Error code 12 (Cannot allocate memory)"
)
_CONFIG = RunConfig(global_batch_size=48, micro_batch_size=12)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(_GPU), "out of memory on the GPU (tried to allocate 2.50 GiB) at micro_batch_size 12"),
        (RuntimeError(_CPU), "out of memory on the CPU (tried to allocate 10.0 MiB) at micro_batch_size 12"),
        (MemoryError(), "out of memory on the CPU at micro_batch_size 12"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory on the CPU at micro_batch_size 12"),
    ],
)
def test_out_of_memory(error, said):
    failure = explained(error, _CONFIG, 2)
    assert isinstance(failure, OutOfMemoryError)
    assert str(failure).startswith(said)
    assert "set --micro-batch-size 6 " in str(failure)
    assert "set --engine.activation-checkpointing full" in str(failure)


def test_advice_is_what_can_still_be_done():
    engine = EngineConfig(name="ddp", activation_checkpointing="full")
    config = dataclasses.replace(_CONFIG, micro_batch_size=1, engine=engine)
    text = str(explained(MemoryError(), config, 2))
    assert "--micro-batch-size" not in text
    assert "--engine.activation-checkpointing" not in text
    assert "set --engine.name fsdp2" in text


def test_a_rank_that_is_gone():
    error = RuntimeError("[../pair.cc:534] Connection closed by peer [127.0.0.1]:40311")
    assert isinstance(explained(error, _CONFIG, 2), PeerError)
    assert explained(error, _CONFIG, 1) is None  # there is no other rank


def test_a_reading_process_that_was_killed():
    killed = RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")
    gone = RuntimeError("DataLoader worker (pid(s) 4711, 4712) exited unexpectedly")
    for error, ranks in ((killed, 1), (gone, 2)):
        failure = explained(error, _CONFIG, ranks)
        assert "a process that reads the data was killed" in str(failure)
        assert "--data.workers 0" in str(failure)


def test_what_nobody_can_explain_stays_as_it_is():
    for error in (KeyError("a bug"), RuntimeError("shapes do not match"), NonFiniteError("diverged")):
        assert explained(error, _CONFIG, 2) is None
        with pytest.raises(type(error)) as raised, explaining(_CONFIG, 2):
            raise error
        assert raised.value is error
    with pytest.raises(OutOfMemoryError) as raised, explaining(_CONFIG, 2):
        raise MemoryError
    assert isinstance(raised.value.__cause__, MemoryError)


def test_settings_that_make_no_sense():
    for settings in ({"hang_minutes": -1}, {"spike_factor": 0.5}, {"spike_window": 0}, {"max_rewinds": -1}):
        with pytest.raises(ValueError, match=f"faults.{next(iter(settings))}"):
            FaultsConfig(**settings)
