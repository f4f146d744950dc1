"""The two kinds of engines, without making one: who reads their checkpoints, what they hold on a rank, what they send.
As ring algorithms do, an all-gather or reduce-scatter of S elements over n ranks sends (n - 1) / n S from each."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matmix.train.engine import full_tensors
from matmix.train.engine.config import COUNTS, EngineConfig
from matmix.train.engine.full_state import CheckpointFiles, FullState, averaged
from matmix.train.engine.mesh import MeshShape
from matmix.train.engine.sharded_files import ShardedFiles
from matmix.train.engine.zero_files import ZeroFiles
from matmix.train.optim.base import Optimizer
from matmix.train.state import Weights

# What DeepSpeed is told, in elements: the buffer in which gradients are summed; up to which size stage 3 leaves weights
# gathered from step to step; and how many others may be used before one is used again, for it to stay gathered.
BUCKET, SMALL, REUSE = 500_000_000, 100_000, 1_000_000_000

# -- checkpoints -------------------------------------------------------------------------------------------------


_READERS: dict[str, type[CheckpointFiles]] = {
    "torch": ShardedFiles,
    "deepspeed": ZeroFiles,
    full_tensors.KIND: full_tensors.FullTensorFiles,
}
"""By what layouts call the engine. Engines of one kind read each other's checkpoints, and all read full tensors."""
assert _READERS.keys() == COUNTS.keys()


def files_of(kind: Any) -> type[CheckpointFiles]:
    """Returns what reads the files of a checkpoint whose layout calls its engine so. Raises ValueError for others."""
    if kind not in _READERS:
        raise ValueError(f"no engine is called {kind!a}")
    return _READERS[kind]


def open_full(checkpoint: Path, layout: Mapping[str, Any], *, weights_only: bool = False) -> FullState:
    """Opens the full tensors of a checkpoint of any kind; see `CheckpointFiles`."""
    return files_of(layout["engine"])(checkpoint, layout, weights_only=weights_only)


def open_weights(checkpoint: Path, layout: Mapping[str, Any], weights: Weights = "raw") -> FullState:
    """Opens the weights and buffers of a checkpoint of any kind; for averages all files must be there. Raises
    ValueError (one line) where the checkpoint has none."""
    if weights == "raw":
        return open_full(checkpoint, layout, weights_only=True)
    return averaged(open_full(checkpoint, layout), f"checkpoint {checkpoint}")


# -- costs -------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """One parameter of a model."""

    rows: int  # of its first dimension, along which it is cut: each rank gets as many, the last ones fewer
    columns: int  # elements of a row
    in_block: bool
    rounded: bool  # by bf16, before it is used

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A model and how it is trained, in elements."""

    weights: tuple[Weight, ...]
    n_blocks: int
    moments: float  # that the optimizer keeps, as many as elements of float32 would take its bytes
    accumulation: int  # micro-batches of a step
    to_owners: float = 0.0  # of matrices that one rank updates, as many as elements of float32 would take their bytes
    whole_moments: float = 0.0  # of `moments` what each rank holds whole

    @property
    def parameters(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def outside(self) -> int:
        """Of all blocks."""
        return sum(weight.elements for weight in self.weights if not weight.in_block)

    @property
    def block(self) -> int:
        """Of one block, on average."""
        return (self.parameters - self.outside) // self.n_blocks

    def cut(self, parts: int, bits: int = 32, *, in_block: bool | None = None, rounded: int | None = None) -> float:
        """Returns as how many elements of float32 all weights are sent in equal parts, in so many bits for an element,
        and for one of those that bf16 rounds. in_block: of those in blocks only, or outside of them."""
        return sum(
            -(-weight.rows // parts) * parts * weight.columns * (rounded if rounded and weight.rounded else bits) / 32
            for weight in self.weights
            if in_block is None or weight.in_block is in_block
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """The memory that an engine takes on a rank, in elements of float32."""

    weights: float
    moments: float
    gathered: float = 0.0
    buffers: float = 0.0
    standing: float = 0.0  # gradients that stay between micro-batches
    share: float = 1.0  # of a complete gradient
    whole: float = 0.0  # gradients that are whole for a while before ranks sum them
    on_host: Mapping[str, float] = dataclasses.field(default_factory=dict)  # in the host's memory instead
    copied: float = 0.0  # to there and from there in a step


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of exchange between ranks in a step."""

    what: str
    sent: float  # by each rank, in elements of float32
    ranks: int  # that take part
    span: int  # ranks from the first to the last that takes part: within a node if it has as many


def check_optimizer(engine: EngineConfig, optimizer: Optimizer) -> None:
    """Raises ValueError (one line) for an optimizer that cannot update what the engine would hand it."""
    if engine.kind == "deepspeed" and engine.zero_stage and not optimizer.elementwise:
        names = [type(part).__name__ for part in optimizer.parts.values() if not part.elementwise]
        raise ValueError(
            f"{names[0] if names else type(optimizer).__name__} does not update each element by itself, and DeepSpeed "
            'cuts parameters into pieces at engine.zero_stage >= 1; use stage 0, or engine.name = "fsdp2"'
        )


def mesh_of_update(engine: EngineConfig, ranks: int) -> MeshShape:
    """Returns how parameters are spread where an optimizer updates them: not at all for those that DeepSpeed hands it,
    whole or as flat pieces."""
    return MeshShape() if engine.kind == "deepspeed" else MeshShape.of(engine, ranks)


def held(engine: EngineConfig, ranks: int, sizes: Sizes) -> Held:
    """Returns what a rank holds of a model."""
    if engine.kind == "deepspeed" and engine.zero_stage:
        zero = _held_by_zero(engine.zero_stage, ranks, sizes)
        return _offloaded(zero, engine.zero_stage, sizes.parameters / ranks, sizes) if engine.offload else zero
    again, whole, rounded = sizes.accumulation > 1, sizes.parameters, 16 if engine.sends_rounded else 32
    if ranks == 1 or engine.kind == "deepspeed":  # everything
        return Held(whole, sizes.moments, standing=whole * again, share=float(not again))
    parts = MeshShape.of(engine, ranks).parts
    outside, blocks = (sizes.cut(1, rounded=rounded, in_block=inside) for inside in (False, True))
    kept = engine.name == "ddp" or not engine.reshard_after_forward
    return Held(
        whole / parts,
        (sizes.moments - sizes.whole_moments) / parts + sizes.whole_moments,
        gathered=outside + blocks * (1 if kept else min(1, 2 / sizes.n_blocks)),
        # Before the last micro-batch of a step gradients stay whole; in the last one they are summed block by block.
        standing=whole * again,
        share=1 / parts,
        whole=0.0 if again else sizes.outside + sizes.block,
    )


def _held_by_zero(stage: int, ranks: int, sizes: Sizes) -> Held:
    """From stage 1 on the optimizer works on a float32 copy of this rank's part of the weights, and gradients meet in a
    buffer of fixed size."""
    whole, part, moments = sizes.parameters, sizes.parameters / ranks, sizes.moments / ranks
    if stage == 3:
        gathered = sum(weight.elements for weight, passes in _gathered_by_zero(sizes) if passes < 2)
        return Held(2 * part, moments, gathered, BUCKET, standing=part, share=0.0, whole=2 * sizes.block)
    grow = stage == 1 and sizes.accumulation == 1  # gradients come one by one in the step's only backward pass
    standing = part if stage == 2 else whole * (not grow)
    return Held(whole + part, moments, buffers=BUCKET, standing=standing, share=float(grow), whole=part)


def _offloaded(zero: Held, stage: int, part: float, sizes: Sizes) -> Held:
    """What ZeRO-Offload makes of what a rank holds. The host updates a copy of its part of the weights, which stages 1
    and 2 copy once more to send it; its gradients go there with each micro-batch, and back to add the next one's."""
    again = stage == 3 or (stage == 2 and sizes.accumulation > 1)
    buffer = 0 if stage == 3 else max(weight.elements for weight in sizes.weights)  # here and there
    return dataclasses.replace(
        zero,
        weights=zero.weights - part,
        moments=0.0,
        buffers=zero.buffers + buffer,
        standing=0.0 if stage == 3 else zero.standing,
        on_host={
            "weights": part * (1 if stage == 3 else 2),
            "moments": zero.moments,
            "gradients": part * (1 + again) + buffer,
        },
        copied=2 * part * (1 if stage == 1 else sizes.accumulation),
    )


def _gathered_by_zero(sizes: Sizes) -> Iterator[tuple[Weight, int]]:
    """Yields (weight, how often stage 3 gathers it for a micro-batch): 0 = once for a step, 1 = once for both passes, 2
    = for each."""
    behind = 0
    for weight in reversed(sizes.weights):
        yield weight, 0 if weight.elements <= SMALL else 1 if 2 * behind < REUSE else 2
        behind += weight.elements


def sent(engine: EngineConfig, ranks: int, sizes: Sizes) -> list[Exchange]:
    """Returns what ranks send in a step: parts of a copy gather weights and sum gradients, copies sum those."""
    if engine.kind == "deepspeed" and engine.zero_stage:
        return _sent_by_zero(engine, ranks, sizes)
    shape, exchanges = MeshShape.of(engine, ranks), []
    copies, parts = shape.copies, shape.parts
    gradients = sizes.cut(parts, _bits(engine))
    if parts > 1:
        part, rounded = (parts - 1) / parts, 16 if engine.sends_rounded else 32
        outside, blocks = (sizes.cut(parts, rounded=rounded, in_block=inside) for inside in (False, True))
        gathered = (blocks * (2 if engine.reshard_after_forward else 1) + outside) * sizes.accumulation
        exchanges.append(Exchange("all-gather of weights", part * gathered, parts, parts))
        exchanges.append(Exchange("reduce-scatter of gradients", part * gradients, parts, parts))
    if copies > 1:
        part = 2 * (copies - 1) / copies
        exchanges.append(Exchange("all-reduce of gradients", part * gradients / parts, copies, ranks))
    if sizes.to_owners and ranks > 1 and engine.kind != "deepspeed":
        # Its rows come from one copy, and go back to all; those that the owner holds are there.
        rows = sizes.to_owners / (copies * parts) * (copies + 1 - 2 / parts)
        exchanges.append(Exchange("all-to-all of whole matrices", rows, ranks, ranks))
    return exchanges


def _bits(engine: EngineConfig) -> int:
    """Of an element of the gradients that ranks sum."""
    return 16 if engine.reduce_dtype == "bf16" else 32


def _sent_by_zero(engine: EngineConfig, ranks: int, sizes: Sizes) -> list[Exchange]:
    """From stage 2 on gradients are summed at every micro-batch: no rank keeps whole ones. Before stage 3 all ranks get
    the sums, of which each keeps its part, by one all-reduce in place of a reduction for each rank."""
    part, stage = (ranks - 1) / ranks, engine.zero_stage
    gradients = part * sizes.cut(1, _bits(engine)) * (sizes.accumulation if stage >= 2 else 1)
    if stage < 3:
        return [
            Exchange("all-reduce of gradients", 2 * gradients, ranks, ranks),
            Exchange("all-gather of weights", part * sizes.parameters, ranks, ranks),
        ]
    gathered = 0.0
    for weight, passes in _gathered_by_zero(sizes):
        halved = passes > 0 and weight.rounded and engine.sends_rounded
        gathered += weight.elements * (passes * sizes.accumulation or 1) * (0.5 if halved else 1)
    return [
        Exchange("reduce-scatter of gradients", gradients, ranks, ranks),
        Exchange("all-gather of weights", part * gathered, ranks, ranks),
    ]


def parts_to_save(engine: EngineConfig, ranks: int) -> int:
    """Returns into how many parts so many ranks cut what they save."""
    return ranks if engine.kind == "deepspeed" else MeshShape.of(engine, ranks).parts
