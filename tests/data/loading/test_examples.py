"""Loaders of labelled examples: one order whatever reads it, exact positions, and every example once in evaluation."""

from __future__ import annotations

import itertools

import pytest
import torch
from labelled import texts, write_jsonl, write_tokenizer

from matmix.data.config import DataConfig, ExamplesConfig
from matmix.data.examples.texts import ClassTexts, Words
from matmix.data.modalities import build_loader


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    options = ExamplesConfig(
        train=write_jsonl(folder / "train.jsonl", texts(53)),
        validation=write_jsonl(folder / "validation.jsonl", texts(31, seed=1)),
        tokenizer=write_tokenizer(folder),
    )

    def make(**changes):
        return DataConfig(
            **({"examples": options, "seqlen": 16, "prefix": "cls", "suffix": "sep", "workers": 0} | changes)
        )

    return make


def _documents(loader, batches=None):
    """Number, tokens and label of each document, in the order in which they come."""
    found = []
    for batch in itertools.islice(loader, batches):
        if batch.cu_seqlens is not None:
            documents = batch.inputs[0].tensor_split(batch.cu_seqlens[1:-1].long())
        elif batch.attention_mask is not None:
            documents = [row[mask] for row, mask in zip(batch.inputs, batch.attention_mask, strict=True)]
        else:
            documents = list(batch.inputs)
        rows = zip(batch.examples.tolist(), documents, batch.labels.tolist(), strict=True)
        found += [(number, tuple(document.tolist()), label) for number, document, label in rows]
    return found


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_ranks_workers_and_micro_batches_do_not_change_the_order(data, packing):
    options = {"global_batch_size": 8, "seed": 3}
    whole = _documents(build_loader(data(packing=packing), kind=ClassTexts, micro_batch_size=8, **options), 14)
    assert len({number for number, _, _ in whole[:53]}) == 53
    assert [number for number, _, _ in whole[:53]] != [number for number, _, _ in whole[53:106]]
    ranks = [
        _documents(
            build_loader(
                data(packing=packing, workers=rank % 2),
                kind=ClassTexts,
                micro_batch_size=1,
                data_rank=rank,
                data_size=4,
                **options,
            ),
            28,
        )
        for rank in range(4)
    ]
    merged = [row for step in range(14) for rank in ranks for row in rank[2 * step : 2 * step + 2]]
    assert merged == whole


def test_a_saved_position_goes_on_where_it_was(data):
    options = {"global_batch_size": 8, "micro_batch_size": 4}
    whole = _documents(build_loader(data(), kind=ClassTexts, **options), 20)
    first = build_loader(data(), kind=ClassTexts, **options)
    assert _documents(first, 7)[:24] == whole[:24]
    second = build_loader(data(), kind=ClassTexts, **options)
    second.load_state_dict(first.state_dict())
    assert second.samples == 24
    assert _documents(second, 14) == whole[24:80]
    with pytest.raises(ValueError, match="belongs to other data: seqlen was 16 and is now 12"):
        build_loader(data(seqlen=12), kind=ClassTexts, **options).load_state_dict(first.state_dict())


@pytest.mark.parametrize("kind", [ClassTexts, Words])
def test_evaluation_sees_each_of_a_prime_number_of_examples_once(data, kind, tmp_path):
    if kind is Words:
        rows = [{"text": row["text"], "label": " ".join("N" for _ in row["text"].split())} for row in texts(31)]
        path = write_jsonl(tmp_path / "words.jsonl", rows)
        tokenizer = data().examples.tokenizer
        config = data(examples=ExamplesConfig(train=path, validation=path, tokenizer=tokenizer))
    else:
        config = data()
    loaders = [
        build_loader(
            config,
            kind=kind,
            split="validation",
            global_batch_size=8,
            micro_batch_size=2,
            data_rank=rank,
            data_size=4,
            one_pass=True,
        )
        for rank in range(4)
    ]
    batches = [list(loader) for loader in loaders]
    assert [len(each) for each in batches] == [4] * 4
    numbers = torch.cat([batch.examples for each in batches for batch in each])
    assert sorted(set(numbers[numbers >= 0].tolist())) == list(range(31))
    if kind is ClassTexts:
        assert sorted(numbers.tolist()) == [-1, *range(31)]
        labels = torch.cat([batch.labels for each in batches for batch in each])
        assert (labels[numbers < 0] == -100).all()
    assert sum(batch.n_tokens for each in batches for batch in each) == sum(
        len(document.ids) for n in range(31) for document in loaders[0].facts.examples[n].documents
    )


def test_batches_move_with_all_they_hold(data):
    path = data().examples.train
    config = data(examples=ExamplesConfig(train=path, tokenizer=data().examples.tokenizer, columns={"pair": "text"}))
    batch = next(iter(build_loader(config, kind=ClassTexts, global_batch_size=4, micro_batch_size=4)))
    moved = batch.to("meta")
    assert moved.extra["token_type_ids"].device.type == "meta"
    assert moved.examples.device.type == "meta"
    assert batch.extra["token_type_ids"].shape == batch.inputs.shape


def test_there_is_one_kind_of_data(data):
    with pytest.raises(ValueError, match=r"data.path and data.examples.train are both given"):
        data(path="datasets/other")
