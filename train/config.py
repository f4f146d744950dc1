"""The configuration of a run: frozen dataclasses whose field docstrings are the command line's help. Defaults < recipe
(TOML) < command line. Validation lives in ``__post_init__`` only, so that a config that exists is a valid one."""

import dataclasses
import math
import operator
from typing import Annotated, Any, Literal

import tyro

from matmix.data.config import DataConfig
from matmix.data.modalities import MODALITIES, Modality, modality_of
from matmix.data.storage.remote import refuse_secrets
from matmix.model.backbone import check_context
from matmix.model.carrying import check_carry
from matmix.model.config import ModelConfig
from matmix.train.engine.config import EngineConfig
from matmix.train.engine.mesh import MeshShape
from matmix.train.errors import require, require_at_least
from matmix.train.optim.config import EmaConfig, OptimizerConfig, ScheduleConfig
from matmix.train.state import Weights
from matmix.train.tasks import ObjectiveConfig, Task, make_task


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorConfig:
    """A table [[evaluation.evaluator]]: what else is measured, or how often one of ours is."""

    name: str
    """loss, context, mixing, lengths (generated samples only) or scores (labelled examples only), or
    "my_package.module:MyEvaluator"."""
    every: int | None = None
    """Steps between its evaluations; 0 = only after the last step; left out = evaluation.every."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """A table with the options of your own evaluator."""

    def __post_init__(self) -> None:
        known = self.every is None or self.every >= 0
        require(known, f'evaluation.evaluator "{self.name}": every must be >= 0, got {self.every}')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Evaluation on the validation split."""

    every: int = 500
    """Steps between evaluations; 0 = only after the last step."""
    batches: int = 0
    """Global batches of each evaluation; 0 = the whole split."""
    ablation_batches: int = 1
    """Global batches, the first of the split, on which the mixers' outputs are also replaced by their means, to see
    what they contribute; 0 = none."""
    best: str = ""
    """Name of a metric, such as "accuracy" or "loss": the checkpoint of the evaluation where it was best is kept.
    Empty = none."""
    patience: int = 0
    """End the run after so many evaluations in a row that were no better by this metric; 0 = never."""
    evaluator: tuple[EvaluatorConfig, ...] = ()
    """Tables [[evaluation.evaluator]]: further evaluators, and intervals of ours; on the command line as in
    '{name = "mixing", every = 2000}'."""

    def __post_init__(self) -> None:
        require_at_least(self, "evaluation.", every=0, batches=0, patience=0, ablation_batches=0)
        waits = bool(self.best) or not self.patience
        require(waits, "evaluation.patience needs evaluation.best, the metric to wait for")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and how long they are kept."""

    every: int = 1000
    """Steps between checkpoints; the last step is always saved; 0 = only the last."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept for ever; 0 = none."""
    asynchronous: bool = True
    """Training goes on once a checkpoint is copied to host memory, and a thread writes it; the last one is
    waited for. False saves the memory of that copy."""
    local_every: int = 0
    """Steps between copies of the state that stay with the nodes; after a kill the run goes on from one that is newer
    than the last checkpoint; 0 = none."""
    local_dir: str = ""
    """A node's folder for them; empty = in its memory (/dev/shm). Twice what the node's ranks hold must fit in, with
    local_peers four times."""
    local_peers: bool = True
    """Each node also holds what the one before it wrote, so that a node that is lost loses nothing."""
    start_over: bool = False
    """Begin again at step 0 where the run's checkpoints are gone; what was recorded is moved aside. Holds for one
    start."""

    def __post_init__(self) -> None:
        require_at_least(self, "checkpoint.", every=0, keep_last=1, keep_every=0, local_every=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Messages, records and pictures while training."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level of the messages that are shown, and written with time stamps into RUN/messages.log."""
    every: int = 10
    """Steps between records in metrics.jsonl and TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    progress: bool = True
    """Show a progress bar (plain lines when the output is not a terminal)."""
    picture: bool = True
    """Draw the losses into RUN/curves.png at the end of the run."""
    profile_start: int = 0
    """First step of a profiler trace written to RUN/profile; 0 = no trace."""
    profile_steps: int = 3
    """Length of the trace in steps."""

    def __post_init__(self) -> None:
        require_at_least(self, "logging.", every=1, profile_start=0, profile_steps=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InitConfig:
    """Weights of another model that a run begins with."""

    from_: Annotated[str, tyro.conf.arg(name="from")] = ""
    """A run (folder or URL), an export (the same), or a checkpoint of the published Hydra or mru-lm code; empty = the
    seed draws all weights. It is read when the run begins and never again."""
    step: int = 0
    """Which checkpoint of a run; 0 = the newest."""
    weights: Weights = "raw"
    """Weights of a run: those that were trained, or with ema their average ([ema])."""
    project: str = ""
    """Whose checkpoint it is where the code of a paper wrote it, hydra or mru-lm; empty = that is found out."""
    ignore: tuple[str, ...] = ()
    """Names of weights, such as "blocks.5.*", that are left where they are: those of the source are not taken, those of
    the model are drawn by the seed."""
    rename: tuple[str, ...] = ()
    """"old=new": weights whose names in the source begin with old are those that begin with new here."""
    other_tokenizer: bool = False
    """Take the weights although the ids of the source's tokenizer stand for other pieces than those of the data's."""
    resume: bool = False
    """Go on as the run itself would from that checkpoint, in a run directory of its own: with the optimizer's state,
    the step and the position in the data as well. `steps` counts from the first step of the source."""
    decay: int = 0
    """Go on so for this many steps, in which the learning rate falls by schedule.decay_shape to schedule.final; `steps`
    and the rest of [schedule] follow from that. For a checkpoint with the peak rate, before any decay; 0 = off."""

    def __post_init__(self) -> None:
        refuse_secrets(self.from_, "init.from")
        require_at_least(self, "init.", step=0, decay=0)
        for pair in self.rename:
            require(pair.count("=") == 1 and all(pair.split("=")), f'init.rename = "{pair}": write it as "old=new"')
        if self.goes_on:
            option, others = "resume" if self.resume else "decay", ("weights", "ignore", "rename", "project")
            given = [name for name in others if getattr(self, name) not in ("raw", "", ())]
            require(not given, f"init.{option} takes all of a checkpoint: leave init.{given[0] if given else ''} out")
        if not self.from_:
            given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
            require(not given, f"init.{given[0] if given else ''} is given without init.from: name what to start from")

    @property
    def goes_on(self) -> bool:
        """Whether more than weights is taken: the run is a branch of its source."""
        return self.resume or self.decay > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RampConfig:
    """A table [ramp]: values that a run begins with and leaves step by step, each after the same number of tokens. Then
    the recipe's own hold."""

    tokens: int
    """Length of the ramp in tokens (sequences times data.seqlen)."""
    global_batch_size: tuple[int, ...] = ()
    """Sequences per optimizer step, one value after another."""
    seqlen: tuple[int, ...] = ()
    """Tokens in a sequence, each a divisor of the recipe's data.seqlen."""
    masking: tuple[float, ...] = ()
    """Share of the tokens that are masked (objective.masking.probability)."""

    def __post_init__(self) -> None:
        require_at_least(self, "ramp.", tokens=1)
        for name in ("global_batch_size", "seqlen"):
            values = getattr(self, name)
            require(min(values, default=1) >= 1, f"ramp.{name} must hold numbers from 1 on, got {list(values)}")
        lengths = {len(values) for values in (self.global_batch_size, self.seqlen, self.masking) if values}
        require(
            len(lengths) == 1,
            "ramp needs global_batch_size, seqlen or masking: lists of values, of the same length if several are given",
        )

    def stages(self, config: "RunConfig") -> list["RunConfig"]:
        """Returns what the steps of `config` are taken with, one config after another: the last one is `config`, but
        that `steps` counts on in all of them. Raises ValueError (one line) for values that do not fit, and for a ramp
        that ends beyond the run."""
        sizes, lengths, shares = self.global_batch_size, self.seqlen, self.masking
        count = len(sizes or lengths or shares)
        longest = max([config.data.seqlen, *lengths])
        schedule = dataclasses.replace(config.schedule, steps=config.schedule.steps or config.steps)
        config = dataclasses.replace(config, schedule=schedule, stop_step=0)
        if lengths:
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, window=longest))
        stages, step, tokens = [], 0, 0
        for number in range(count):
            masking, data = config.objective.masking, config.data
            if shares:
                masking = dataclasses.replace(masking, probability=shares[number])
            if lengths:
                data = dataclasses.replace(data, seqlen=lengths[number])
            size = sizes[number] if sizes else config.global_batch_size
            per_step = size * data.seqlen
            steps = max(1, round((self.tokens * (number + 1) / count - tokens) / per_step))
            step, tokens = step + steps, tokens + steps * per_step
            require(
                step < config.steps,
                f"ramp ends beyond the run: its {self.tokens:,} tokens take at least {step:,} of the {config.steps:,} "
                "steps; lower ramp.tokens or raise steps",
            )
            objective = dataclasses.replace(config.objective, masking=masking)
            changes = {"steps": step, "global_batch_size": size, "data": data, "objective": objective}
            stages.append(dataclasses.replace(config, **changes))
        return [*stages, config]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallbackConfig:
    """A table [[callback]]: a tracker of experiments, or a callback of your own."""

    name: str
    """wandb, mlflow, or where Python finds its class, as in "my_package.module:MyCallback"."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """A table with the options of the class."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """Watches of a run, and how it goes on when something goes wrong."""

    hang_minutes: float = 30.0
    """A rank without a step, an evaluation batch or a save for so long is taken to hang: all ranks write the stacks of
    their threads to RUN/logs/ and end with exit code 76; 0 = no watch, only the time limits of the
    collectives. The first step compiles: leave it time."""
    spike_factor: float = 0.0
    """A loss above this many times the median of the last steps is a spike: the run goes back to the checkpoint before
    it and leaves out the data that it has read since; 0 = off, 3 is cautious."""
    spike_window: int = 64
    """Steps of the median; until there are so many, nothing is taken for a spike."""
    max_rewinds: int = 3
    """The run stops at the spike after so many."""
    replica_check_every: int = 100
    """Steps between comparisons of what several ranks hold copies of (weights, moments, buffers), which are also made
    before each save; 0 = none. Costs nothing on one rank."""
    on_replica_difference: Literal["stop", "restore"] = "stop"
    """When copies differ: stop, or go back to the newest checkpoint and on from there, at most max_rewinds times."""

    def __post_init__(self) -> None:
        require_at_least(self, "faults.", hang_minutes=0, spike_window=1, max_rewinds=0, replica_check_every=0)
        factor = self.spike_factor
        require(factor == 0 or factor > 1, f"faults.spike_factor must be 0 (off) or above 1, got {factor}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that defines a run."""

    run_dir: str = ""
    """Folder or URL of the run; empty = runs/<name of the recipe>. Starting the same command again resumes the run."""
    seed: int = 0
    """Seed of weights, data order, masking and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is one."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    epochs: float = 0.0
    """The same in passes over the training data, in place of `steps`; 0 = as `steps` says."""
    stop_step: int = 0
    """Save and stop at this step although the schedule goes on to `steps`; 0 = run to the end."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 0
    """Most sequences per rank and forward pass: the largest number up to it that divides a rank's share of the global
    batch is taken, on any number of ranks; 0 = a rank's whole share in one pass."""
    max_bad_steps: int = 10
    """Steps in a row with a NaN or infinite loss or gradient that are skipped before the run stops."""
    gc_every: int = 100
    """Python's garbage collector runs every so many steps, on all ranks at once; 0 = left to Python."""
    init: InitConfig = dataclasses.field(default_factory=InitConfig)
    """Weights to begin with."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """The data."""
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    """The objective."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    """The learning-rate schedule."""
    ema: EmaConfig = dataclasses.field(default_factory=EmaConfig)
    """An average of the weights."""
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    """How the model is spread over devices."""
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Checkpoints."""
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    """Logging."""
    faults: FaultsConfig = dataclasses.field(default_factory=FaultsConfig)
    """Faults on the way."""
    callback: tuple[CallbackConfig, ...] = ()
    """Tables [[callback]]: trackers of experiments and callbacks of your own; on the command line as in
    '{name = "my_package.module:MyCallback", options = {every = 10}}'."""

    def __post_init__(self) -> None:
        refuse_secrets(self.run_dir, "run_dir")
        require_at_least(self, "", steps=1, epochs=0)
        require(math.isfinite(self.epochs), f"epochs must be a finite number, got {self.epochs}")
        shape = self.schedule.decay_shape
        shaped = self.schedule.name == "wsd" or shape == "linear" or self.init.decay  # which makes it wsd
        require(shaped, f'schedule.decay_shape = "{shape}" is for wsd: set schedule.name = "wsd"')
        require(
            self.stop_step >= 0 and (self.stop_step <= self.steps or bool(self.epochs)),
            f"stop_step must lie between 0 and steps = {self.steps}, got {self.stop_step}",
        )
        require_at_least(self, "", global_batch_size=1, micro_batch_size=0, max_bad_steps=1, gc_every=0, seed=0)
        outside = ":" in self.objective.name  # Python imports your own only where they train or evaluate
        modality = modality_of(self.data) if outside else self.modality
        self._check_data(modality)
        if self.data.carry:
            check_carry(self.model)
        if self.engine.cuda_graph:
            shapes = "engine.cuda_graph needs batches of one shape"
            require(not self.data.examples.train, f"{shapes}, and examples differ in length; set it to false")
            packing = modality.packing(self.data)
            require(packing == "rows", f'{shapes}: set data.packing = "rows", not "{packing}", or it to false')
            require(not self.ema.decay, "engine.cuda_graph excludes ema.decay, whose updates wait for the device")
        if self.engine.context > 1:
            name = next((name for name, one in MODALITIES.items() if one is modality), type(modality).__name__)
            require(
                modality.cuts_rows,
                f"engine.context = {self.engine.context} cuts rows of tokens over ranks, but the data of this run are "
                f"{name}; set it to 1",
            )
            check_context(self.model)

    def check_multiple(self, multiple: int) -> None:
        """Raises ValueError (one line) where the model takes no samples so many times as long, or the task has none."""
        self.model.check_seqlen(multiple * self.data.seqlen)
        modality = modality_of(self.data)
        if (longer := modality.stretched(self.data, multiple)) is not None:
            modality.check(longer, causal=self.model.causal)

    def _check_data(self, modality: Modality) -> None:
        """Raises ValueError (one line) where data and model do not fit together."""
        self.model.check_seqlen(self.data.seqlen)
        if modality.given(self.data):
            modality.check(self.data, causal=self.model.causal)
            for name, name_in_model in modality.agreeing.items():
                read, seen = operator.attrgetter(name)(self.data), operator.attrgetter(name_in_model)(self.model)
                require(read == seen, f"data.{name} = {read}, but model.{name_in_model} = {seen}; set both to the same")
        for multiple in self.data.synthetic.eval_lengths:
            try:
                self.check_multiple(multiple)
            except ValueError as error:
                raise ValueError(f"data.synthetic.eval_lengths: {multiple} x data.seqlen: {error}") from None
        if fixed := self.model.fixed_length_mixers():
            require(
                modality.packing(self.data) == "rows",
                f"{fixed[0]} takes sequences of exactly model.max_seqlen tokens and no shorter documents, which "
                f'data.packing = "{self.data.packing}" makes; set data.packing = "rows"',
            )

    def task(self) -> Task:
        """Returns the task that `objective` names; Python imports your own. Raises ValueError (one line) if it
        cannot."""
        return make_task(self.objective, self.model)

    @property
    def modality(self) -> Modality:
        """The kind of data that the run is on, of those that its task takes. Raises as `task`."""
        return self.task().modality(self.data)

    @property
    def positions(self) -> int:
        """Positions of a sample that the layers see: `data.seqlen`, or those of an image."""
        return self.model.model_class.sequence_length(self.model, self.data.seqlen)

    @property
    def last_step(self) -> int:
        return self.stop_step or self.steps

    def data_size(self, ranks: int) -> int:
        """Returns how many of so many ranks are given data of their own. Raises ValueError (one line) where the engine
        cannot lay out that number of ranks."""
        return MeshShape.of(self.engine, ranks).data_size

    def micro_batch(self, data_size: int) -> int:
        """Returns the sequences per rank and forward pass, at most `micro_batch_size`; data_size: the number of ranks
        that are given data of their own. Raises ValueError where the global batch does not divide over them, or the
        tokens of a micro-batch over engine.context."""
        per_rank, rest = divmod(self.global_batch_size, data_size)
        if rest or per_rank == 0:
            low = self.global_batch_size // data_size * data_size
            allowed = f"{low} or {low + data_size}" if low else f"{data_size}"
            raise ValueError(
                f"global_batch_size = {self.global_batch_size} does not divide over {data_size} ranks; use {allowed}"
            )
        most = min(self.micro_batch_size or per_rank, per_rank)
        micro = next(size for size in range(most, 0, -1) if per_rank % size == 0)
        context, seqlen = self.engine.context, self.data.seqlen
        require(
            micro * seqlen % context == 0,
            f"engine.context = {context} does not divide the {micro} x {seqlen} tokens of a micro-batch; set it to a "
            "divisor of data.seqlen, or change data.seqlen",
        )
        return micro

    def micro_batch_words(self, data_size: int) -> str:
        """Returns a line for people where passes have fewer sequences than micro_batch_size, else ""."""
        micro = self.micro_batch(data_size)
        if not self.micro_batch_size or micro == self.micro_batch_size:
            return ""
        share = self.global_batch_size // data_size
        return (
            f"passes have {micro} sequences: the largest number up to micro_batch_size = {self.micro_batch_size} that "
            f"divides a rank's {share} (global_batch_size {self.global_batch_size} over {data_size} ranks)"
        )
