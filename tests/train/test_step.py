"""Steps as a CUDA graph (`engine.cuda_graph`), on machines without one: a tape stands for it."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import ClassVar

import pytest
import torch
from failures import each
from runs import losses, records, run_recipe, weights
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from matmix.data.loading.batch import Batch
from matmix.model import build_model
from matmix.model.mixers import MIXERS
from matmix.train import loop, step
from matmix.train.engine.fsdp import FsdpEngine
from matmix.train.engine.mesh import Mesh
from matmix.train.meters.speed import Monitor
from matmix.train.optim.groups import make_optimizer
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config
from matmix.train.step import GraphedStep, Recorder, Step, check_graph
from matmix.train.tasks.token_prediction import MaskedLM


def tensors(*nested):
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def storage(tensor):
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Stands for `Recorder`: holds operations with the tensors that they read and wrote, as a CUDA graph holds kernels
    with addresses. A replay does them again on these tensors, and calls nothing else. What is recorded has not been
    done: afterwards tensors from outside and the random numbers are as they were."""

    made: ClassVar[list[Tape]] = []

    def __init__(self, device):
        super().__init__()
        self.done, self.replays, self.ran = [], 0, 0
        Tape.made.append(self)

    def run(self, function):
        self.ran += 1
        return function()

    @torch.no_grad()
    def record(self, function):
        self.own, self.before = set(), {}
        drawn = torch.get_rng_state()
        with self, torch.enable_grad():
            results = function()
        for whole, value in self.before.values():
            whole.copy_(value)
        torch.set_rng_state(drawn)
        for tensor in tensors(results):
            tensor.fill_(-1)
        return results

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = tensors(args, kwargs)
        for tensor in given:
            if storage(tensor) not in self.own | self.before.keys():
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                whole = tensor.detach().as_strided((size,), (1,), 0)
                self.before[storage(tensor)] = whole, whole.clone()
        results = function(*args, **(kwargs or {}))
        known = set(map(storage, given))
        new = [storage(result) not in known for result in tensors(results)]
        self.own.update(map(storage, itertools.compress(tensors(results), new)))
        if any(new) or function._schema.is_mutable:  # else it is a view of what is there
            self.done.append((function, args, kwargs or {}, tensors(results), new))
        return results

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for function, args, kwargs, results, new in self.done:
            for result, found in itertools.compress(zip(results, tensors(function(*args, **kwargs)), strict=True), new):
                result.copy_(found)


@pytest.fixture
def tapes(monkeypatch):
    """The tapes that runs make instead of graphs, from now on."""
    monkeypatch.setattr(step, "Recorder", Tape)
    monkeypatch.setattr(step, "takes_graphs", lambda device: True)
    monkeypatch.setattr(Tape, "made", [])
    return Tape.made


# Rates that float32 holds, as those of a graph are of it.
COMMON = ["--data.packing", "rows", "--steps", "12", "--optimizer.lr", "0.0078125", "--schedule.final", "0"]
COMMON += ["--schedule.warmup", "4", "--optimizer.rule", '{match = "*.mlp.up.weight", lr = 0.5, clip = 0.01}']
COMMON += ["--micro-batch-size", "2"]
GRAPH = ["--engine.cuda-graph", "True", "--faults.on-replica-difference", "restore"]


def computed(run):
    """What the records say of each step, the last time that it was taken."""
    keys = ("loss", "lr", "skipped", "accuracy", "grad_norm", "monitor")
    return {row["step"]: {key: row[key] for key in row if key.startswith(keys)} for row in records(run)}


def test_replays_are_the_same_steps_bit_for_bit(dataset, tapes, monkeypatch, tmp_path):
    """With accumulation, dropout, a schedule, clipping by groups, evaluations and saves; through a step that is not
    finite, a stop and a resume, and where a run is put back to a checkpoint, whose moments are other tensors."""
    true_step, differing = loop.Trainer.compute_step, [None] * 8 + ["made up"]

    def compute_step(trainer, batches):
        true_count = trainer.task.count_targets
        factor = torch.nan if trainer.state.step == 7 else 1  # which makes all gradients of step 8 NaN
        with monkeypatch.context() as patch:
            patch.setattr(trainer.task, "count_targets", lambda batch: true_count(batch) * factor)
            true_step(trainer, batches)

    monkeypatch.setattr(loop.Trainer, "compute_step", compute_step)
    run_recipe("debug_mru", dataset, tmp_path / "plain", *COMMON)
    assert tapes == []
    monkeypatch.setattr(loop.Trainer, "find_difference", lambda trainer: differing.pop(0) if differing else None)
    run_recipe("debug_mru", dataset, tmp_path / "graph", *COMMON, *GRAPH, "--stop-step", "4")
    run_recipe("debug_mru", dataset, tmp_path / "graph", *COMMON, *GRAPH)
    assert [(tape.ran, tape.replays) for tape in tapes] == [(3, 1), (3, 2), (3, 1)]
    assert computed(tmp_path / "graph") == computed(tmp_path / "plain")
    assert len(computed(tmp_path / "plain")) == 12
    assert [row["skipped"] for row in records(tmp_path / "plain")][6:8] == [0, 1]
    expected = weights(tmp_path / "plain")
    for name, tensor in weights(tmp_path / "graph").items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_a_graph_has_room_for_any_number_of_masked_tokens(dataset, tapes, monkeypatch, tmp_path):
    """Places behind them count for nothing. Where the room does not do, a graph with more is recorded."""
    run_recipe("debug_hydra", dataset, tmp_path / "plain", *COMMON)
    monkeypatch.setattr(MaskedLM, "target_share", 0.01)  # room for the first batches, which some later ones exceed
    run_recipe("debug_hydra", dataset, tmp_path / "graph", *COMMON, *GRAPH)
    assert len(tapes) == 2
    assert tapes[1].replays > 2
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


class NothingForTheHost(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values and shapes that come back from the device, and other devices."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")

    def __init__(self, device):
        super().__init__()
        self.device, self.calls = device, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not function.name().removeprefix("aten::").startswith(self.REFUSED), function
        results, self.calls = function(*args, **(kwargs or {})), self.calls + 1
        places = {tensor.device.type for tensor in tensors(args, kwargs, results) if tensor.numel()}
        assert places <= {self.device}, function
        return results


def fake_step(recipe, device, *options):
    """A step of a recipe in a graph, on fake tensors, and its micro-batches."""
    arguments = ["--data.packing", "rows", "--engine.cuda-graph", "True", "--model.vocab-size", "300"]
    config = load_config(recipe, [*arguments, "--model.max-seqlen", "32", *options])
    model = build_model(config.model, device="meta")
    for held in (held for module in model.modules() for held in (module._parameters, module._buffers)):
        for name, x in held.items():
            own = None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device)
            held[name] = nn.Parameter(own) if isinstance(x, nn.Parameter) else own
    engine = FsdpEngine(config.engine, Distributed(device=torch.device(device)), Mesh())
    engine.model = engine.module = model
    engine.optimizer = make_optimizer(model, config.optimizer, config.positions)
    rates = torch.zeros(len(engine.optimizer.param_groups), device=device)
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    task = config.task()
    task.captured = True
    ids = torch.zeros(2, 32, dtype=torch.int64, device=device)
    select = None if config.model.causal else torch.zeros(9, dtype=torch.int64, device=device)
    return Step(engine, task, Monitor(engine), 1.0), [Batch(ids, ids, max_seqlen=32, select=select)] * 2


def test_places_behind_masked_tokens_have_no_label(tapes):
    """As many in all batches, each once; where the room for them does not do, all positions."""
    own, _ = fake_step("debug_hydra", "cpu")
    graphed = GraphedStep(own.engine, own.task, own.monitor, 1.0)
    rooms = []
    for share in (0.3, 0.2, 0.5, 0.4, 1.0):
        labels = torch.where(torch.rand(4, 250) < share, 7, -100)
        batch = Batch(labels, labels, select=(labels.flatten() != -100).nonzero()[:, 0])
        (wide,) = graphed._of_one_length([batch])
        count = batch.select.numel()
        assert torch.equal(wide.select[:count], batch.select)
        assert (labels.flatten()[wide.select[count:]] == -100).all()
        assert wide.select.unique().numel() == wide.select.numel() == graphed.room
        rooms.append(graphed.room)
    assert rooms == [439, 439, 1000, 1000, 1000]


def assert_waits_for_nothing(mixer, device):
    """Fake tensors have no values. For a CUDA device that is not there autograd makes no backward pass, and fake
    tensors know no update; both are left out for it."""
    recipe = "debug_hydra" if MIXERS[mixer].bidirectional_form else "debug_mru"
    with FakeTensorMode():
        own, batches = fake_step(recipe, device, "--model.layers", mixer, "--model.d-model", "128")
        if device == "cuda":
            gradients = [torch.empty_like(parameter) for parameter in own.engine.module.parameters()]

            def backward(loss, last):
                for parameter, gradient in zip(own.engine.module.parameters(), gradients, strict=True):
                    parameter.grad = gradient

            own.engine.backward, own.engine.optimizer.step = backward, lambda: None
        divisor = torch.zeros((), device=device)
        with NothingForTheHost(device) as mode:
            computed = own(batches, divisor)
    assert mode.calls > 100
    assert computed.sums.shape == (5,)
    assert all(parameter.grad is None for parameter in own.engine.module.parameters())


@each("device", ["cpu", "cuda"])
@each("mixer", ["mru", "hydra"])
def test_a_step_waits_for_nothing(mixer, device):
    assert_waits_for_nothing(mixer, device)


@pytest.mark.slow
@each("device", ["cpu", "cuda"])
@each("mixer", MIXERS)
def test_a_step_of_any_mixer_waits_for_nothing(mixer, device):
    assert_waits_for_nothing(mixer, device)


def test_batches_of_other_shapes_are_refused(tapes):
    own, batches = fake_step("debug_mru", "cpu")
    graphed = GraphedStep(own.engine, own.task, own.monitor, 1.0)

    def fill(*batches):
        graphed._fill(batches)
        return [batch.inputs.data_ptr() for batch in graphed.batches]

    assert fill(*batches) == fill(*batches)
    shorter = batches[0].map(lambda x: x[:, :-1])
    for others in ((batches[0],), (batches[0], shorter), (batches[0], Batch(batches[0].inputs, batches[0].labels))):
        with pytest.raises(ValueError, match=r"^engine.cuda_graph: a graph holds batches of one shape[^\n]*$"):
            fill(*others)


def test_what_cuda_cannot_record_is_said_in_one_line(tapes, monkeypatch):
    def refuse(tape, function):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(Tape, "record", refuse)
    own, _ = fake_step("debug_mru", "cpu")
    graphed = GraphedStep(own.engine, own.task, own.monitor, 1.0)
    graphed.recorder = Tape(None)
    why = "operation not permitted when stream is capturing"
    told = rf"^engine.cuda_graph: the steps of this run cannot be recorded \({why}\); set it to false$"
    with pytest.raises(ValueError, match=told):
        graphed._record()


def test_a_graph_is_recorded_in_the_stream_of_the_steps_before(monkeypatch):
    said = []

    class Said(contextlib.nullcontext):
        def __init__(self, name):
            self.name = name

        def __getattr__(self, method):
            return lambda *given: said.append((self.name, method, *(getattr(one, "name", one) for one in given)))

    def graph(recorded, stream, capture_error_mode):
        said.append(("recorded in", stream.name, capture_error_mode))
        return recorded

    fake = {"Stream": lambda device: Said("own"), "CUDAGraph": lambda: Said("graph"), "graph": graph}
    fake |= {"current_stream": lambda device: Said("current"), "stream": lambda stream: stream}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = Recorder(torch.device("cuda", 0))
    assert recorder.run(lambda: said.append("run") or 1) == 1
    assert said == [("own", "wait_stream", "current"), "run", ("current", "wait_stream", "own")]
    said.clear()
    assert recorder.record(lambda: said.append("run") or 2) == 2
    recorder.replay()
    assert said == [("recorded in", "own", "thread_local"), "run", ("graph", "replay")]


@each(
    "options, told",
    [
        (["--engine.name", "deepspeed"], 'needs engine.name = "fsdp2" or "ddp", got "deepspeed"'),
        (["--engine.context", "2"], "needs engine.context = 1, got 2"),
        (["--engine.replicate", "2"], "needs engine.replicate = 1, got 2"),
        (["--engine.precision", "bf16", "--engine.fp8", "rowwise"], 'needs engine.fp8 = "", got "rowwise"'),
        (["--engine.compile", "True"], "needs engine.compile = false, got true"),
        (["--engine.activation-checkpointing", "full"], 'needs engine.activation_checkpointing = "none", got "full"'),
        (["--data.path", "", "--data.examples.train", "x.tsv"], "needs batches of one shape, and examples differ in"),
        (["--data.packing", "concat"], 'needs batches of one shape: set data.packing = "rows", not "concat"'),
        (["--data.packing", "document"], 'needs batches of one shape: set data.packing = "rows", not "document"'),
        (["--ema.decay", "0.9"], "excludes ema.decay"),
    ],
)
def test_configs_that_no_graph_can_hold_are_refused(options, told):
    with pytest.raises(ValueError, match=f"engine.cuda_graph {re.escape(told)}[^\n]*$"):
        load_config("debug_mru", ["--data.packing", "rows", "--engine.cuda-graph", "True", *options])


@each(
    "distributed, optimizers, told",
    [
        (Distributed(), {"adamw"}, "needs a CUDA device, not cpu"),
        (Distributed(device=torch.device("cuda"), world_size=2), {"adamw"}, "is for runs of one process, and this one"),
        (Distributed(device=torch.device("cuda")), {"adamw", "muon"}, ": a graph holds updates by adamw, not by muon"),
        (Distributed(device=torch.device("cuda")), {"adamw"}, ""),
    ],
)
def test_processes_that_cannot_record_are_told_so(distributed, optimizers, told):
    config = load_config("debug_mru", ["--data.packing", "rows", "--engine.cuda-graph", "True"])
    with pytest.raises(ValueError, match=f"^engine.cuda_graph ?{told}") if told else contextlib.nullcontext():
        check_graph(config, distributed, optimizers)
    check_graph(load_config("debug_mru", []), distributed, optimizers)
