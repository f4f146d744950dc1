"""Turns errors of libraries and the system into one line with advice, if a person can do something about them."""

import contextlib
import errno
import re
from collections.abc import Iterator

import torch

from matmix.data.artifacts import shell_line
from matmix.train.config import RunConfig
from matmix.train.errors import OutOfMemoryError, PeerError, RunFailure

# CPU allocator, CUDA runtime, cuBLAS: they raise a plain RuntimeError.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|out of memory|STATUS_ALLOC_FAILED|std::bad_alloc"
)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(\w+)")
# A DataLoader, of its processes.
_READER_GONE = re.compile(r"DataLoader worker.* (?:is killed by signal|exited unexpectedly)")
# gloo, NCCL and the store, when a process on the other side is gone or does not answer.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|Socket closed"
    r"|[Tt]imed out|remote process exited|ncclRemoteError|failed to recv|unable to find address|NCCL error"
    r"|Application timeout|connection was (?:likely )?closed",
)


@contextlib.contextmanager
def explaining(config: RunConfig, world_size: int) -> Iterator[None]:
    """Raises what `explained` makes of an error, from that error, and all others as they are."""
    try:
        yield
    except Exception as error:
        failure = explained(error, config, world_size)
        if failure is None:
            raise
        raise failure from error


def explained(error: Exception, config: RunConfig, world_size: int) -> RunFailure | None:
    """Returns the failure to raise instead of `error`, or None where its traceback says more."""
    if isinstance(error, RunFailure):
        return None
    text = str(error)
    if is_out_of_memory(error):
        return OutOfMemoryError(memory_advice(text, config, world_size))
    if isinstance(error, RuntimeError) and _READER_GONE.search(text):
        fewer = shell_line("--data.workers", max(0, config.data.workers - 1))
        return RunFailure(
            "a process that reads the data was killed, often because the machine's memory ran out: the same command "
            f"goes on from the newest checkpoint; {fewer} needs less memory"
        )
    if world_size > 1 and isinstance(error, RuntimeError) and _PEER_GONE.search(text):
        line = " ".join(text.split())
        line = line if len(line) <= 160 else f"{line[:157]}..."
        return PeerError(f"another rank is gone or does not answer; the outputs of the other ranks say why ({line})")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that memory ran out, of a device or of this machine."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def memory_advice(text: str, config: RunConfig, world_size: int) -> str:
    """Says which memory ran out at which sizes, and which options help, those first that change no numbers."""
    micro, seqlen = config.micro_batch(config.data_size(world_size)), config.data.seqlen
    where = "on the GPU" if re.search("CUDA|HIP|cuda|hip", text) else "on the CPU"
    tried = _TRIED.search(text)
    happened = f"out of memory {where}{f' (tried to allocate {_size(tried)})' if tried else ''}"
    happened += f" at micro_batch_size {micro} and data.seqlen {seqlen}"
    first = []
    if micro > 1:
        half = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        first.append(f"set {shell_line('--micro-batch-size', half)} (the same batches in more passes)")
    if config.engine.activation_checkpointing not in ("full", "offload"):
        first.append("set --engine.activation-checkpointing full (slower, the same losses)")
    if not config.engine.shards_all:
        first.append("set --engine.name fsdp2, which shards weights, gradients and moments")
    elif world_size == 1 or config.engine.name == "fsdp2":
        first.append("use more ranks, which share weights, gradients and moments")
    first.append(f"set a data.seqlen below {seqlen}, or a smaller model, in a new run")
    return f"{happened}; in this order: {', '.join(first)}"


def _size(tried: re.Match[str]) -> str:
    """Unifies the sizes in torch's messages: "2.00 GiB" on a GPU, "10485760 bytes" on the CPU."""
    number, unit = tried.groups()
    return f"{int(number) / 2**20:.1f} MiB" if unit == "bytes" else f"{number} {unit}"
