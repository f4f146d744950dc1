"""The settings that the runs are given are those that were published."""

from __future__ import annotations

import pytest

from matmix.launch.glue.plan import GlueSettings, Plan
from matmix.launch.glue.tasks import TASKS

PUBLISHED = {  # lr, weight decay, epochs, batch
    "hydra": {
        "MNLI": (1e-4, 5e-6, 2, 48),
        "RTE": (1e-5, 1e-6, 3, 16),
        "QQP": (5e-5, 3e-6, 3, 16),
        "QNLI": (5e-5, 1e-6, 7, 16),
        "SST-2": (5e-5, 3e-6, 2, 16),
        "STS-B": (3e-5, 3e-6, 10, 32),
        "MRPC": (8e-5, 8e-6, 10, 32),
        "CoLA": (1e-4, 5e-6, 10, 32),
    },
    "bert": {
        "MNLI": (5e-5, 5e-6, 3, 48),
        "RTE": (1e-5, 1e-5, 3, 16),
        "QQP": (3e-5, 3e-6, 5, 16),
        "QNLI": (1e-5, 1e-6, 10, 16),
        "SST-2": (3e-5, 3e-6, 3, 16),
        "STS-B": (3e-5, 3e-6, 10, 32),
        "MRPC": (8e-5, 8e-6, 10, 32),
        "CoLA": (5e-5, 5e-6, 10, 32),
    },
}
PUBLISHED["lion"] = {name: (1e-5, *others) for name, (_, *others) in PUBLISHED["hydra"].items()}


def plan(encoder, glue, out, tasks, **options) -> Plan:
    asked = GlueSettings(folder=str(glue), tasks=tuple(tasks), **options)
    return Plan(source=str(encoder), name="tiny", out=out, asked=asked)


@pytest.mark.parametrize("column", PUBLISHED)
def test_every_run_has_the_published_settings(column, encoder, glue, tmp_path):
    runs = plan(encoder, glue, tmp_path, TASKS, seeds=(3, 11), settings=column).runs
    assert [(run.entry, run.config.seed) for run in runs] == [(name, seed) for seed in (3, 11) for name in TASKS]
    assert set(TASKS) == set(PUBLISHED[column])
    for run in runs:
        config, optimizer = run.config, run.config.optimizer
        found = (optimizer.lr, optimizer.weight_decay, config.epochs, config.global_batch_size)
        assert found == PUBLISHED[column][run.entry], run.entry
        assert (optimizer.name, optimizer.betas, optimizer.eps) == ("adamw", (0.9, 0.98), 1e-6)
        assert optimizer.fully_decoupled
        assert (config.schedule.name, config.schedule.warmup, config.schedule.final) == ("linear", 0.06, 0.0)
        assert (config.data.seqlen, config.data.shuffle) == (256, True)
        assert not config.evaluation.patience
        assert (config.model.d_model, config.model.layers) == (32, ("hydra", "attention"))
        outputs = {"STS-B": 1, "MNLI": 3}.get(run.entry, 2)
        assert (config.model.architecture, config.model.head.outputs) == ("sequence_classifier", outputs)
        begins_with = f"{tmp_path}/MNLI/seed-{run.seed}" if run.entry in ("RTE", "MRPC", "STS-B") else str(encoder)
        assert config.init.from_ == begins_with


def test_without_a_run_on_mnli_all_begin_with_the_source(encoder, glue, tmp_path):
    runs = plan(encoder, glue, tmp_path, ["RTE", "CoLA"], seeds=(0,)).runs
    assert [run.config.init.from_ for run in runs] == [str(encoder)] * 2
    assert [run.config.run_dir for run in runs] == [
        f"{tmp_path}/{name}/seed-0" for name in ("RTE-without-MNLI", "CoLA")
    ]


@pytest.mark.parametrize("column", PUBLISHED)
def test_steps_that_are_given_stand_in_place_of_the_published_epochs(column, encoder, glue, tmp_path):
    own = plan(encoder, glue, tmp_path, ["RTE"], seeds=(0,), settings=column, options=("--steps", "7"))
    config = own.configs["RTE"]
    assert (config.steps, config.epochs) == (7, 0)
