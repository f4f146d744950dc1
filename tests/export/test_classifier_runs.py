"""A classifier is trained from nothing, planned, resumed, exported and read, with what its task says of its outputs."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from runs import losses, run_recipe, weights
from transformers import AutoModelForSequenceClassification

from matmix.launch.cli import main
from matmix.launch.generate import Generate
from matmix.model.architecture import Outputs
from matmix.model.interop import read_export
from matmix.train.tasks import TASKS, Loss, Task
from matmix.use.exporting import export_run


class FirstToken(Task):
    """Whether the second token of a row has an odd id."""

    architectures = ("sequence_classifier",)

    def count_targets(self, batch):
        return batch.inputs.shape[0]

    def loss(self, model, batch):
        predicted = self.forward(model, batch).float()
        total = F.cross_entropy(predicted, batch.inputs[:, 1] % 2, reduction="sum")
        return Loss(total, total.detach(), {})

    def outputs(self, data):
        return Outputs(labels=("even", "odd"), problem_type="single_label_classification")


OPTIONS = (
    *("--model.architecture", "sequence_classifier", "--model.head.hidden", "False", "--model.head.pooling", "cls"),
    *("--objective.name", "first_token", "--data.packing", "rows", "--checkpoint.every", "2"),
)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(TASKS, "first_token", FirstToken)


@pytest.mark.slow
def test_a_classifier_goes_the_whole_way(known, dataset, tmp_path, capsys):
    run = tmp_path / "run"
    run_recipe("debug_hydra", dataset, run, *OPTIONS, "--steps", "4", "--stop-step", "2")
    run_recipe("debug_hydra", dataset, run, *OPTIONS, "--steps", "4")
    run_recipe("debug_hydra", dataset, tmp_path / "whole", *OPTIONS, "--steps", "4")
    assert losses(run) == losses(tmp_path / "whole")
    out = export_run(run, tmp_path / "export")
    fields = json.loads((out / "config.json").read_text())
    assert fields["id2label"] == {"0": "even", "1": "odd"}
    model = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True).eval()
    assert model.config.problem_type == "single_label_classification"
    saved = weights(run)
    assert {name.removeprefix("model."): None for name, _ in model.named_parameters()}.keys() == saved.keys()
    ids = torch.randint(8, 300, (2, 20))
    torch.testing.assert_close(read_export(out).eval()(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="is a sequence_classifier, which writes no text"):
        Generate(source=str(run)).print(["the <mask>"], print)
    capsys.readouterr()
    assert main(["train", str(run)]) == 0
    assert f"Next: matmix export {run} --out DIR" in capsys.readouterr().out.splitlines()
    assert main(["train", str(run), "--dry-run"]) == 0
    parameters = sum(tensor.numel() for tensor in saved.values())
    assert f"({parameters:,}; " in capsys.readouterr().out


def test_a_task_for_another_output_is_refused(dataset, tmp_path):
    with pytest.raises(ValueError, match=r'"masked_lm" trains .* "encoder" or .* is "sequence_classifier"'):
        run_recipe("debug_hydra", dataset, tmp_path, "--model.architecture", "sequence_classifier")
