"""Loss by position, the loss without mixing, and what a run says of them, against the same by brute force."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from failures import each
from runs import records, run_recipe
from torch import nn
from torch.nn import functional as F

from matmix.model import build_model, initialize
from matmix.train.activation import compile_blocks, compute_in_bfloat16
from matmix.train.callbacks import records as records_module
from matmix.train.command import _closing_words
from matmix.train.engine.build import build_engine
from matmix.train.evaluators import Evaluation, ablation, evaluate, make_evaluators
from matmix.train.evaluators.context import context_words, position_metrics, position_sums
from matmix.train.loaders import make_loader, with_data_facts
from matmix.train.process.distributed import Distributed
from matmix.train.recipe import load_config
from matmix.train.state import Result
from matmix.train.tasks.config import ObjectiveConfig
from matmix.train.tasks.token_prediction import TokenPrediction, row_losses

PACKINGS = ("concat", "document", "rows")
RECIPES = ("debug_mru", "debug_hydra")
TASK = TokenPrediction(ObjectiveConfig())


def prepared(recipe, dataset, *overrides):
    """A config, its validation batches (the last of them filled up with rows of padding) and a model whose mixers say
    something."""
    arguments = ["--data.path", dataset, "--model.dropout", "0", "--micro-batch-size", "0", *overrides]
    config = load_config(recipe, arguments)
    loader = make_loader(config, "validation", 0, 1)
    config = with_data_facts(config, loader)
    model = build_model(config.model, device="cpu")
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return config, list(loader), model.eval()


def engine_of(model):
    return SimpleNamespace(module=model, model=model, device=torch.device("cpu"), sum_over_batches=lambda sums: sums)


@torch.no_grad()
def losses_by_position(model, batch):
    """(position, loss) of every target, token by token."""
    found = []
    logits = model(
        batch.input_ids,
        cu_seqlens=batch.cu_seqlens,
        attention_mask=batch.attention_mask,
        max_seqlen=batch.max_seqlen,
    )
    borders = set() if batch.cu_seqlens is None else set(batch.cu_seqlens.tolist())
    length = batch.labels.shape[1]
    for row, labels in enumerate(batch.labels.tolist()):
        known = 0
        for column, label in enumerate(labels):
            known = 1 if row * length + column in borders else known + 1
            if label != -100:
                found.append((known, -F.log_softmax(logits[row, column], dim=0)[label].item()))
    return found


@each("packing", PACKINGS)
@each("recipe", RECIPES)
def test_bins_hold_the_losses_of_their_positions(recipe, packing, dataset):
    config, batches, model = prepared(recipe, dataset, "--data.packing", packing)
    expected, sums, total = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64), 0.0
    for batch in [batches[0], batches[-1]]:
        for position, loss in losses_by_position(model, batch):
            expected[:, position.bit_length() - 1] += torch.tensor([loss, 1.0])
        losses, correct = row_losses(model, batch)
        sums += position_sums(batch, losses, config.data.seqlen)
        whole = config.task().loss(model, batch)
        total += whole.loss.item()
        assert correct.sum().item() == whole.sums["accuracy"].item()
    assert expected[1].sum() > 30
    assert torch.equal(sums[1], expected[1])
    torch.testing.assert_close(sums[0], expected[0], rtol=1e-4, atol=1e-3)
    assert sums[0].sum().item() == pytest.approx(total, rel=1e-5)


def sums_of(*bins):
    """From (loss, targets) of each bin."""
    return torch.tensor([[loss * count for loss, count in bins], [count for _, count in bins]], dtype=torch.float64)


def test_the_last_bin_takes_in_what_is_too_small_to_tell():
    full_rows = sums_of((4.0, 10), (3.0, 20), (2.0, 40), (9.0, 10))
    metrics = position_metrics(full_rows, 8)
    assert list(metrics) == ["position_loss/1", "position_loss/2-3", "position_loss/4-8", "context_gain"]
    assert metrics["position_loss/4-8"] == pytest.approx((2 * 40 + 9 * 10) / 50)
    assert metrics["context_gain"] == pytest.approx((4 * 10 + 3 * 20) / 30 - metrics["position_loss/4-8"])

    # Documents of mostly 3 tokens, a few longer ones, none as long as the row.
    short = position_metrics(sums_of((4.0, 50), (3.0, 90), (2.0, 20), (1.0, 9), (0.0, 0)), 16)
    assert list(short) == ["position_loss/1", "position_loss/2-3", "position_loss/4-15"]

    long_rows = position_metrics(sums_of(*[(1.0, 2**k) for k in range(7)], (1.0, 65)), 192)
    assert list(long_rows)[-2:] == ["position_loss/128-192", "context_gain"]
    assert long_rows["context_gain"] == pytest.approx(0)


def test_there_is_no_gain_without_later_or_earlier_positions():
    assert position_metrics(sums_of((2.0, 5)), 1) == {"position_loss/1": 2.0}
    assert position_metrics(sums_of((2.0, 5), (1.0, 10)), 3) == {"position_loss/1": 2.0, "position_loss/2-3": 1.0}
    assert position_metrics(sums_of((0.0, 0), (0.0, 0), (1.0, 9)), 7) == {"position_loss/4-7": 1.0}
    assert position_metrics(sums_of((0.0, 0), (0.0, 0)), 3) == {}
    overflown = position_metrics(sums_of((float("nan"), 2), (1.0, 4), (1.0, 8)), 7)
    assert overflown == {"position_loss/2-3": 1.0, "position_loss/4-7": 1.0}


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x, cu_seqlens=None, max_seqlen=None):
        return self.value.to(x.dtype).expand_as(x)


def loss_on(model, batches):
    found = [row_losses(model, batch)[0].double().sum() for batch in batches]
    return sum(found).item() / sum(int((batch.labels != -100).sum()) for batch in batches)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_ablated_loss_is_that_of_a_model_with_constants_for_mixers(recipe, packing, norm, dataset):
    _, batches, model = prepared(recipe, dataset, "--data.packing", packing, "--model.norm", norm)
    batches = [batches[0], batches[-1]]  # the last one has padding
    without = copy.deepcopy(model)
    outputs = [[] for _ in model.blocks]
    for place, block in enumerate(model.blocks):
        block.mixer.register_forward_hook(lambda _mixer, _x, y, place=place: outputs[place].append(y))
    with torch.no_grad():
        for batch in batches:
            model(batch.input_ids, cu_seqlens=batch.cu_seqlens, attention_mask=batch.attention_mask)
    for place, block in enumerate(without.blocks):
        rows = []
        for batch, y in zip(batches, outputs[place], strict=True):
            targets = batch.labels.flatten() != -100
            padded = batch.attention_mask is not None and not batch.attention_mask.all()
            rows.append(y.flatten(0, 1)[targets[batch.attention_mask.flatten()] if padded else targets])
        block.mixer = Constant(torch.cat(rows).double().mean(0))
    found = ablation.mixing_metrics(engine_of(model), TASK, lambda: batches)
    expected, plain = loss_on(without, batches), loss_on(model, batches)
    rows = [[row_losses(each, batch)[0] for batch in batches] for each in (model, without)]
    assert (torch.cat(rows[0]) - torch.cat(rows[1])).abs().mean() > 1e-2  # the two models differ
    assert found["loss_without_mixing"] == pytest.approx(expected, rel=1e-5)
    assert found["mixing_gain"] == pytest.approx(expected - plain, abs=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_constants_for_mixers_gain_nothing(recipe, dataset):
    _, batches, model = prepared(recipe, dataset)
    for block in model.blocks:
        block.mixer = Constant(torch.randn(model.config.d_model))
    assert ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:2])["mixing_gain"] == pytest.approx(
        0, abs=1e-5
    )


def test_where_nothing_can_be_measured_nothing_is_said(dataset):
    _, batches, model = prepared("debug_mru", dataset)
    no_targets = copy.deepcopy(batches[0])
    no_targets.labels.fill_(-100)
    assert ablation.mixing_metrics(engine_of(model), TASK, lambda: [no_targets]) == {}
    model.blocks[1].mixer = Constant(torch.full((model.config.d_model,), torch.inf))
    assert ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:1]) == {}
    for block in model.blocks:
        block.mixer = None
    assert ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:1]) == {}


def test_blocks_are_left_as_they_were(dataset):
    """Compiled ones too, and after an evaluation that was given up."""
    _, batches, model = prepared("debug_mru", dataset)
    plain = ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:1])
    assert not any({"mix", "forward"} & vars(block).keys() for block in model.blocks)
    compile_blocks(model, backend="eager")
    compiled = [block.forward for block in model.blocks]
    assert ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:1]) == plain

    def given_up():
        yield batches[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablation.mixing_metrics(engine_of(model), TASK, given_up)
    assert [block.forward for block in model.blocks] == compiled
    assert not any("mix" in vars(block) for block in model.blocks)


def test_in_bfloat16_the_same_is_measured(dataset):
    _, batches, model = prepared("debug_hydra", dataset)
    plain = ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:2])
    compute_in_bfloat16(model, torch.device("cpu"))
    low = ablation.mixing_metrics(engine_of(model), TASK, lambda: batches[:2])
    assert low["loss_without_mixing"] == pytest.approx(plain["loss_without_mixing"], rel=2e-2)
    assert low["mixing_gain"] == pytest.approx(plain["mixing_gain"], abs=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_do_not_change_what_is_measured(recipe, dataset, tmp_path):
    found = []
    for micro in ("1", "8"):
        options = ["--steps", "1", "--micro-batch-size", micro, "--model.dropout", "0", "--evaluation.batches", "0"]
        run_recipe(recipe, dataset, tmp_path / micro, *options)
        found.append(records(tmp_path / micro, "validation")[0])
        del found[-1]["kind"]
    assert {"context_gain", "loss_without_mixing", "mixing_gain", "position_loss/16-32"} <= found[0].keys()
    assert list(found[0]) == list(found[1])
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=1e-4, abs=1e-5), name


def test_an_evaluation_is_given_up_at_any_batch(dataset):
    config, _, _ = prepared("debug_mru", dataset, "--evaluation.batches", "2", "--micro-batch-size", "4")
    engine = build_engine(config.engine, Distributed())
    engine.prepare(build_model(config.model, device="meta"), lambda model: initialize(model, 0), lambda model: None)
    loader = make_loader(config, "validation", 0, 1)
    task, calls = config.task(), []
    evaluators = [each for each, _ in make_evaluators(config, task)]

    def evaluated(**options):
        return evaluate(evaluators, Evaluation(engine=engine, task=task, loader=loader, **options), config)

    def interrupted(at):
        calls.append(None)
        return len(calls) == at

    metrics = evaluated(interrupted=lambda: interrupted(-1))
    batches = len(calls)
    assert batches == 4 + 2 * 2  # and two passes over the first global batch
    for at in range(1, batches + 1):
        calls.clear()
        assert evaluated(interrupted=lambda at=at: interrupted(at)) is None
        assert engine.module.training
    assert evaluated() == metrics


def test_without_ablation_batches_only_positions_are_measured(dataset, tmp_path):
    run_recipe("debug_mru", dataset, tmp_path, "--steps", "1", "--evaluation.ablation-batches", "0")
    (found,) = records(tmp_path, "validation")
    assert "context_gain" in found
    assert "mixing_gain" not in found


# -- what is said and drawn ------------------------------------------------------------------------------


def closing_words(run_dir, metrics):
    flags = {"steps_done": 8, "step": 8, "steps": 8, "finished": True, "stopped": False, "signal": 0, "saved": True}
    config = load_config("debug_mru", ["--run-dir", str(run_dir)])
    return _closing_words(config, Result(**flags, metrics=metrics, unigram_entropy=3.0)).splitlines()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_says_so_in_place_of_what_comes_next(loss, tmp_path):
    lines = closing_words(tmp_path, {"loss": loss, "bits_per_byte": loss})
    assert lines[-1].startswith(f"The run has diverged: its validation loss is {loss}. Train it anew: try a lower ")
    assert not any("Next: " in line for line in lines)


def test_a_run_ends_with_what_context_bought(tmp_path):
    metrics = {"loss": 1.5, "bits_per_byte": 0.7, "position_loss/1": 3.0, "position_loss/64-127": 1.0}
    measured = {"context_gain": 1.234, "loss_without_mixing": 1.9, "mixing_gain": 0.412}
    lines = closing_words(tmp_path, metrics | measured)
    assert lines[3] == (
        "Context: a token after 64 to 127 others of its document costs 1.23 nats less than after 1 to 3; "
        "with the mixers' outputs replaced by their means the loss is 0.41 nats higher."
    )
    assert not any(line.startswith(("Warning", "Curves")) for line in lines)
    lines = closing_words(tmp_path, metrics | measured | {"mixing_gain": -0.004})
    assert lines[4].startswith("Warning: the mixers contribute nothing: ")
    assert "-0.004 nats" in lines[4]
    assert not any("Context" in line for line in closing_words(tmp_path, metrics))  # of a run from before
    encoder = {"loss": 1.0, "masked_accuracy": 0.5, "position_loss/8": 1.0, "context_gain": -0.1}
    assert context_words(encoder) == [
        "Context: a masked token at places 8 of its document costs 0.10 nats more than at the first 3."
    ]


@pytest.mark.slow
def test_a_run_leaves_its_picture(dataset, tmp_path, monkeypatch):
    options = ["--logging.picture", "True", "--evaluation.batches", "1"]
    run_recipe("debug_mru", dataset, tmp_path / "run", *options, "--stop-step", "2")
    picture = tmp_path / "run" / "curves.png"
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    run_recipe("debug_mru", dataset, tmp_path / "run", *options)
    assert picture.read_bytes() != first
    assert f"Curves: {picture}" in closing_words(tmp_path / "run", {"loss": 1.0, "bits_per_byte": 1.0})
    when = picture.stat().st_mtime_ns
    run_recipe("debug_mru", dataset, tmp_path / "run", *options)  # nothing to do
    assert picture.stat().st_mtime_ns == when

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(records_module, "write_atomic", full_disk)
    assert run_recipe("debug_mru", dataset, tmp_path / "other", *options).finished
    assert json.loads((tmp_path / "other" / "summary.json").read_text())["step"] == 8


def test_records_of_older_runs_are_drawn_too():
    plain = [{"kind": "train", "step": 1, "loss": 3.0}, {"kind": "validation", "step": 1, "loss": 2.0}]
    nan = [{"kind": "train", "step": 2, "loss": float("nan")}, {"kind": "rewind", "step": 1}]
    assert records_module.draw(plain + nan).startswith(b"\x89PNG")
