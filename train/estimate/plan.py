"""Plans a run without data and without memory: `matmix train RECIPE --dry-run`, and `matmix plan`."""

import dataclasses
import os
from collections.abc import Sequence

from torch import nn
from torch.utils._pytree import tree_leaves

from matmix.model import build_model
from matmix.model.precision import rounded_parameters
from matmix.train.activation import float8_maps
from matmix.train.config import RunConfig
from matmix.train.engine.kinds import Exchange, Sizes, Weight, check_optimizer, mesh_of_update, sent
from matmix.train.engine.kinds import held as held_on_rank
from matmix.train.estimate import FLOAT, Mode, step_memory
from matmix.train.estimate.context import context_bytes
from matmix.train.init.start import planned_start
from matmix.train.loaders import make_loader, with_outputs, with_steps
from matmix.train.loaders import with_vocabulary as sized_for
from matmix.train.optim.base import Optimizer, StepCost
from matmix.train.optim.groups import make_optimizer, parameter_groups, rule_words, short_names
from matmix.train.run.remote import has_begun
from matmix.train.words import short_number

ASSUMED_VOCABULARY = 32768


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes and costs of a run. Bytes are per rank, at the moment of a step when most are in use."""

    sizes: Sizes
    unit: str  # what is counted: `Task.unit`
    flops_per_unit: float  # forward
    units_per_step: int
    steps: int  # that it takes, from where it begins
    ranks: int
    micro_batch_size: int
    parts: dict[str, float]  # bytes by what they hold; gathered weights are whole beside this rank's shards of them
    update: StepCost  # of the optimizer's step
    computed_ops: int  # of forward and backward passes in a step, each of which launches a kernel or more
    on_host: dict[str, float]  # bytes that lie in the host's memory instead, by what they hold
    copied: float  # bytes that a step copies to there and from there

    @property
    def parameters(self) -> int:
        return self.sizes.parameters

    @property
    def accumulation(self) -> int:
        return self.sizes.accumulation

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def update_words(self) -> str:
        """Says in words what the optimizer computes, to follow other words; "" where that is nothing to speak of."""
        each = " on the rank with the most" if self.ranks > 1 else ""
        flops, precision = short_number(self.update.flops), self.update.precision
        return f"; the optimizer {flops} a step{each}, in {precision}" if self.update.flops else ""

    @property
    def host_words(self) -> str:
        """Says in words what lies in the host's memory; "" for nothing."""
        total = sum(self.on_host.values()) / 2**30
        parts = ", ".join(f"{size / 2**30:.2f} {name}" for name, size in self.on_host.items() if size)
        return f"{total:.2f} GiB of the host's for each rank: {parts}" if parts else ""

    def batch_words(self, config: RunConfig) -> str:
        """Says in words what a step reads."""
        if self.units_per_step == config.global_batch_size:
            return f"{config.global_batch_size} {self.unit}"
        units = f"{short_number(self.units_per_step)} {self.unit}"
        return f"{config.global_batch_size} sequences of {config.data.seqlen} = {units}"


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Returns `config` with vocabulary and outputs: where they are left to the data, the data's if it is on this
    machine, else usual ones. Raises ValueError for a damaged manifest, or generated samples that do not fit."""
    model, facts = config.model, config.modality.facts_here(config.data)
    if model.model_class.takes_head and not model.head.outputs and facts.outputs:
        model = with_outputs(model, facts)
    if not model.vocab_size and model.model_class.inputs == "tokens":
        model = sized_for(model, facts.vocab_size or ASSUMED_VOCABULARY)
    return dataclasses.replace(config, model=model)


def with_steps_of_epochs(config: RunConfig) -> tuple[RunConfig, str]:
    """Returns `config` with the steps of its epochs, and where their number is from in words; "" where it is given in
    steps. Where the data is not here, or has to be read through to be counted, the steps stay what they are."""
    if not config.epochs:
        return config, ""
    told = f"epochs = {config.epochs:g}"
    if not config.modality.is_here(config.data):
        return config, f"assumed, {told} will be counted once the data is there"
    loader = make_loader(config, "train", 0, 1)
    loader.close()
    return with_steps(config, loader), told


def vocabulary_words(config: RunConfig) -> str:
    """Says which vocabulary a plan counts with, and where its size is from."""
    size = with_vocabulary(config).model.vocab_size
    if config.model.model_class.inputs != "tokens":
        return "no vocabulary"
    if config.model.vocab_size:
        return f"vocabulary {size}"
    known = config.modality.facts_here(config.data).vocab_size
    return f"vocabulary {size}, {'the data' if known else 'assumed, training takes the data'}'s"


def part_of_rows(config: RunConfig) -> RunConfig:
    """Returns a config whose rows have as many tokens as a rank of a context holds of one of `config`."""
    context = config.engine.context
    if context == 1:
        return config
    tokens = -(-config.data.seqlen // context)
    whole = dataclasses.replace(config.engine, context=1)
    return dataclasses.replace(config, engine=whole, data=dataclasses.replace(config.data, seqlen=tokens))


def weights_of(model: nn.Module) -> tuple[Weight, ...]:
    """Returns the parameters of a model, on any device, as engines send them."""
    rounded, blocks = rounded_parameters(model), set(model.blocks.parameters())
    return tuple(
        Weight(len(one), one.numel() // len(one), one in blocks, name in rounded)
        for name, one in model.named_parameters()
    )


_last_built: dict[str, tuple[nn.Module, Optimizer, Sizes]] = {}


def _built(config: RunConfig) -> tuple[nn.Module, Optimizer, Sizes]:
    """Builds the model and its optimizer, on the meta device, and counts both. The last ones are kept: `matmix plan`
    asks for the same on many meshes."""
    key = repr((config.model, config.optimizer, config.positions, config.ema))
    if key not in _last_built:
        model = build_model(config.model, device="meta")
        optimizer = make_optimizer(model, config.optimizer, config.positions, config.ema)
        parameters = dict(model.named_parameters())
        groups = list(optimizer.named_parameters())
        cut = {name: optimizer.part_of(group).cut for name, _, group in groups}
        kept = [
            (tensor.nbytes / FLOAT, tensor.shape == parameters[name].shape or entry in cut[name])
            for name, state in optimizer.entries(parameters).items()
            for entry, tensor in state.items()
            if tensor.dim()
        ]
        owned = sum(optimizer.part_of(group).sent_bytes * parameter.numel() for _, parameter, group in groups)
        sizes = Sizes(
            weights=weights_of(model),
            n_blocks=len(model.blocks),
            moments=sum(size for size, _ in kept),
            whole_moments=sum(size for size, is_cut in kept if not is_cut),
            accumulation=1,
            to_owners=owned / FLOAT,
        )
        _last_built.clear()
        _last_built[key] = model, optimizer, sizes
    return _last_built[key]


def make_plan(config: RunConfig, ranks: int, *, mode: Mode | None = None) -> Plan:
    """Plans `config` on `ranks` processes, which must divide the batch; mode: of checkpointing activations."""
    config = with_vocabulary(config)
    task, data_size = config.task(), config.data_size(ranks)
    micro = config.micro_batch(data_size)
    accumulation = config.global_batch_size // (micro * data_size)
    model, optimizer, sizes = _built(config)
    sizes = dataclasses.replace(sizes, accumulation=accumulation)
    check_optimizer(config.engine, optimizer)
    if config.engine.fp8:
        float8_maps(model)  # raises where there is none
    held = held_on_rank(config.engine, ranks, sizes)
    gathers = ranks > 1 and config.engine.sends_rounded
    memory = step_memory(part_of_rows(config), micro, mode=mode, gathers=gathers)
    gradients, activations = memory.peak(standing=FLOAT * held.standing, share=held.share)
    shape = mesh_of_update(config.engine, ranks)
    update = optimizer.step_cost(shape.copies, shape.parts)
    passes = {
        "weights": FLOAT * held.weights,
        "gathered weights": FLOAT * held.gathered,
        "moments": FLOAT * held.moments,
        "gradients": gradients + FLOAT * held.whole,
        "activations": activations,
        "buffers": FLOAT * held.buffers,
        "carried states": carried_bytes(config, model) / data_size,
    }
    stepping = {"gathered weights": 0.0, "gradients": FLOAT * sizes.parameters / shape.parts, "activations": 0.0}
    stepping = {**passes, **stepping, "buffers": update.bytes}
    return Plan(
        sizes=sizes,
        unit=task.unit,
        flops_per_unit=task.flops(config.model, config.data.seqlen),
        units_per_step=config.global_batch_size * task.units(config.data.seqlen),
        steps=config.steps - (config.init.step if config.init.goes_on else 0),
        ranks=ranks,
        micro_batch_size=micro,
        parts=max(passes, stepping, key=lambda parts: sum(parts.values())),
        update=update,
        computed_ops=accumulation * memory.computed,
        on_host={"activations": memory.on_host, **{what: FLOAT * size for what, size in held.on_host.items()}},
        copied=2 * accumulation * memory.on_host + FLOAT * held.copied,
    )


def carried_bytes(config: RunConfig, model: nn.Module) -> int:
    """Returns the bytes of the states that all lanes carry; 0 without `data.carry`."""
    if not config.data.carry:
        return 0
    return sum(
        tensor.nbytes for tensor in tree_leaves(model.initial_state(config.global_batch_size)) if tensor is not None
    )


def exchanged(config: RunConfig, plan: Plan, *, mode: Mode | None = None) -> list[Exchange]:
    """Returns what ranks send each other in a step of `plan`; mode: of checkpointing activations."""
    found = sent(config.engine, plan.ranks, plan.sizes) if plan.ranks > 1 else []
    if (ranks := config.engine.context) > 1:
        micro = dataclasses.replace(with_vocabulary(config), micro_batch_size=plan.micro_batch_size)
        of_layers = plan.accumulation * context_bytes(micro, mode=mode) / FLOAT
        found.append(Exchange("exchanges of a context", of_layers, ranks, ranks))
    return found


def print_plans(phases: Sequence[RunConfig]) -> int:
    """Prints the plans of the phases of a recipe, each below its run directory where there are several."""
    for number, config in enumerate(phases):
        if len(phases) > 1:
            print(f"{config.run_dir}:" if not number else f"\n{config.run_dir}:")
        print_plan(config, after_another=number > 0)
    return 0


def print_plan(config: RunConfig, *, after_another: bool = False) -> int:
    """Prints the plan for the ranks in WORLD_SIZE; after_another: what it begins with may not be there yet."""
    beginning = "weights drawn by the seed"
    if has_begun(config):
        beginning = f"the newest checkpoint in {config.run_dir}"
    elif after_another:
        beginning = f"{'all' if config.init.goes_on else 'the weights'} that {config.init.from_} will end with"
    elif config.init.from_:
        config, beginning = planned_start(config)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config, counted = with_steps_of_epochs(config)
    plan = make_plan(config, ranks)
    if int(os.environ.get("RANK", "0")):
        return 0
    before = config.init.step if config.init.goes_on else 0
    units = plan.units_per_step * plan.steps
    flops, trained = plan.flops_per_unit, 3 * plan.flops_per_unit
    gib = 2**30
    parts = ", ".join(f"{size / gib:.2f} {name}" for name, size in plan.parts.items() if size)
    sends = ", ".join(f"{short_number(FLOAT * one.sent)}B {one.what}" for one in exchanged(config, plan))
    share = config.task().target_share if plan.unit == "tokens" and not config.data.synthetic.task else 1.0
    pieces = f"{ranks} rank(s) x {plan.accumulation} micro-batch(es) of {plan.micro_batch_size}"
    rows = {
        "parameters": f"{short_number(plan.parameters)} ({plan.parameters:,}; {vocabulary_words(config)})",
        f"FLOPs per {plan.unit[:-1]}": f"{short_number(flops)} forward, {short_number(trained)} with backward",
        "memory per rank": f"{plan.total_bytes / gib:.2f} GiB estimated: {parts}",
        **({"host memory": plan.host_words} if plan.host_words else {}),
        "batch": f"{plan.batch_words(config)}; {pieces}",
        **({"masked": f"{share:.0%} of the tokens"} if 0 < share < 1 else {}),
        "engine": config.engine.words,
        **({"fp8": _float8_words(config)} if config.engine.fp8 else {}),
        **({"sent": f"{sends} a step and rank"} if sends else {}),
        "begins with": beginning,
        "steps": (f"{before:,} to " if before else "") + f"{config.steps:,}" + (f" ({counted})" if counted else ""),
        plan.unit: f"{short_number(units)} ({units:,})",
        "learning rate": config.schedule.words(config.steps, config.optimizer.lr),
        "compute": f"{trained * units:.3g} FLOPs in all{plan.update_words}",
        "updated": ("\n" + " " * 18).join(_group_lines(config)),
    }
    for name, text in rows.items():
        print(f"{name:<16}  {text}")
    return 0


def _float8_words(config: RunConfig) -> str:
    """Which linear maps of the layers are computed in fp8, and which are not."""
    maps, others = float8_maps(build_model(with_vocabulary(config).model, device="meta"))
    rest = f"; not {', '.join(short_names(others))}" if others else ""
    return f"{len(maps)} of {len(maps) + len(others)} linear maps of the layers: {', '.join(short_names(maps))}{rest}"


def _group_lines(config: RunConfig) -> list[str]:
    """The groups of the optimizer: how they are updated, their size, who says so, and the names where a rule does."""
    model = build_model(with_vocabulary(config).model, device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    lines = []
    groups = parameter_groups(model, config.optimizer, config.positions)
    kept = make_optimizer(model, config.optimizer, config.positions).entries(dict(model.named_parameters()))
    several = len({group.optimizer for group in groups}) > 1
    for group in groups:
        decay = f"weight decay {group.weight_decay:g}" if group.weight_decay else "not decayed"
        size = short_number(sum(sizes[name] for name in group.names))
        by = f" (by {', '.join(group.sources)})" if group.sources else ""
        names = ": " + ", ".join(short_names(group.names)) if group.has_rule else ""
        kind = f"{group.optimizer}, which keeps {', '.join(kept[group.names[0]]) or 'nothing'}, " if several else ""
        lines.append(f"{size} in {len(group.names)} tensors, {kind}{rule_words(group)}, {decay}{by}{names}")
    return lines
