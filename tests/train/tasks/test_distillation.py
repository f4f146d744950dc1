"""A model learns from another one by distances that are as they are defined, and goes on exactly."""

import copy
import dataclasses

import pytest
import torch
from runs import losses, records, run_recipe, weights

from matmix.data.loading.batch import Batch, selecting
from matmix.data.loading.masking import IGNORED
from matmix.model import build_model, initialize
from matmix.train.init.start import give_teacher
from matmix.train.recipe import load_config
from matmix.train.tasks import ObjectiveConfig, make_task

TEACHER = [
    "--model.layers",
    "attention",
    "--model.mixers.attention.headdim",
    "8",
    "--model.mixers.attention.nheads",
    "4",
]
STUDENTS = {
    "debug_mru": ["--model.layers", "semiseparable", "--model.mixers.semiseparable.headdim", "16"],
    "debug_hydra": ["--model.layers", "hydra", "--model.mixers.hydra.headdim", "16"],
}
NAMES = {"debug_mru": "causal_distillation", "debug_hydra": "masked_distillation"}
STAGES = ("matrices", "hidden", "logits")


def pair(recipe="debug_mru", *more):
    """A teacher and a student with weights of their own, of 4 heads each."""
    for seed, words in enumerate((TEACHER, STUDENTS[recipe])):
        words = [*words, "--model.vocab-size", "64", "--model.dropout", "0", *more]
        model = build_model(load_config(recipe, words).model)
        initialize(model, seed)
        yield model


def task_of(stage, teacher, student, recipe="debug_mru", **options):
    objective = ObjectiveConfig(name=NAMES[recipe], teacher="runs/it", options={"stage": stage, **options})
    task = make_task(objective, student.config)
    task.learn_from(teacher, "the run", student.config)
    return task


def tokens(seed=0):
    inputs = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return Batch(inputs, inputs.roll(-1, 1), max_seqlen=12, n_tokens=24)


def expected(stage, teacher, student, batch, rows=None, heat=1.0):
    """The distance of a stage, written anew; rows: of the flattened logits."""
    streams = []
    theirs = teacher(batch.inputs, streams=streams).flatten(0, 1)[rows if rows is not None else slice(None)]
    if stage == "logits":
        ours = student(batch.inputs).flatten(0, 1)[rows if rows is not None else slice(None)]
        p, q = (torch.distributions.Categorical(logits=logits / heat) for logits in (theirs, ours))
        return heat**2 * torch.distributions.kl_divergence(p, q).sum()
    total = 0.0
    for index, (mine, other) in enumerate(zip(student.blocks, teacher.blocks, strict=True)):
        before, after = streams[index : index + 2]
        if stage == "hidden":
            total += ((mine(before) - after).norm(dim=-1) / (before - after).norm(dim=-1)).square().sum()
        else:
            ours, theirs = (block.mixer.matrix(block.norm_mixer(before)) for block in (mine, other))
            total += torch.linalg.matrix_norm(ours - theirs).square().mean(1).sum()
    return total / len(student.blocks)


def test_distances_are_their_definitions():
    teacher, student = pair()
    batch = tokens()
    packed = dataclasses.replace(batch, cu_seqlens=torch.tensor([0, 12, 24], dtype=torch.int32))
    for stage in STAGES:
        task = task_of(stage, teacher, student)
        loss = task.loss(student, batch)
        wanted = expected(stage, teacher, student, batch).item()
        assert wanted > 0.01
        assert loss.loss.item() == pytest.approx(wanted, rel=1e-4)
        halves = (batch.map(lambda tensor, row=row: tensor[row : row + 1]) for row in range(2))
        assert sum(task.loss(student, half).loss.item() for half in halves) == pytest.approx(wanted, rel=1e-4)
        if stage != "matrices":
            assert task.loss(student, packed).loss.item() == pytest.approx(wanted, rel=1e-4)
        assert task.loss(copy.deepcopy(teacher).train(), batch).loss.item() == pytest.approx(0, abs=1e-4)

        student.zero_grad(set_to_none=True)
        loss.total.backward()
        trained = {name for name, weight in student.named_parameters() if weight.grad.any()}  # every one has a gradient
        only = {"matrices": (".mixer.", ".norm_mixer."), "hidden": ("blocks.",)}.get(stage, ("",))
        assert trained
        assert all(any(part in name for part in only) for name in trained)
        assert not any(weight.requires_grad for weight in teacher.parameters())
        assert not teacher.training

        plain = make_task(ObjectiveConfig(), student.config)
        assert torch.equal(task.costs(student, batch).loss, plain.costs(student, batch).loss)
        assert loss.sums["accuracy"] == plain.loss(student, batch).sums["accuracy"]
    heated = task_of("logits", teacher, student, temperature=3.0).loss(student, batch)
    assert heated.loss.item() == pytest.approx(expected("logits", teacher, student, batch, heat=3.0).item(), rel=1e-4)


def test_an_encoder_is_compared_where_tokens_are_masked_and_its_layers_everywhere():
    teacher, student = pair("debug_hydra")
    batch = tokens()
    batch = selecting(dataclasses.replace(batch, labels=batch.labels.where(batch.labels % 3 == 0, IGNORED)))
    for stage in STAGES:
        task = task_of(stage, teacher, student, "debug_hydra")
        share = 1.0 if stage == "logits" else task.objective.masking.probability
        wanted = share * expected(stage, teacher, student, batch, batch.select).item()
        assert task.loss(student, batch).loss.item() == pytest.approx(wanted, rel=1e-4)


def distil(recipe, dataset, run, teacher, stage, *words):
    """Trains the student from the teacher's weights but those of the mixers."""
    options = ["--objective.name", NAMES[recipe], "--objective.teacher", str(teacher), "--init.from", str(teacher)]
    options += ["--objective.options", f'{{stage = "{stage}"}}', "--init.ignore", "blocks.*.mixer.*"]
    options += ["--optimizer.weight-decay", "0", "--evaluation.ablation-batches", "0", "--evaluation.batches", "1"]
    packing = "rows" if stage == "matrices" else "concat"
    run_recipe(recipe, dataset, run, *STUDENTS[recipe], *options, "--data.packing", packing, *words)


@pytest.mark.parametrize(
    ("recipe", "stage", "steps"),
    [
        ("debug_mru", "matrices", 4),
        *(pytest.param("debug_mru", stage, 30, marks=pytest.mark.slow) for stage in STAGES),
        *(pytest.param("debug_hydra", stage, 30, marks=pytest.mark.slow) for stage in STAGES),
    ],
)
def test_a_run_resumes_exactly_and_nears_its_teacher(recipe, stage, steps, dataset, tmp_path):
    teacher = tmp_path / "teacher"
    run_recipe(recipe, dataset, teacher, *TEACHER, "--steps", "1" if steps < 30 else "30", "--evaluation.every", "0")
    words = (recipe, dataset), (teacher, stage, "--steps", str(steps), "--evaluation.every", "0")
    distil(*words[0], tmp_path / "whole", *words[1])
    for stop in (["--stop-step", "2"], []):
        distil(*words[0], tmp_path / "parts", *words[1], *stop)
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == found
    validation = [records(tmp_path / name, "validation")[-1]["loss"] for name in ("parts", "whole")]
    assert validation[0] == validation[1]
    if steps == 30:
        assert sum(found[-3:]) < 0.8 * sum(found[:3])
    before, after = weights(teacher), weights(tmp_path / "whole")
    kept = {name for name in before.keys() & after.keys() if torch.equal(before[name], after[name])}
    assert all(".mlp." in name or "mixer" not in name for name in kept)
    assert (stage == "logits") == (not any("embedding" in name for name in kept))
    assert (stage == "matrices") == any(".mlp." in name for name in kept)


def test_a_teacher_that_does_not_fit_is_one_line():
    teacher, student = pair()
    changes = {"vocab_size": 80, "d_model": 64, "n_layers": 3}
    for key, value in changes.items():
        other = copy.copy(student)
        other.config = dataclasses.replace(student.config, **{key: value})
        words = rf"^objective\.teacher: the run has model\.{key} = .*; set both to the same$"
        with pytest.raises(ValueError, match=words):
            task_of("hidden", teacher, other)
        if key != "vocab_size":  # predictions alone can be those of a model of any size
            task_of("logits", teacher, other)
    _, wide = pair("debug_mru", "--model.mixers.semiseparable.headdim", "32")
    with pytest.raises(ValueError, match=r"semiseparable has 2 matrices, and the teacher's layer 4; give the mixer"):
        task_of("matrices", teacher, wide).loss(wide, tokens())


def test_what_is_missing_or_unknown_is_one_line(tmp_path):
    name = ["--objective.name", "causal_distillation"]
    with pytest.raises(ValueError, match=r"needs a trained model to learn from: set objective\.teacher to a run or an"):
        load_config("debug_mru", name)
    with pytest.raises(ValueError, match=r'objective\.teacher is not for objective\.name = "causal_lm": leave it out'):
        load_config("debug_mru", ["--objective.teacher", "runs/it"])
    words = [*name, "--objective.teacher", str(tmp_path / "none")]
    with pytest.raises(ValueError, match=r"objective\.options.*stage"):
        load_config("debug_mru", [*words, "--objective.options", '{stage = "weights"}'])
    config = load_config("debug_mru", [*words, "--objective.options", '{stage = "matrices"}'])
    with pytest.raises(ValueError, match=r'stage = "matrices" needs data\.packing = "rows", not "concat"'):
        config.task().make_loader(config.data, split="train")
    with pytest.raises(FileNotFoundError, match=r"^objective\.teacher: there is no .*none; train it first"):
        give_teacher(config.task(), config, None, torch.device("cpu"))
