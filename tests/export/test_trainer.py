"""Steps of transformers' Trainer on exports: the same however a batch is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")

import bare_steps
from nightly import nightly
from test_round_trip import OTHER_PYTHON
from transformers import Trainer, TrainingArguments

from matmix.model.parameter_rules import stated_rules


def texts_and_encoder(kind: str, exports: Path) -> Path:
    return exports / ("mru" if kind == "next tokens" else "hydra") / "export"


@pytest.mark.parametrize(
    "kind",
    [nightly(kind, condition=kind not in ("masked tokens", "next tokens", "classes")) for kind in bare_steps.KINDS],
)
def test_micro_batches_make_the_step_of_the_whole_batch(exports, kind):
    path = texts_and_encoder(kind, exports)
    rows = bare_steps.KINDS[kind][2]()
    bare_steps.check_steps(lambda: bare_steps.make_model(kind, path), rows, kind)


@pytest.mark.slow
def test_what_is_not_decayed_is_named(exports, tmp_path):
    """As the optimizers here have it, where Trainer alone would decay more."""
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    for kind in bare_steps.KINDS:
        model = bare_steps.make_model(kind, texts_and_encoder(kind, exports))
        spared = model.no_weight_decay()
        rules = stated_rules(model.model, 12)
        for name, parameter in model.named_parameters():
            rule = rules.get(name.removeprefix("model."), ("", None))[1]
            decayed = parameter.dim() > 1 and (rule is None or rule.weight_decay != 0)
            assert decayed == (name not in spared), name
        assert spared & set(Trainer(model=model, args=arguments).get_decay_parameter_names(model)), kind


@pytest.mark.filterwarnings("ignore:num_items_in_batch without labels")
def test_smoothed_labels_are_the_next_tokens(exports):
    kind = "next tokens"
    path = texts_and_encoder(kind, exports)
    bare_steps.check_smoothing(lambda: bare_steps.make_model(kind, path), bare_steps.KINDS[kind][2]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="4"),
        pytest.param(
            OTHER_PYTHON,
            id="5",
            marks=pytest.mark.skipif(not OTHER_PYTHON, reason="no Python with transformers 5 is named"),
        ),
    ],
)
def test_two_processes_make_the_step_of_one(exports, tmp_path, python):
    script = Path(bare_steps.__file__)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(script.parent),
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start in ([], launcher):
        command = [python, *start, str(script), str(texts_and_encoder("next tokens", exports)), str(tmp_path)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
    whole, *parts = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", 0, 1))
    assert torch.equal(*parts)
    assert bare_steps.apart(parts[0], whole) <= bare_steps.TOLERANCE
