"""The loader's promise: one sequence of global batches, whatever reads it."""

import gc
import hashlib
import itertools
import json
import os
import pickle
import shutil
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from failures import each
from nightly import nightly

from matmix.benchmarks.__main__ import main as benchmark
from matmix.data.config import DataConfig
from matmix.data.loading.batch import SMALL, Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.data.modalities import build_loader
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig

GLOBAL = 16


def loader_of(path, *, workers=0, micro=4, world=1, rank=0, total=GLOBAL, **options) -> Loader:
    arguments = ("split", "seed", "masking", "one_pass", "tokenizer_sha256")
    given = {name: options.pop(name) for name in arguments if name in options}
    where = {} if path is None else {"path": str(path)}
    config = DataConfig(**{"seqlen": 24, "workers": workers, "shuffle_block": 2, **where, **options})
    return build_loader(
        config, global_batch_size=total, micro_batch_size=micro, data_rank=rank, data_size=world, **given
    )


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def digest(batches: list[Batch]) -> str:
    """Hash of a global batch, from its micro-batches in order of ranks: rows, labels, borders."""
    content = hashlib.sha256()
    for name in ("input_ids", "labels", "attention_mask"):
        parts = [getattr(b, name) for b in batches]
        if parts[0] is not None:
            content.update(torch.cat(parts).numpy().tobytes())
    if batches[0].cu_seqlens is not None:
        offset = 0
        for batch in batches:
            content.update((batch.cu_seqlens[:-1] + offset).numpy().tobytes())
            offset += batch.input_ids.numel()
    return content.hexdigest()


def global_digests(loaders: list[Loader], count: int) -> list[str]:
    """Hashes of the next `count` global batches of loaders that are the ranks of one run."""
    per_rank = [take(loader, count * loader.micro_batches_per_step) for loader in loaders]
    steps = loaders[0].micro_batches_per_step
    return [digest([b for rank in per_rank for b in rank[i * steps : (i + 1) * steps]]) for i in range(count)]


def ranks(path, world: int, **options) -> list[Loader]:
    return [loader_of(path, world=world, rank=rank, **options) for rank in range(world)]


KINDS = {
    "causal": {},
    "masked": {"masking": MaskingConfig(), "prefix": "cls", "suffix": "sep"},
    "documents": {"packing": "document"},
    "masked documents": {"packing": "document", "masking": MaskingConfig(), "prefix": "cls", "suffix": "sep"},
}


@pytest.mark.parametrize("kind", [nightly("causal"), "masked documents"])
def test_global_batches_do_not_depend_on_ranks_or_workers(any_format, small, kind):
    options = KINDS[kind]
    count = 8
    expected = global_digests([loader_of(small, **options)], count)  # beyond one epoch, from plain MDS
    assert len(set(expected)) == count
    for world, workers, micro in [(1, 1, 16), (1, 2, 2), (2, 0, 4), (2, 1, 1), (4, 0, 4), (4, 2, 2)]:
        loaders = ranks(any_format, world, workers=workers, micro=micro, **options)
        assert global_digests(loaders, count) == expected, (world, workers, micro)


@each("kind", KINDS)
def test_resume_in_the_middle_of_an_epoch(any_format, kind):
    options = KINDS[kind]
    whole = global_digests([loader_of(any_format, **options)], 7)
    first = ranks(any_format, 2, workers=1, **options)
    assert global_digests(first, 3) == whole[:3]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert states[0] == states[1]
    assert states[0]["samples"] == 3 * GLOBAL
    for world, workers, micro in [(2, 1, 4), (1, 2, 8), (4, 0, 1)]:
        resumed = ranks(any_format, world, workers=workers, micro=micro, **options)
        for loader in resumed:
            loader.load_state_dict(states[0])
        assert global_digests(resumed, 4) == whole[3:], (world, workers)


def test_resume_with_another_global_batch(small):
    samples = torch.cat([b.input_ids for b in take(loader_of(small, micro=16), 6)])
    before = loader_of(small, micro=16)
    take(before, 2)
    after = loader_of(small, total=8, micro=8)
    after.load_state_dict(before.state_dict())
    assert torch.equal(torch.cat([b.input_ids for b in take(after, 8)]), samples[32:])


def test_shorter_sequences_of_a_window_are_read_in_its_order(small):
    """Each token once, beyond an epoch, where sequences become longer and the batches larger on the way."""
    whole = torch.cat([b.input_ids.flatten() for b in take(loader_of(small, seqlen=24, micro=16), 9)])
    read, state = [], None
    for seqlen, total, batches in ((6, 8, 5), (12, 16, 3), (24, 4, 25)):
        loader = loader_of(small, seqlen=seqlen, window=24, total=total, micro=total)
        assert loader.samples_per_epoch < 8 * 16 * 24 // seqlen
        if state is not None:
            loader.load_state_dict(state)
        read += [b.input_ids.flatten() for b in take(loader, batches)]
        state = loader.state_dict()
    # 40 rows of 6 are 10 windows, 48 of 12 are 24 more.
    assert torch.equal(torch.cat(read), whole[: (10 + 24 + 100) * 24])
    with pytest.raises(ValueError, match="belongs to other data: seqlen was 24 and is now 12"):
        loader_of(small, seqlen=12).load_state_dict(loader_of(small, seqlen=24).state_dict())


def test_only_whole_global_batches_count_as_used(small):
    loader = loader_of(small, workers=2, micro=4)
    batches = iter(loader)
    used = []
    for _ in range(9):
        next(batches)
        used.append(loader.state_dict()["samples"])
    assert used == [0, 0, 0, 16, 16, 16, 16, 32, 32]
    # A new iteration begins with the first global batch that was not handed out in full.
    again = loader_of(small)
    take(again, 8)
    assert torch.equal(next(iter(loader)).input_ids, next(iter(again)).input_ids)


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_started_in_other_ways(small, data, tmp_path, start):
    options = {"masking": MaskingConfig(), "micro": 8}
    expected = global_digests([loader_of(small, **options)], 3)
    path = data.write(tmp_path / "data", data.documents(43), format="webdataset", compression="zstd")
    loader = loader_of(path, workers=1, worker_start=start, **options)
    assert global_digests([loader], 3) == expected
    loader.close()


def test_workers_live_on_between_iterations(small):
    loader = loader_of(small, workers=1, split="validation", one_pass=True)
    first = digest(list(loader))
    workers = [w.pid for w in loader._readers["torch"]._iterator._workers]
    assert digest(list(loader)) == first
    assert [w.pid for w in loader._readers["torch"]._iterator._workers] == workers
    loader.close()
    assert digest(list(loader)) == first


def test_workers_end_when_the_garbage_collector_finds_them(small):
    loader = loader_of(small, workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = loader._readers["torch"]._iterator._workers
    cycle = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()
    assert not worker.is_alive()
    assert worker.exitcode == 0  # it was asked to end, not killed after a wait


def test_seed_and_epoch_change_the_order(small):
    loader = loader_of(small, micro=1, total=1)
    epochs = [torch.cat([b.input_ids for b in take(loader, loader.samples_per_epoch)]) for _ in range(2)]
    other = loader_of(small, micro=1, total=1, seed=1)
    epochs.append(torch.cat([b.input_ids for b in take(other, loader.samples_per_epoch)]))
    rows = [sorted(map(tuple, e.tolist())) for e in epochs]
    assert rows[0] != rows[1] != rows[2] != rows[0]
    assert loader.state_dict()["samples"] == 2 * loader.samples_per_epoch


# -- what is in a batch


def test_causal_batches(small, data):
    eos = data.special("eos")
    for batch in take(loader_of(small), 20):
        assert batch.input_ids.shape == batch.labels.shape == (4, 24)
        assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
        assert batch.attention_mask is batch.select is None
        assert batch.n_tokens == 96
        borders = batch.cu_seqlens
        assert borders.dtype == torch.int32
        assert borders[0] == 0
        assert borders[-1] == 96
        assert (sizes := borders.diff()).min() > 0
        assert batch.max_seqlen == sizes.max()
        ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
        known = labels != -100
        assert torch.equal(known, ids != eos)  # nothing predicts over the border of a document
        inner = torch.ones(96, dtype=torch.bool)
        inner[borders[1:].long() - 1] = False
        assert torch.equal(ids[1:][inner[:-1]], labels[:-1][inner[:-1]])
        starts = borders[:-1].long()
        starts = starts[starts % 24 != 0]
        assert (ids[starts - 1] == eos).all()


def test_the_target_of_the_last_position_is_the_next_token(small):
    loader = loader_of(small, shuffle=False, micro=16)
    (batch,) = take(loader, 1)
    following = batch.input_ids[1:, 0]
    last = batch.labels[:-1, -1]
    assert torch.equal(last[last != -100], following[last != -100])
    assert (last != -100).sum() > 10


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_masked_batches(small, data, packing):
    options = {"prefix": "cls", "suffix": "sep", "packing": packing}
    loader = loader_of(small, masking=MaskingConfig(), shuffle=False, micro=16, **options)
    plain = loader_of(
        small, masking=MaskingConfig(mask_share=0.0, random_share=0.0), shuffle=False, micro=16, **options
    )
    for batch, original in zip(take(loader, 4), take(plain, 4), strict=True):
        chosen = batch.labels != -100
        assert torch.equal(batch.select, chosen.flatten().nonzero().flatten())
        assert torch.equal(batch.labels[chosen], original.input_ids[chosen])
        assert torch.equal(batch.labels, original.labels)
        assert (original.input_ids[chosen] >= data.first_word).all()
        assert (batch.input_ids[chosen] == data.special("mask")).float().mean() > 0.6
        assert torch.equal(batch.input_ids[~chosen], original.input_ids[~chosen])


@pytest.mark.parametrize("masking", [None, MaskingConfig()])
def test_rows_are_those_of_concat_without_borders(small, masking):
    one, other = (take(loader_of(small, masking=masking, packing=packing), 5) for packing in ("rows", "concat"))
    for rows, concat in zip(one, other, strict=True):
        assert rows.cu_seqlens is None
        assert rows.attention_mask is None
        assert rows.max_seqlen == rows.input_ids.shape[1]
        assert rows.n_tokens == concat.n_tokens
        assert torch.equal(rows.input_ids, concat.input_ids)
        assert torch.equal(rows.labels, concat.labels)


def test_document_batches(small, data):
    cls, sep, pad = (data.special(n) for n in ("cls", "sep", "pad"))
    loader = loader_of(
        small,
        packing="document",
        prefix="cls",
        suffix="sep",
        masking=MaskingConfig(mask_share=0.0),
        shuffle=False,
    )
    documents = [d.tolist() for d in data.documents(43)]
    for step, batch in enumerate(take(loader, 10)):
        assert batch.cu_seqlens is None
        assert batch.attention_mask.dtype == torch.bool
        counts = batch.attention_mask.sum(dim=1)
        assert batch.n_tokens == counts.sum()
        assert batch.max_seqlen == counts.max()
        for row in range(4):
            text = documents[4 * step + row][:22]
            ids = torch.where(batch.labels[row] == -100, batch.input_ids[row], batch.labels[row]).tolist()
            assert ids == [cls, *text, sep] + [pad] * (22 - len(text))
            assert counts[row] == len(text) + 2
            assert batch.attention_mask[row, : counts[row]].all()


def test_moving_a_batch(small):
    for options in KINDS.values():
        (batch,) = take(loader_of(small, **options), 1)
        moved = batch.to("meta", non_blocking=True)
        for name in ("input_ids", "labels", "cu_seqlens", "attention_mask", "select"):
            before, after = getattr(batch, name), getattr(moved, name)
            assert (before is None) == (after is None)
            assert after is None or (after.device.type == "meta" and after.shape == before.shape)
        assert (moved.n_tokens, moved.max_seqlen) == (batch.n_tokens, batch.max_seqlen)


# -- reading once over


@each("world", [1, 2, 4])
@each("kind", KINDS)
def test_one_pass_counts_every_token_once(small, data, world, kind):
    options = KINDS[kind]
    loaders = ranks(small, world, micro=2, split="train", one_pass=True, **options)
    batches = [list(loader) for loader in loaders]
    assert {len(b) for b in batches} == {-(-loaders[0].samples_per_epoch // GLOBAL) * loaders[0].micro_batches_per_step}
    flat = [b for rank in batches for b in rank]
    documents = [d.tolist() for d in data.documents(43)]
    if kind == "causal":  # eos after each document: as many targets as tokens of text
        assert sum(int((b.labels != -100).sum()) for b in flat) == sum(map(len, documents))
        assert sum(b.n_tokens for b in flat) == sum(len(d) + 1 for d in documents)
    elif kind == "masked":
        assert sum(b.n_tokens for b in flat) == sum(len(d) + 2 for d in documents)
    elif kind == "documents":
        assert sum(b.n_tokens for b in flat) == sum(min(len(d) + 1, 24) for d in documents)
    else:
        assert sum(b.n_tokens for b in flat) == sum(min(len(d) + 2, 24) for d in documents)
    for batch in flat:  # rows that only fill up carry no labels, and no document is empty
        if batch.cu_seqlens is not None:
            assert batch.cu_seqlens.diff().min() > 0
            assert batch.cu_seqlens[-1] == batch.input_ids.numel()
        else:
            assert batch.attention_mask.any(dim=1).all()
            assert (batch.labels[~batch.attention_mask] == -100).all()
    # The same rows for any number of ranks, and again for a second pass.
    assert [digest([b]) for b in batches[0]] == [digest([b]) for b in loaders[0]]


def test_one_pass_is_in_order_and_complete(small, data):
    loader = loader_of(small, one_pass=True, seed=5)
    ids = torch.cat([b.input_ids.flatten() for b in loader]).tolist()
    eos = data.special("eos")
    expected = [t for d in data.documents(43) for t in [*d.tolist(), eos]]
    assert ids[: len(expected)] == expected
    assert set(ids[len(expected) :]) == {data.special("pad")}


def test_one_pass_can_be_resumed(small):
    options = {"one_pass": True, "masking": MaskingConfig()}
    whole = [digest([b]) for b in loader_of(small, **options)]
    first = loader_of(small, **options)
    take(first, 8)
    second = loader_of(small, **options)
    second.load_state_dict(first.state_dict())
    assert [digest([b]) for b in second] == whole[8:]
    assert [digest([b]) for b in second] == whole


def test_validation_comes_from_its_own_path(small, data, tmp_path):
    own = data.write(tmp_path / "own", data.documents(3), validation=data.documents(9, seed=8))
    loader = loader_of(small, validation_path=str(own), split="validation", one_pass=True)
    expected = loader_of(own, split="validation", one_pass=True)
    assert digest(list(loader)) == digest(list(expected))
    assert loader_of(small, validation_path=str(own)).fingerprint == loader_of(small).fingerprint


# -- from text to batches


@pytest.mark.parametrize(("kind", "compression"), [("mds", "zstd"), ("webdataset", "none")])
def test_prepared_text_comes_back(tmp_path, kind, compression):
    words = ["matrix", "mixing", "of", "long", "sequences", "in", "one", "pass", "Ünïcode", "🙂"]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, rng.integers(1, 60))) for _ in range(200)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = PrepareConfig(
        inputs=(str(tmp_path / "in.jsonl"),),
        out=str(tmp_path / "out"),
        vocab_size=320,
        format=kind,
        compression=compression,
        shard_megabytes=0.005,
        validation_fraction=0.1,
        processes=1,
    )
    prepare(options)
    found, text_bytes, text_tokens = [], 0, 0
    for split in ("train", "validation"):
        loader = loader_of(tmp_path / "out", split=split, one_pass=True, workers=1, seqlen=50)
        assert loader.dataset.packings[0].shards.n_shards > (split == "train")
        ids = np.concatenate([b.input_ids.flatten().numpy() for b in loader])
        *documents, padding = np.split(ids, np.flatnonzero(ids == loader.facts.tokenizer.special["eos"]) + 1)
        assert (padding == loader.facts.tokenizer.special["pad"]).all()
        found += [loader.facts.tokenizer.decode(document[:-1]) for document in documents]
        tokens = sum(len(document) - 1 for document in documents)
        text_bytes += loader.facts.bytes_per_target * tokens
        text_tokens += tokens
        assert loader.facts.token_histogram.sum() == (text_tokens if split == "train" else text_tokens - tokens)
    assert sorted(found) == sorted(texts)
    assert text_bytes == pytest.approx(sum(len(text.encode()) for text in texts))
    masked = loader_of(tmp_path / "out", masking=MaskingConfig(), prefix="cls", suffix="sep")
    assert all((b.input_ids == loader.facts.tokenizer.special["mask"]).any() for b in take(masked, 5))


# -- mixtures


@pytest.fixture
def mixture(small, data, tmp_path) -> dict[str, float]:
    """Two datasets whose tokens differ: ids of the second lie in the upper half of the vocabulary."""
    upper = [d // 2 + 48 for d in data.documents(30, seed=4)]
    other = data.write(tmp_path / "other", upper, format="webdataset", compression="zstd")
    return {str(small): 3.0, str(other): 1.0}


def test_mixture_has_the_wanted_shares_and_survives_everything(mixture):
    expected = global_digests([loader_of(None, mixture=mixture)], 6)
    for world, workers in [(2, 1), (4, 0)]:
        assert global_digests(ranks(None, world, mixture=mixture, workers=workers), 6) == expected
    first = loader_of(None, mixture=mixture)
    take(first, 8)
    resumed = ranks(None, 2, mixture=mixture)
    for loader in resumed:
        loader.load_state_dict(first.state_dict())
    assert global_digests(resumed, 4) == expected[2:]
    dataset, _, _ = first.dataset.mixture.locate(np.arange(1600))
    assert (dataset == 1).sum() == 400
    for batch in take(first, 8):  # 4 sequences: one of them from the second dataset
        upper = ((batch.input_ids >= 51) | (batch.input_ids < 7)).all(dim=1)
        assert upper.sum() == 1


def test_mixture_read_once_over(mixture):
    parts = [loader_of(path, one_pass=True, micro=1, total=1) for path in mixture]
    whole = loader_of(None, mixture=mixture, one_pass=True, micro=1, total=1)
    assert [digest([b]) for b in whole] == [digest([b]) for part in parts for b in part]
    assert whole.samples_per_epoch == sum(p.samples_per_epoch for p in parts)


# -- what the loader tells


@each("prefix", ["none", "bos"])
@each("suffix", ["none", "eos"])
def test_targets_of_a_causal_pass_times_bytes_a_target_are_the_bytes_of_the_text(small, prefix, suffix):
    loader = loader_of(small, one_pass=True, prefix=prefix, suffix=suffix)
    targets = sum(int((batch.labels != IGNORED).sum()) for batch in loader)
    assert targets * loader.facts.bytes_per_target == pytest.approx(loader.facts.shards[0].info.bytes)


def test_facts(small, data):
    loader = loader_of(small)
    documents = data.documents(43)
    tokens = sum(map(len, documents))
    assert loader.samples_per_epoch == (tokens + 43 - 1) // 24
    assert loader.facts.vocab_size == loader.facts.tokenizer.vocab_size == data.vocab_size
    assert loader.facts.bytes_per_target == 3.0
    histogram = np.bincount(np.concatenate(documents), minlength=data.vocab_size)
    assert np.array_equal(loader.facts.token_histogram, histogram)


# -- bad input


def one_line(error) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 400


@each(
    "options, message",
    [
        ({"total": 10, "micro": 4}, "a multiple of 4, the nearest are 8 or 12"),
        ({"total": 12, "micro": 4, "world": 2}, "a multiple of 8, the nearest are 8 or 16"),
        ({"total": 2, "micro": 4}, "the nearest are 4"),
        ({"total": 0}, "global batch must hold at least 1 sequence, got 0"),
        ({"micro": 0}, "micro-batch must hold at least 1 sequence, got 0"),
        ({"seqlen": 5000}, "fewer than the 5001 of one sequence .data.seqlen = 5000."),
        ({"seqlen": 5000, "masking": MaskingConfig()}, "fewer than the 5000 of one"),
        ({"tokenizer_sha256": "a" * 64}, "prepared with another tokenizer"),
        ({"split": "test"}, "has no split 'test'"),
    ],
)
def test_refused(small, options, message):
    with pytest.raises(ValueError, match=message) as error:
        loader_of(small, **options)
    assert one_line(error)


@each(
    "options, message",
    [
        ({"seqlen": 0}, r"data\.seqlen must be at least 1, got 0"),
        ({"workers": -1}, r"data\.workers must be 0 or more, got -1"),
        ({"mixture": {"a": 0.0}}, "weight of a must be a positive number, got 0.0"),
        ({"mixture": {"a": 1.0, "b": -2}}, "weight of b must be a positive number, got -2"),
        ({"mixture": {"a": float("nan")}}, "weight of a must be a positive number, got nan"),
        ({"mixture": {"a": 1.0}, "path": "b"}, "both given"),
        ({"packing": "best-fit"}, "must be one of concat, document, rows, got 'best-fit'"),
        ({"suffix": "bos"}, "must be one of none, eos, sep, got 'bos'"),
    ],
)
def test_config_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_no_data_given():
    with pytest.raises(ValueError, match=r"no data given: set data.path"):
        loader_of(None)
    with pytest.raises(FileNotFoundError, match="data path nowhere does not exist"):
        loader_of("nowhere")


def test_tokenizer_without_the_special_tokens(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(20), without=("mask", "bos", "eos"))
    loader_of(path, suffix="none")
    for options, message in [
        ({}, "data.suffix = 'eos', but the tokenizer of .* has no eos token"),
        ({"suffix": "none", "prefix": "bos"}, "data.prefix = 'bos', but"),
        (
            {"suffix": "sep", "masking": MaskingConfig()},
            "need a mask token, and the tokenizer of .* has none",
        ),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            loader_of(path, **options)
        assert one_line(error)


def test_mixture_of_different_tokenizers(small, data, tmp_path):
    other = data.write(tmp_path / "other", data.documents(20), vocab_size=data.vocab_size + 1)
    with pytest.raises(ValueError, match="need one tokenizer"):
        loader_of(None, mixture={str(small): 1.0, str(other): 1.0})


def test_one_token_is_not_enough(data, tmp_path):
    path = data.write(tmp_path / "data", data.documents(1), validation=data.documents(1))
    with pytest.raises(ValueError, match=r"holds 1 tokens .*, fewer than the 2 of one sequence"):
        loader_of(path, split="validation", one_pass=True, suffix="none")
    (batch,) = loader_of(path, split="validation", one_pass=True, micro=1, total=1)
    assert int((batch.labels != -100).sum()) == 1


@each(
    "change, key",
    [
        ({"seqlen": 25}, "seqlen"),
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"suffix": "sep"}, "suffix"),
    ],
)
def test_state_of_other_settings(small, change, key):
    state = loader_of(small).state_dict()
    with pytest.raises(ValueError, match=f"belongs to other data: {key} was .* and is now") as error:
        loader_of(small, **change).load_state_dict(state)
    assert one_line(error)


def test_state_of_other_data(small, data, tmp_path):
    state = loader_of(small).state_dict()
    other = data.write(tmp_path / "other", data.documents(43, seed=1))
    with pytest.raises(ValueError, match="belongs to other data: data was"):
        loader_of(other).load_state_dict(state)
    moved = shutil.copytree(small, tmp_path / "moved")
    loader_of(moved).load_state_dict(state)
    for damaged in ({}, {"samples": 3}, {"samples": -1, "fingerprint": state["fingerprint"]}):
        with pytest.raises(ValueError, match="saved data position is damaged"):
            loader_of(small).load_state_dict(damaged)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_reading_processes_are_one_line(small, tmp_path, workers):
    path = shutil.copytree(small, tmp_path / "data")
    loader = loader_of(path, workers=workers)
    shard = path / "train" / "shard.00003.mds"
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(ValueError, match=r"shard train/shard.00003.mds has another SHA-256") as error:
        take(loader, 200)
    assert one_line(error)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard train/shard.00003.mds is missing") as error:
        take(loader_of_again(loader), 200)
    assert one_line(error)


def loader_of_again(loader: Loader) -> Loader:
    loader.close()
    return loader


# -- speed


def test_more_reading_processes_than_cores_are_nothing_to_warn_of(small, monkeypatch, recwarn):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    take(loader_of(small, workers=2), 1)
    assert not [str(warning.message) for warning in recwarn]


def test_memory_is_pinned_only_for_cuda(small, monkeypatch):
    assert not loader_of(small)._make_loader().pin_memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader_of(small)._make_loader().pin_memory
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (batch,) = take(loader_of(small, masking=MaskingConfig()), 1)
    assert isinstance(batch.pin_memory(), Batch)
    assert len(pinned) == 4  # input_ids, labels, cu_seqlens, select


def test_benchmark(small, capsys):
    assert benchmark(["reading", str(small), "--seconds", "0.2", "--data.seqlen", "24", "--masked"]) == 0
    rate = float(capsys.readouterr().out.split(" tokens/s with 1 worker(s)")[0].replace(",", ""))
    assert rate > 100


def test_batches_reach_the_training_process_with_the_same_bits() -> None:
    wide = torch.arange(SMALL // 4, dtype=torch.int64).view(2, -1)  # goes by shared memory
    documents = torch.tensor([0, 5], dtype=torch.int32)
    batch = Batch(wide, torch.ones(2, 3), cu_seqlens=documents, extra={"view": wide[:, :3]})
    taken = pickle.loads(ForkingPickler.dumps(batch))
    views = batch.extra["view"], taken.extra["view"]
    for sent, got in ((batch.inputs, taken.inputs), (batch.labels, taken.labels), views):
        assert sent.dtype == got.dtype
        assert torch.equal(sent, got)
    assert torch.equal(batch.cu_seqlens, taken.cu_seqlens)
    assert taken.attention_mask is None
    assert taken.inputs.is_shared()
    assert not taken.labels.is_shared()
    taken.labels += 1  # and can be written to
