"""Reverse complements as augmentation: what is turned, what stays, and what it depends on."""

import itertools

import numpy as np
import pytest
import tokenizers
from failures import each

from matmix.data.config import DataConfig
from matmix.data.loading.masking import MaskingConfig
from matmix.data.loading.strands import Strands
from matmix.data.modalities import build_loader
from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.data.tokenizer import Tokenizer

COMPLEMENT = str.maketrans("ACGTacgt", "TGCAtgca")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("dna"), np.random.default_rng(2)
    sequences = ("".join(rng.choice(list("ACGTNacgtn"), length)) for length in (1, 2, *rng.integers(3, 40, 60)))
    (folder / "a.fa").write_text("".join(f">{n}\n{letters}\n" for n, letters in enumerate(sequences)))
    options = {"tokenizer": "dna-cased", "validation_fraction": 0.2, "processes": 1}
    prepare(PrepareConfig(inputs=(str(folder / "a.fa"),), out=str(folder / "out"), **options), summary=False)
    return str(folder / "out")


def batches(dataset, count=8, *, world=1, rank=0, masking=None, one_pass=False, **options):
    options = {"packing": "document", "prefix": "bos", "workers": 0, **options}
    config = DataConfig(path=dataset, seqlen=44, **options)
    given = {"masking": masking, "one_pass": one_pass, "seed": 7, "split": "validation" if one_pass else "train"}
    loader = build_loader(
        config, global_batch_size=8, micro_batch_size=8 // world, data_rank=rank, data_size=world, **given
    )
    return list(itertools.islice(loader, count))


def rows_of(dataset, **options):
    found = batches(dataset, **options)
    return np.concatenate([batch.input_ids.numpy() for batch in found])


def turned(tokenizer, ids):
    """The row of a document, with its special tokens, read from the other strand."""
    return ids[:1] + tokenizer.encode(tokenizer.decode(ids)[::-1].translate(COMPLEMENT)) + ids[-1:]


def test_each_document_is_turned_within_its_special_tokens(dataset):
    tokenizer = Tokenizer.load(dataset)
    plain, other = rows_of(dataset), rows_of(dataset, reverse_complement=1.0)
    pad = tokenizer.special["pad"]
    for row, twin in zip(plain.tolist(), other.tolist(), strict=True):
        ids, padding = [i for i in row if i != pad], [i for i in row if i == pad]
        assert twin == turned(tokenizer, ids) + padding
    assert (rows_of(dataset, one_pass=True) == rows_of(dataset, one_pass=True, reverse_complement=1.0)).all()


def test_which_documents_are_turned_depends_on_the_sample_alone(dataset):
    options = {"count": 32, "reverse_complement": 0.5}
    plain, half, again = rows_of(dataset, count=32), rows_of(dataset, **options), rows_of(dataset, **options)
    assert (half == again).all()
    changed = (plain != half).any(1)
    assert 0.35 < changed.mean() < 0.6  # a few documents are their own reverse complements
    ranks = [rows_of(dataset, world=2, rank=rank, **options).reshape(32, 4, -1) for rank in range(2)]
    assert (np.concatenate(ranks, 1).reshape(half.shape) == half).all()
    read = rows_of(dataset, workers=1, **options)
    assert (read == half).all()


@each("packing", ["concat", "rows"])
@each("masked", [True, False])
def test_rows_of_several_documents_keep_each_in_its_place(dataset, packing, masked):
    tokenizer = Tokenizer.load(dataset)
    masking = MaskingConfig(probability=1e-9) if masked else None
    options = {"packing": packing, "masking": masking}
    plain, other = batches(dataset, **options), batches(dataset, reverse_complement=1.0, **options)
    bos, eos = (tokenizer.special[name] for name in ("bos", "eos"))
    differ = 0
    for batch, twin in zip(plain, other, strict=True):
        a, b = batch.input_ids.numpy(), twin.input_ids.numpy()
        assert ((a == bos) == (b == bos)).all()
        assert ((a == eos) == (b == eos)).all()
        if packing == "concat":
            assert batch.cu_seqlens.tolist() == twin.cu_seqlens.tolist()
        if not masked:  # the next token is the target, in the turned row as well
            assert (twin.labels.numpy()[:, :-1][twin.labels[:, :-1] >= 0] == b[:, 1:][twin.labels[:, :-1] >= 0]).all()
        differ += (a != b).sum()
        for row, twin_row in zip(a, b, strict=True):
            inner = np.flatnonzero((row == bos) | (row == eos))
            for begin, end in itertools.pairwise(inner):  # documents that lie in the row whole
                if row[begin] == bos and row[end] == eos:
                    whole = row[begin : end + 1].tolist()
                    assert twin_row[begin : end + 1].tolist() == turned(tokenizer, whole)
    assert differ > 0


def test_what_cannot_be_turned_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.reverse_complement must be in \[0, 1\], got 1\.5"):
        DataConfig(path="data", reverse_complement=1.5)
    with pytest.raises(ValueError, match=r"data\.carry reads on from: set one of them"):
        DataConfig(path="data", reverse_complement=0.5, carry=True, shuffle=False)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "AT": 1, "A": 2, "T": 3}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"needs a tokenizer with one token for each letter, and .* --tokenizer dna"):
        Strands(0.5, Tokenizer.load(tmp_path), 0)


def test_letters_that_are_bytes_are_turned_as_well():
    strands = Strands(1.0, Tokenizer.load("bytes"), 0)
    tokens = np.frombuffer(b"AACGN-acg", np.uint8).astype(np.int64)
    strands.turn(tokens, [6], 0, 0)
    assert bytes(tokens.astype(np.uint8)) == b"-NCGTTcgt"
