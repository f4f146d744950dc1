"""`matmix plan`: the figures follow from the recipe and the hardware, the warnings from the figures."""

import dataclasses
import json
import math
import shlex

import pytest
import torch

from matmix.launch.cli import TREE
from matmix.launch.lab.plan import estimate as estimating
from matmix.launch.lab.plan.command import PlanRun
from matmix.launch.lab.plan.estimate import (
    GPUS,
    assess,
    candidates,
    collectives,
    estimate,
    find_gpu,
    measured_efficiency,
    options_of,
    read_cluster,
    suggest,
)
from matmix.launch.lab.plan.report import find_warnings
from matmix.model.flops import flops_by_part, flops_per_token
from matmix.train.arguments import read_verb
from matmix.train.command import train_recipe
from matmix.train.estimate.context import context_bytes
from matmix.train.estimate.plan import make_plan
from matmix.train.loaders import make_loader
from matmix.train.meters.speed import peak_flops
from matmix.train.recipe import load_config
from matmix.train.recipe_files import bundled_recipes, find_recipe
from matmix.train.words import duration, short_number

H100 = GPUS["h100"]


def config(*overrides: str, batch: int = 64):
    return load_config("debug_hydra", ["--model.vocab-size", "320", "--global-batch-size", str(batch), *overrides])


PADDING = 0.005
"""Rows are padded to a multiple of the ranks: part of the bytes of all weights, at most."""


def sent(ranks: int, *overrides: str, micro: int = 0) -> dict[str, float]:
    """Bytes by collective, in units of the bytes of all weights."""
    one = config(*overrides, "--micro-batch-size", str(micro))
    plan = make_plan(one, ranks)
    return {part.what: part.bytes / (4 * plan.parameters) for part in collectives(one, plan, 8)}


def test_a_single_gpu_sends_nothing():
    assert sent(1) == {}


def test_what_each_engine_sends():
    assert sent(4, "--engine.name", "ddp") == {"all-reduce of gradients": pytest.approx(2 * 3 / 4)}
    assert sent(4, "--engine.name", "deepspeed", "--engine.zero-stage", "1") == {
        "all-reduce of gradients": pytest.approx(2 * 3 / 4),
        "all-gather of weights": pytest.approx(3 / 4),
    }
    accumulated = sent(4, "--engine.name", "deepspeed", "--engine.zero-stage", "3", micro=8)
    assert accumulated == {
        "reduce-scatter of gradients": pytest.approx(2 * 3 / 4),
        "all-gather of weights": pytest.approx(3 / 4),  # all are small, and stay gathered
    }
    fsdp = sent(4)
    assert fsdp["reduce-scatter of gradients"] == pytest.approx(3 / 4, rel=PADDING)
    # Blocks are gathered for both passes, what is outside of them once.
    assert 3 / 4 < fsdp["all-gather of weights"] < 2 * 3 / 4
    kept = sent(4, "--engine.reshard-after-forward", "False")
    assert kept["all-gather of weights"] == pytest.approx(3 / 4, rel=PADDING)
    hybrid = sent(4, "--engine.replicate", "2")
    assert hybrid["all-reduce of gradients"] == pytest.approx(2 * 1 / 2 / 2, rel=PADDING)
    assert hybrid["reduce-scatter of gradients"] == pytest.approx(1 / 2, rel=PADDING)


@pytest.mark.slow
def test_what_is_sent_in_bf16():
    exact, rounded = sent(4), sent(4, "--engine.precision", "bf16")
    assert rounded["reduce-scatter of gradients"] == exact["reduce-scatter of gradients"]
    few, wide = (("--model.vocab-size", size) for size in ("32", "100000"))
    half = [sent(4, "--engine.precision", "bf16", *size)["all-gather of weights"] for size in (few, wide)]
    whole = [sent(4, *size)["all-gather of weights"] for size in (few, wide)]
    assert half[0] == pytest.approx(whole[0] / 2, rel=0.1)
    # The embedding, which the output projection is tied to, is looked up in float32.
    assert half[1] > 0.9 * whole[1]
    sums = sent(4, "--engine.precision", "bf16", "--engine.reduce-dtype", "bf16")
    assert sums == {**rounded, "reduce-scatter of gradients": exact["reduce-scatter of gradients"] / 2}


@pytest.mark.slow
def test_what_zero_offloads_lies_with_the_host():
    """Moments, gradients and copies of a rank's part of the weights; the rest stays what it was."""
    zero = ["--engine.name", "deepspeed", "--engine.zero-stage"]
    for stage, copies in ((1, 2), (2, 2), (3, 1)):
        options = [[*zero, str(stage)], [*zero, str(stage), "--engine.offload", "True"]]
        plain, offloaded = (make_plan(config(*words), 4) for words in options)
        assert not plain.host_words
        assert plain.copied == offloaded.parts["moments"] == 0
        part = plain.parameters  # in bytes: a quarter of the elements
        assert offloaded.on_host["moments"] == plain.parts["moments"]
        assert offloaded.on_host["weights"] == copies * part
        assert offloaded.parts["weights"] == plain.parts["weights"] - part
        assert offloaded.total_bytes < plain.total_bytes - plain.parts["moments"]
        assert offloaded.copied >= 2 * part
        one = estimate(config(*options[1]), 4, H100, 0.4)
        assert one.step_seconds >= one.copy_seconds == offloaded.copied / (H100.host_gb_per_s * 1e9) > 0
    # Suggestions are engines that offload nothing.
    said = shlex.join(options_of(suggest(one.config, 4, H100, 0.4)[0], one.config))
    assert said.count("--engine.offload False") == 1


@pytest.mark.slow
def test_a_context_shares_activations_and_sends_states():
    long = ("--data.seqlen", "4096", "--model.max-seqlen", "4096", "--engine.precision", "bf16")
    plans = {n: make_plan(config(*long, "--engine.context", str(n), "--micro-batch-size", "1"), 4) for n in (1, 2, 4)}
    for ranks, plan in plans.items():
        assert plan.parts["activations"] <= (1 / ranks + 0.1) * plans[1].parts["activations"]
        assert plan.accumulation == 64 // (4 // ranks)
    one = config(*long, "--engine.context", "4", "--micro-batch-size", "1")
    found = {part.what: part for part in collectives(one, plans[4], 8)}
    context = found["exchanges of a context"]
    assert (context.ranks, context.within_node) == (4, True)
    assert context.bytes == pytest.approx(64 * context_bytes(one))
    # A layer of states and one of attention: again in the backward pass, and what is recomputed once more.
    again = collectives(one, plans[4], 8, "full")[-1]
    assert 1.2 * context.bytes < again.bytes < 1.6 * context.bytes
    assert found["all-gather of weights"].ranks == 4  # they share the weights as well


@pytest.mark.slow
def test_a_context_is_proposed_where_whole_rows_do_not_fit():
    one = config("--data.seqlen", "4096", "--model.max-seqlen", "4096", batch=4)
    whole = min(make_plan(candidate, 4, mode="full").total_bytes for candidate in candidates(one, 4, H100))
    small = dataclasses.replace(H100, memory_gb=0.7 * whole / 1e9 / estimating.USABLE)
    best = suggest(one, 4, small, 0.4)[0]
    assert best.fits
    assert best.config.engine.context == 2
    assert options_of(best, one)[:2] == ["--engine.context", "2"]
    assert suggest(one, 4, H100, 0.4)[0].config.engine.context == 1
    fixed = config("--model.layers", "dense", "--model.max-seqlen", "32", "--data.packing", "rows", batch=4)
    assert suggest(fixed, 4, dataclasses.replace(H100, memory_gb=1e-6), 0.4) == []


@pytest.mark.slow
def test_a_context_that_is_not_needed():
    needless = [text for text in warnings(4, engine__context=2) if text.startswith("whole rows fit into")]
    assert len(needless) == 1
    assert not any(text.startswith("whole rows") for text in warnings(4))


def test_links_within_and_between_nodes():
    plan = make_plan(one := config("--engine.replicate", "2"), 16)
    found = {part.what: part.within_node for part in collectives(one, plan, 8)}
    assert found == {
        "all-gather of weights": True,
        "reduce-scatter of gradients": True,
        "all-reduce of gradients": False,
    }


def test_flops_by_mixer_add_up():
    model = load_config("hydra_base_c4").model
    parts = flops_by_part(model, 128, head_share=0.3)
    assert set(parts) == {"hydra", "readout"}
    assert sum(parts.values()) == flops_per_token(model, 128, head_share=0.3)
    both = load_config("debug_hydra", ["--model.layers", "hydra", "attention"]).model
    assert {"hydra", "attention"} < set(flops_by_part(both, 64))


def test_time_follows_from_the_hardware():
    one, twice = (estimate(config(), ranks, H100, 0.4) for ranks in (1, 2))
    flops = 3 * one.plan.flops_per_unit * one.plan.units_per_step
    assert one.compute_seconds == pytest.approx(flops / (0.4 * 67e12))
    assert one.compute_seconds == pytest.approx(2 * twice.compute_seconds)
    assert estimate(config(), 1, H100, 0.2).compute_seconds == pytest.approx(2 * one.compute_seconds)
    full = estimate(config(), 1, H100, 0.4, mode="full")
    assert full.compute_seconds == pytest.approx(4 / 3 * one.compute_seconds)
    assert one.seconds == one.step_seconds * one.plan.steps


@pytest.mark.slow
def test_launches_bound_the_time_of_small_models():
    """Every op of a pass that computes is a launch or more, and passes add up."""
    whole = ("--micro-batch-size", "64")
    small = estimate(config(*whole), 1, H100, 0.4)
    ops = small.plan.computed_ops
    assert small.launch_seconds == pytest.approx(5e-6 * ops)
    assert small.step_seconds == small.launch_seconds > 10 * small.compute_seconds
    assert estimate(config("--micro-batch-size", "32"), 1, H100, 0.4).plan.computed_ops == 2 * ops
    assert estimate(config("--engine.compile", "True"), 1, H100, 0.4).launch_seconds == 0
    deep = estimate(config("--model.n-layers", "8", *whole), 1, H100, 0.4).plan.computed_ops
    layer = (deep - ops) / 6  # of 2 layers
    assert 30 < layer < 150  # forward and backward, with fused ops
    quick = dataclasses.replace(H100, launch_microseconds=1e-6)
    assert estimate(config(*whole), 1, quick, 0.4).step_seconds == small.compute_seconds
    large = load_config("hydra_base_c4")
    assert (found := estimate(large, 8, H100, 0.4)).step_seconds == found.compute_seconds


@pytest.mark.slow
def test_what_is_said_of_a_short_run(capsys):
    """No interval between checkpoints that is longer than the run, and no warning of what seconds cost."""
    assert main(["debug_hydra", "--gpus", "1", "--steps", "150", "--checkpoint.every", "50"]) == 0
    shown = capsys.readouterr().out
    assert "kernels a step and rank, 5 µs of the host for each (assumed, not measured)" in shown
    assert "the run is shorter than the best interval between checkpoints, " in shown
    assert "warning: a step is too small for one H100: to launch its kernels takes the host " in shown
    assert "loses" not in shown
    one = estimate(config("--steps", "100000", "--checkpoint.every", "2"), 1, H100, 0.4)
    risk = assess(one.config, one.plan, H100, one.step_seconds, stall=1.0)
    assert risk.best_interval > one.seconds
    (text,) = [text for text in find_warnings(one, H100, risk) if "--checkpoint.every" in text]
    assert text.endswith("--checkpoint.every 100000")


@pytest.mark.slow
def test_suggestions_fit_and_keep_the_batch():
    one = config()
    found = suggest(one, 4, H100, 0.4)
    assert found
    seconds = [round(s.step_seconds, 6) for s in found]
    assert seconds == sorted(seconds)
    for candidate in candidates(one, 4, H100):
        assert candidate.global_batch_size == one.global_batch_size
    tiny = dataclasses.replace(H100, memory_gb=found[0].plan.total_bytes / 1e9 * 1.02)
    for suggestion in suggest(one, 4, tiny, 0.4):
        assert suggestion.plan.total_bytes <= tiny.memory_gb * 1e9
    assert suggest(one, 4, dataclasses.replace(H100, memory_gb=1e-6), 0.4) == []


def test_options_lead_to_the_suggestion():
    one = config()
    best = suggest(one, 4, H100, 0.4)[-1]
    again = config(*options_of(best, one))
    assert again.engine.name == best.config.engine.name
    assert again.micro_batch_size == best.plan.micro_batch_size
    assert estimate(again, 4, H100, 0.4).plan == best.plan


def test_young_and_daly():
    one = estimate(config("--checkpoint.every", "10"), 8, H100, 0.4)
    risk = assess(one.config, one.plan, H100, step_seconds=2.0, stall=3.0)
    assert risk.mtbf == pytest.approx(50_700 * 3600 / 8)
    assert risk.best_interval == pytest.approx((2 * 3.0 * risk.mtbf) ** 0.5)
    assert risk.interval == 20.0
    for other in (0.5, 0.9, 1.1, 2.0):
        assert risk.lost(risk.best_interval) < risk.lost(other * risk.best_interval)


def warnings(ranks: int = 8, cluster=H100, stall: float | None = None, **changes):
    flags = [f"--{key.replace('__', '.').replace('_', '-')}={value}" for key, value in changes.items()]
    one = estimate(config(*flags), ranks, cluster, 0.4)
    return find_warnings(one, cluster, assess(one.config, one.plan, cluster, one.step_seconds, stall))


def test_warnings(dataset):
    assert any(text.startswith("global batch too small for the mesh: a rank sees") for text in warnings())
    small = dataclasses.replace(H100, memory_gb=0.001)
    assert any(text.startswith("a rank needs 0 GB of the 0 GB") for text in warnings(cluster=small))
    slow = dataclasses.replace(H100, node_gb_per_s=0.001)
    assert any(text.startswith("exchanges between GPUs (") for text in warnings(cluster=slow))
    assert any(text.startswith("data repeats: the run reads ") for text in warnings(data__path=dataset, steps=10_000))
    assert not any(text.startswith("data repeats") for text in warnings(data__path=dataset, steps=1))
    frail = dataclasses.replace(H100, mtbf_gpu_hours=0.01)
    (text,) = [
        t for t in warnings(cluster=frail, stall=1.0, checkpoint__every=1, steps=10_000) if "--checkpoint.every" in t
    ]
    assert text.startswith("a checkpoint every 1 steps (")


_IMAGES = [name for name in bundled_recipes() if name.endswith("_imagenet")]


@pytest.mark.slow
@pytest.mark.parametrize("name", _IMAGES)
def test_recipes_of_images_at_full_size(name, monkeypatch, capsys):
    """All that `matmix plan` says of them, but for the suggestions, which take long."""
    plans = []

    def noted(*arguments, **options):
        plans.append(make_plan(*arguments, **options))
        return plans[-1]

    monkeypatch.setattr(estimating, "suggest", lambda *_: [])
    monkeypatch.setattr(estimating, "make_plan", noted)
    assert main([name, "--gpus", "8", "--mfu", "0.4"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    (plan,) = plans
    assert plan.units_per_step == 1024
    seconds = 3 * plan.flops_per_unit * 1024 / (8 * H100.peak_tflops * 1e12 * 0.4)
    assert rows["speed"].split() == [short_number(1024 / seconds), "images/s"]
    assert f"{duration(seconds * plan.steps)} for {plan.steps:,} steps" in rows["time"]
    assert "forward" in rows["FLOPs per image"]
    assert 0.5 < plan.total_bytes / 2**30 < 0.9 * H100.memory_gb
    assert "of 75 GiB" in rows["memory per rank"]


def test_arithmetic_is_counted_against_the_peak_of_its_precision(monkeypatch, tmp_path):
    """A recipe in fp32 has a fifteenth of the peak of bf16 on an H100, unless torch is set to tf32."""
    seconds = {}
    for precision, setting in (("bf16", "highest"), ("fp32", "highest"), ("fp32", "high")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        one = estimate(config("--engine.precision", precision), 1, H100, 0.5)
        seconds[one.arithmetic] = one.compute_seconds
    assert seconds["fp32"] / seconds["bf16"] == pytest.approx(989 / 67)
    assert seconds["tf32"] / seconds["bf16"] == pytest.approx(2)
    (file := tmp_path / "ours.toml").write_text("gpu = 'own'\npeak_tflops = 9\nmemory_gb = 24\nnode_gb_per_s = 30\n")
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match="computes in fp32, and the peak of own in that is not known: set peak_tflops_"
    ):
        estimate(config("--engine.precision", "fp32"), 1, read_cluster(file), 0.5)


def test_what_muon_computes_and_holds_is_counted():
    """Its products at the peak of its own dtype; its buffers where the step takes more than the passes before it."""
    words = ["--engine.precision", "bf16", "--model.n-layers", "1", "--optimizer.name"]
    adamw, muon, rounded = (
        estimate(config(*words, *name), 4, H100, 0.5)
        for name in (["adamw"], ["muon"], ["muon", "--optimizer.options", '{dtype = "bfloat16"}'])
    )
    flops = muon.plan.update.flops
    assert (adamw.plan.update.flops, adamw.update_seconds) == (0, 0)
    assert muon.update_seconds == pytest.approx(flops / (0.5 * 67e12))
    assert rounded.update_seconds == pytest.approx(flops / (0.5 * 989e12))
    assert muon.compute_seconds == pytest.approx(adamw.compute_seconds + muon.update_seconds)
    assert muon.plan.parts["buffers"] == 0
    wide = make_plan(config("--optimizer.name", "muon", "--model.d-model", "512", "--data.seqlen", "16", batch=2), 2)
    assert wide.parts["buffers"] == wide.update.bytes > 0
    assert wide.parts["gradients"] == 4 * wide.parameters / 2


def test_utilisation_is_a_share_of_the_peak_of_the_runs_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    peaks = [peak_flops(torch.device("cuda"), precision) for precision in ("bf16", "fp32")]
    assert peaks == [312e12, 19.5e12]
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_warnings_about_images_speak_of_patches():
    changes = ["--micro-batch-size", "1", "--model.n-layers", "1"]
    one = estimate(load_config("vit_b_imagenet", changes), 8, H100, 0.4)
    found = find_warnings(one, H100, assess(one.config, one.plan, H100, 1.0, None))
    (text,) = [text for text in found if text.startswith("global batch too small")]
    assert "a rank sees 196 patches in a pass" in text


def test_a_cluster_of_ones_own(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text('gpu = "H100"\nnetwork_gb_per_s = 12\ngpus_per_node = 4\n')
    found = read_cluster(file)
    assert (found.network_gb_per_s, found.gpus_per_node, found.memory_gb) == (12.0, 4, 80)
    file.write_text('gpu = "own"\npeak_tflops = 100\nmemory_gb = 24\nnode_gb_per_s = 30\n')
    assert read_cluster(file).peak_tflops == 100
    file.write_text("network_gbps = 12\n")
    with pytest.raises(ValueError, match='unknown key "network_gbps"; the nearest known key is "network_gb_per_s"'):
        read_cluster(file, "h100")
    file.write_text('gpu = "own"\npeak_tflops = 100\n')
    with pytest.raises(ValueError, match="memory_gb"):
        read_cluster(file)
    file.write_text("gpus_per_node = 0\n")
    with pytest.raises(ValueError, match="gpus_per_node must be positive, got 0"):
        read_cluster(file, "h100")
    with pytest.raises(ValueError, match="--gpu v100 is not known: use one of a100, h100, h200, b200, mi300x"):
        find_gpu("v100")


def test_utilisation_from_a_run(tmp_path):
    records = [{"kind": "train", "mfu": share} for share in (0.01, 0.2, 0.4, 0.42)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert measured_efficiency(tmp_path) == pytest.approx(0.41)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "loss": 3.0}\n')
    with pytest.raises(ValueError, match="recorded no utilisation"):
        measured_efficiency(tmp_path)


def main(words):
    verb, rest = read_verb(PlanRun, words, prog="matmix plan")
    return verb.run(rest, words)


def test_the_command(capsys):
    words = ["debug_hydra", "--gpus", "4", "--gpu", "mi300x", "--mfu", "0.3", "--global-batch-size", "64"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "4 x MI300X on 1 node" in shown
    assert "30% of 163 TFLOP/s in fp32 (as given)" in shown
    assert "fastest that fit:" in shown
    assert main([*words[:3], "--global-batch-size", "64", "--micro-batch-size", "12"]) == 0
    shown = capsys.readouterr().out
    assert "passes have 8 sequences: the largest number up to micro_batch_size = 12 that divides a rank's 16" in shown
    assert "assumed, not measured on H100s" in shown
    with pytest.raises(ValueError, match="--gpus must be >= 1, got 0"):
        main(["debug_hydra", "--gpus", "0"])
    with pytest.raises(ValueError, match="does not divide over 3 ranks"):
        main(["debug_hydra", "--gpus", "3", "--global-batch-size", "64"])
    with pytest.raises(ValueError, match="--mfu is a share between 0 and 1, got 40"):
        main(["debug_hydra", "--gpus", "4", "--mfu", "40"])


def test_the_vocabulary_is_that_of_the_data_where_they_are(dataset, capsys, tmp_path):
    """A small model's size and cost are mostly those of its vocabulary."""
    words = ["debug_hydra", "--data.path", dataset]
    assert main([*words, "--gpus", "1"]) == 0
    assert "(vocabulary 320, the data's)" in capsys.readouterr().out
    assert train_recipe("debug_hydra", words[1:], dry_run=True) == 0
    assert "; vocabulary 320, the data's)" in capsys.readouterr().out
    assert train_recipe("debug_hydra", ["--data.path", str(tmp_path / "none")], dry_run=True) == 0
    assert "; vocabulary 32768, assumed, training takes the data's)" in capsys.readouterr().out


def test_epochs_are_counted_where_the_data_is(dataset, capsys, tmp_path):
    """As many steps as training will take, and no number that nothing was counted for without saying so."""
    words = ["debug_hydra", "--epochs", "2", "--data.path", dataset]
    samples = make_loader(load_config(words[0], words[1:]), "train", 0, 1).samples_per_epoch
    counted = f"{math.ceil(2 * samples / 8):,}"
    assert counted != "8"  # the recipe's own
    assert train_recipe(words[0], words[1:], dry_run=True) == 0
    assert f" {counted} (epochs = 2)" in capsys.readouterr().out
    assert main([*words, "--gpus", "1"]) == 0
    assert f" for {counted} steps (epochs = 2)," in capsys.readouterr().out
    assert train_recipe(words[0], [*words[1:-1], str(tmp_path / "none")], dry_run=True) == 0
    assert " 8 (assumed, epochs = 2 will be counted once the data is there)" in capsys.readouterr().out


@pytest.mark.slow
def test_each_phase_has_a_plan(capsys, tmp_path):
    phases = "[[phase]]\nsteps = 3\n[[phase]]\nsteps = 5\ninit.resume = true\n"
    (tmp_path / "mine.toml").write_text(find_recipe("debug_hydra").read_text() + phases)
    assert main([str(tmp_path / "mine.toml"), "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":")] == [
        "runs/mine/phase-1:", "fastest that fit:", "runs/mine/phase-2:", "fastest that fit:"
    ]  # fmt: skip
    assert [line.split(" steps")[0].split()[-1] for line in lines if line.startswith("time ")] == ["3", "2"]


@pytest.mark.parametrize(("gpus", "where"), [(2, "local"), (16, "slurm")])
def test_the_command_that_starts_the_fastest_can_be_copied(gpus, where, capsys, tmp_path):
    """It is read as the plan has it, with what the command line of the plan changes of the recipe."""
    overrides = ["--global-batch-size", "64", "--run-dir", str(tmp_path / "a run")]
    overrides += ["--engine.activation_checkpointing", "full"]  # which the fastest has not
    assert main(["debug_hydra", "--gpus", str(gpus), *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    command = shlex.split(lines[lines.index("to start the fastest:") + 1])
    assert command[:3] == ["matmix", "launch", where]
    verb, rest = TREE.read(command[1:])
    assert [word for word in rest if "checkpointing" in word] == ["--engine.activation-checkpointing"]
    ranks = verb.nproc if where == "local" else int(verb.slurm["nodes"]) * int(verb.slurm["gpus_per_node"])
    config = load_config(verb.recipe, rest)
    first = lines[lines.index("fastest that fit:") + 1]
    assert ranks == gpus
    assert config.run_dir == str(tmp_path / "a run")
    assert config.global_batch_size == 64
    assert config.micro_batch(ranks) == 64 // gpus
    shown = first.partition(": ")[2]
    assert shown == "as configured" or set(shown.split()) <= set(command)
