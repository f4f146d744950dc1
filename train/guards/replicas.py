"""Compares the bits of tensors that several ranks hold copies of, which a faulty device or memory may change. A part
that one rank alone holds, such as the shards of FSDP2 and ZeRO-3, has no copy to be compared with."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from matmix.train.config import FaultsConfig
from matmix.train.engine.base import Engine
from matmix.train.errors import ReplicaError
from matmix.train.guards.steps import RewindableRun, go_back
from matmix.train.process.distributed import gather_objects
from matmix.train.process.launched import as_ranges, node_name

_PIECE = 1 << 24  # bytes that are summed up at a time
_FACTOR = -0x61C8864680B583EB  # odd; the golden ratio in 64 bits
_NAMED = 3  # tensors in a message


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns two numbers of 64 bits, (2,) on `device`, made from the bits of all tensors. The host does not wait.

    One element that changes always changes them, and so do two that change places within a piece of 16 MiB. Of other
    changes one in 2^64 would not.
    """
    total = torch.zeros(2, dtype=torch.int64, device=device)
    factors: torch.Tensor | None = None
    for piece in _pieces(tensors, device):
        words = piece.view(torch.int64)
        if factors is None:  # the first piece is the longest
            factors = 2 * torch.arange(words.numel(), dtype=torch.int64, device=device) + 1
        weights = factors[: words.numel()]
        # Modulo 2^64 an odd factor loses nothing of one word. Of two words that change places the upper halves are
        # summed up by themselves: differences of factors are even, and would push a sign bit out.
        sums = torch.stack([(words * weights).sum(), ((words >> 32) * weights).sum()])
        total = total * _FACTOR + sums
    return total


def _pieces(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yields the bytes of all tensors in pieces of `_PIECE`; the last one is filled up with zeros."""
    held: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        rest = tensor.detach().contiguous().flatten().view(torch.uint8)
        while rest.numel():
            part, rest = rest[: _PIECE - size], rest[_PIECE - size :]
            held.append(part.to(device))
            size += part.numel()
            if size == _PIECE:
                yield torch.cat(held)
                held, size = [], 0
    if size:
        held.append(torch.zeros(-size % 8, dtype=torch.uint8, device=device))
        yield torch.cat(held)


class Replicas:
    """Compares the copies of a run every `faults.replica_check_every` steps and before each save."""

    def __init__(self, config: FaultsConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.same_at = -1  # the last step after which all copies were the same

    def find_difference(self, step: int) -> str | None:
        """Returns which rank differs after `step`, and in what, in words; None if all copies are the same. Called on
        all ranks, with the same result: sums are compared first, and tensors one by one only where these differ."""
        engine = self.engine
        if engine.world_size == 1 or step == self.same_at:
            return None
        held = (engine.copied_tensors(), engine.common_tensors())
        mine = [fingerprint((tensor for _, tensor in tensors), engine.device) for tensors in held]
        copied, common = engine.all_gather(torch.stack(mine)).transpose(0, 1).tolist()
        copied = [(engine.mesh.part_of(rank), *value) for rank, value in enumerate(copied)]
        if len(set(copied)) == len({shard for shard, *_ in copied}) and len(set(map(tuple, common))) == 1:
            self.same_at = step
            return None
        parts = {f"{engine.mesh.part_of(engine.rank)}.{name}": tensor for name, tensor in engine.copied_tensors()}
        parts |= {f"all.{name}": tensor for name, tensor in engine.common_tensors()}
        own = {name: tuple(fingerprint([tensor], engine.device).tolist()) for name, tensor in parts.items()}
        nodes, fingerprints = zip(*gather_objects((node_name(), own)), strict=True)
        return describe(fingerprints, nodes)

    def go_back(self, run: RewindableRun, batches: Iterator[Any], difference: str) -> Iterator[Any]:
        """Puts the run back to its newest checkpoint, saved after a comparison, and returns the batches from there.
        Raises ReplicaError where it is to stop, has no checkpoint, or went back `faults.max_rewinds` times."""
        restores = run.state.restores
        seen = f"step {run.state.step}: the copies of the model are not the same any more: {difference}"
        advice = "exclude that node, or test its memory and device"
        if self.config.on_replica_difference == "stop":
            raise ReplicaError(f"{seen}; the same command goes on from the newest checkpoint: {advice}")
        newest = run.newest_checkpoint()
        if newest is None:
            raise ReplicaError(f"{seen}; there is no checkpoint to go back to: {advice} and start again")
        if restores >= self.config.max_rewinds:
            raise ReplicaError(
                f"{seen}, and the run has gone back {restores} times already (faults.max_rewinds): {advice}"
            )
        return go_back(run, batches, newest, "restore", seen)


def describe(fingerprints: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> str:
    """Says which ranks hold other values than the majority, and in which tensors. fingerprints: for each rank those of
    its tensors, by "<part of the model, or all>.<name>"; nodes: of the ranks."""
    parts = [{key.partition(".")[0] for key in own} for own in fingerprints]
    odd: dict[int, list[str]] = {}
    unclear: dict[tuple[int, ...], list[str]] = {}
    for key in dict.fromkeys(key for own in fingerprints for key in own):
        part, _, name = key.partition(".")
        held = {rank: own.get(key) for rank, own in enumerate(fingerprints) if part in parts[rank]}
        (usual, votes), *others = Counter(held.values()).most_common()
        if others and 2 * votes > len(held):
            for rank, value in held.items():
                if value != usual:
                    odd.setdefault(rank, []).append(name)
        elif others:
            unclear.setdefault(tuple(held), []).append(name)
    words = [
        f"rank {rank} (node {nodes[rank]}) differs from its copies in {_listed(odd[rank])}" for rank in sorted(odd)
    ]
    for ranks, names in unclear.items():
        where = ", ".join(dict.fromkeys(nodes[rank] for rank in ranks))
        words.append(
            f"ranks {as_ranges(ranks)} (node{'s' if ',' in where else ''} {where}) differ from each other in "
            f"{_listed(names)}, and there are too few copies to tell which is right"
        )
    return "; ".join(words) or "copies differed, and are now the same again"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
