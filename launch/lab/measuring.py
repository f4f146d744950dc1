"""Tools to measure training steps: what the machine is, how much memory a process takes, a prepared engine, a batch."""

import datetime
import functools
import itertools
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from torch.autograd.profiler import profile

from matmix.data.loading.batch import Batch
from matmix.model import ModelConfig, build_model, initialize
from matmix.train.config import RunConfig
from matmix.train.engine.base import Engine
from matmix.train.optim.config import OptimizerConfig
from matmix.train.optim.groups import make_optimizer
from matmix.train.run.outcome import git_revision


def environment(dtype: str = "float32", distributions: tuple[str, ...] = ("triton",)) -> dict[str, object]:
    """Returns hardware, versions, date and commit, to be kept with every result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "versions": {"torch": torch.__version__, **{name: _version(name) for name in distributions}},
        "commit": git_revision(),
        "dtype": dtype,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)} ({torch.backends.cpu.get_cpu_capability()})" if names else "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def peak_memory(run: Callable[[], object]) -> int:
    """Returns by how many bytes the resident set of this process grows, at its highest, while `run` runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the kernel's high-water mark back to the present size
    before = process_bytes("VmRSS")
    run()
    return process_bytes("VmHWM") - before


def process_bytes(key: str) -> int:
    """Returns a size in this process's status, such as VmRSS. Raises RuntimeError on systems other than Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: measure on Linux")


def tensor_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes of tensors on the CPU that `run` has made: those alive when it has returned (its result, and
    what that keeps for a backward pass), and the most at once. torch's allocator counts them; nothing is estimated."""
    with profile(profile_memory=True) as profiler:
        kept = run()
    events = (event for event in profiler.kineto_results.events() if event.name() == "[memory]")
    sizes = [0, *itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))]
    del kept
    return sizes[-1], max(sizes)


def prepare(engine: Engine, model: ModelConfig, optimizer: OptimizerConfig, seqlen: int) -> None:
    """Gives the engine a model with the initial weights of seed 0, and its optimizer."""
    begin = functools.partial(initialize, seed=0)
    made = functools.partial(make_optimizer, config=optimizer, seqlen=seqlen)
    engine.prepare(build_model(model, device="meta"), initialize=begin, make_optimizer=made)


def random_batch(config: RunConfig, size: int) -> Batch:
    """Returns a micro-batch of `size` dense sequences of random tokens, always the same."""
    shape = size, config.data.seqlen
    generator = torch.Generator().manual_seed(0)
    return config.task().example_batch(torch.randint(config.model.vocab_size, shape, generator=generator))
