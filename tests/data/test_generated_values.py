"""Generated samples from outside whose inputs are no tokens: sequences of numbers, with numbers to predict."""

import itertools
import json

import numpy as np
import pytest
import torch

from matmix.data.config import DataConfig
from matmix.data.loading.masking import MaskingConfig
from matmix.data.modalities import build_loader
from matmix.data.synthetic import GENERATED, GeneratedSamples, SyntheticConfig

NAME = f"{__name__}:Waves"


class Waves(GeneratedSamples):
    """Sums of sines in three channels; the label is the first channel one position later."""

    bidirectional_form = True

    def check(self, seqlen):
        if seqlen < 4:
            raise ValueError(f"data.seqlen = {seqlen} is too short for a wave")

    def padding(self, rows, seqlen):
        return np.zeros((rows, seqlen, 3), np.float32), np.full((rows, seqlen, 1), np.nan, np.float32)

    def fill(self, draw, inputs, labels, mask):
        times, phases = np.arange(len(inputs) + 1), draw.uniform(0, 6, (1, 3))
        wave = np.sin(times[:, None] / 5 + phases)
        inputs[:] = wave[:-1]
        if mask is None:
            labels[:] = wave[1:, :1]
        else:
            labels[::2] = wave[:-1:2, :1]
            inputs[::2] = 0


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(GENERATED, NAME, Waves)


def loader_of(*, workers=0, world=1, rank=0, micro=4, seqlen=12, **options):
    synthetic = SyntheticConfig(task=NAME, validation_samples=10)
    config = DataConfig(synthetic=synthetic, seqlen=seqlen, packing="rows", workers=workers)
    return build_loader(config, global_batch_size=8, micro_batch_size=micro, data_rank=rank, data_size=world, **options)


def take(loader, count):
    found = list(itertools.islice(iter(loader), count))
    loader.close()
    return found


def test_batches_of_values():
    for batch in take(loader_of(), 3):
        assert (batch.inputs.dtype, batch.labels.dtype) == (torch.float32, torch.float32)
        assert (batch.inputs.shape, batch.labels.shape) == ((4, 12, 3), (4, 12, 1))
        assert torch.equal(batch.inputs[:, 1:, :1], batch.labels[:, :-1])
        assert (batch.n_tokens, batch.max_seqlen) == (48, 12)
        assert batch.select is batch.cu_seqlens is batch.attention_mask is None
    for batch in take(loader_of(masking=MaskingConfig()), 3):
        assert torch.equal(batch.select, torch.arange(0, 48, 2))
        assert (batch.inputs.flatten(0, 1)[batch.select] == 0).all()


def test_ranks_workers_and_resuming_change_nothing():
    expected = torch.cat([b.inputs for b in take(loader_of(), 8)])
    ranks = [loader_of(workers=1, world=2, rank=rank, micro=2) for rank in range(2)]
    first, second = (torch.cat([b.inputs for b in take(loader, 8)]).unflatten(0, (4, 4)) for loader in ranks)
    assert torch.equal(torch.cat([first, second], 1).flatten(0, 1), expected)
    state = json.loads(json.dumps(ranks[0].state_dict()))
    later = loader_of()
    later.load_state_dict({**state, "samples": 16})
    assert torch.equal(torch.cat([b.inputs for b in take(later, 4)]), expected[16:])


def test_a_pass_over_the_validation_split_counts_each_sample_once():
    batches = take(loader_of(split="validation", one_pass=True), 100)
    assert len(batches) == 4
    assert sum(batch.n_tokens for batch in batches) == 10 * 12
    assert torch.isnan(torch.cat([batch.labels for batch in batches])[10:]).all()


def test_there_are_no_tokens():
    loader = loader_of()
    assert loader.facts.tokenizer is None
    assert loader.facts.vocab_size == 0
    assert loader.facts.token_histogram is None


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"data\.seqlen = 3 is too short for a wave"):
        loader_of(seqlen=3)
    monkeypatch.setattr(Waves, "causal_form", False)
    with pytest.raises(ValueError, match="has no form for models that predict what comes next"):
        loader_of()


def test_only_a_run_imports_a_source_from_outside(monkeypatch):
    monkeypatch.delitem(GENERATED, NAME)
    with pytest.raises(ValueError, match="is no task"):
        loader_of()
