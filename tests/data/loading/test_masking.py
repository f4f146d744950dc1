import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from failures import each

from matmix.data.loading.masking import IGNORED, DiffusionMasking, Masker, MaskingConfig, Stretch
from matmix.data.rng import DOCUMENTS, MASKS, generator

MASK, SPECIAL, VOCAB = 6, list(range(7)), 200
ORDINARY = np.array([i for i in range(7, VOCAB) if i % 10])  # every tenth id is unused


def masker(seed=0, mask_id=MASK, ordinary=ORDINARY, **config) -> Masker:
    tokenizer = SimpleNamespace(
        special={"mask": mask_id}, silent_ids=SPECIAL, ordinary_ids=lambda: ordinary, vocab_size=VOCAB
    )
    return Masker(MaskingConfig(**config), tokenizer, seed)


def tokens(rows=64, seqlen=512) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (rows, seqlen))


def apply(masker, tokens, epoch=0, first=0, counts=None):
    rows = len(tokens)
    counts = np.full(rows, tokens.shape[1]) if counts is None else counts
    return masker.apply(
        tokens, [Stretch((row, slice(count)), epoch, first + row) for row, count in enumerate(counts.tolist())]
    )


@pytest.mark.parametrize(("probability", "mask_share", "random_share"), [(0.3, 0.8, 0.1), (0.15, 0.5, 0.25)])
def test_shares(probability, mask_share, random_share):
    original = tokens()
    seen, labels = apply(masker(probability=probability, mask_share=mask_share, random_share=random_share), original)
    chosen = labels != IGNORED
    ordinary = original >= len(SPECIAL)
    assert not (chosen & ~ordinary).any()
    assert np.array_equal(labels[chosen], original[chosen])
    assert np.array_equal(seen[~chosen], original[~chosen])
    assert chosen.sum() / ordinary.sum() == pytest.approx(probability, abs=0.01)
    masked = (seen[chosen] == MASK).mean()
    assert masked == pytest.approx(mask_share, abs=0.02)
    changed = chosen & (seen != MASK) & (seen != original)
    assert changed.sum() / chosen.sum() == pytest.approx(random_share, abs=0.02)
    assert np.isin(seen[changed], ORDINARY).all()
    # With some 900 draws or more from 174 ids, all but a few of them come up.
    assert len(np.unique(seen[changed])) > 0.95 * len(ORDINARY)


def test_only_the_name_of_a_sample_matters():
    original = tokens(8, 100)
    seen, labels = apply(masker(), original)
    for start in (0, 1, 34, 99):  # a part of it is masked as it is in the whole
        alone = masker().apply(original[5, start:], [Stretch(slice(None), 0, 5, start)])
        assert np.array_equal(alone, [seen[5, start:], labels[5, start:]])
    for other in (
        apply(masker(seed=1), original),
        apply(masker(), original, epoch=1),
        apply(masker(), original, first=8),
    ):
        assert not np.array_equal(other[1], labels)


def runs(labels, begins=()) -> list[tuple[int, int]]:
    """The runs of chosen tokens of one row, ended by the borders of documents."""
    chosen = np.append(labels != IGNORED, False)
    edges = sorted({0, *begins, len(labels)} | set((np.flatnonzero(chosen[1:] != chosen[:-1]) + 1).tolist()))
    return [(first, end) for first, end in itertools.pairwise(edges) if chosen[first]]


def spans_of(masker, rows=200, length=500, begins=(), start=0):
    """What is seen and the labels of rows of ordinary tokens, or of them from a token on."""
    original = np.random.default_rng(1).choice(ORDINARY, (rows, length))[:, start:]
    return original, *masker.apply(
        original, [Stretch((row, slice(None)), 2, row, start, begins) for row in range(rows)]
    )


@each("lengths, share", [("fixed", 0.15), ("fixed", 0.5), ("geometric", 0.15)])
def test_spans(lengths, share):
    """Spans of fixed length have it unless a document's border cuts them; all tokens are chosen equally often, those at
    the borders too, and what a span becomes is decided once."""
    begins = (7, 8, 40, 300)
    own = masker(probability=share, span=16, span_lengths=lengths, mask_share=0.5, random_share=0.25)
    original, seen, labels = spans_of(own, rows=500, begins=begins)
    lengths_found, borders = [], {0, *begins, 500}
    for number in range(500):
        for first, end in runs(labels[number], begins):
            inside = original[number, first:end], seen[number, first:end]
            hidden, kept = inside[1] == MASK, inside[1] == inside[0]
            assert hidden.all() or kept.all() or not (hidden.any() or kept.mean() > 0.5)
            if not borders & {first, end}:
                lengths_found.append(end - first)
    chosen = labels != IGNORED
    # Neighbours are chosen together: the 250,000 tokens lie in some 2,500 spans or more.
    assert chosen.sum() == pytest.approx(share * chosen.size, rel=0.05)
    for places in ([0], [7], [8, 9], range(20, 40), [299], [300], [499]):
        assert chosen[:, list(places)].sum() == pytest.approx(share * 500 * len(places), abs=45 * len(places))
    if lengths == "fixed":
        assert set(lengths_found) == {16}
    else:
        assert len(set(lengths_found)) > 40
        assert sum(lengths_found) == pytest.approx(16 * len(lengths_found), rel=0.1)


def test_spans_do_not_depend_on_how_a_row_is_cut():
    own, begins = masker(span=8), (100, 230)
    _, seen, labels = spans_of(own, begins=begins)
    for start in (1, 99, 104, 233):
        _, seen_there, labels_there = spans_of(masker(span=8), begins=begins, start=start)
        assert np.array_equal(seen_there, seen[:, start:])
        assert np.array_equal(labels_there, labels[:, start:])
    _, _, without = spans_of(own)
    assert np.array_equal(without[:, :100], labels[:, :100])
    assert not np.array_equal(without[:, 100:], labels[:, 100:])


def test_padding_is_never_chosen():
    original = np.full((4, 50), 30)
    _, labels = apply(masker(probability=1.0), original, counts=np.array([50, 10, 1, 0]))
    assert ((labels != IGNORED).sum(axis=1) == [50, 10, 1, 0]).all()
    assert (labels[1, 10:] == IGNORED).all()


def test_samples_of_diffusion_have_rates_of_their_own():
    """Spread evenly over any samples that follow each other, the same for the same seed and number."""
    config = DiffusionMasking(least=0.01)
    rates = np.array([[config.rate(seed, 1000 + n) for n in range(200)] for seed in (0, 1)])
    assert (rates[0] != rates[1]).all()
    for some in (rates[0], rates[1], rates[0, 30:50]):
        evenly = np.clip((np.arange(len(some)) + 0.5) / len(some), 0.01, 1)
        assert np.abs(np.sort(some) - evenly).max() < 1.5 / len(some)
    assert DiffusionMasking(least=0.9).rate(0, 0) >= 0.9
    original, own = tokens(200, 200), masker()
    own.config, counts = config, np.full(200, 200)
    counts[7] = 20
    stretches = [Stretch((row, slice(count)), 0, 1000 + row) for row, count in enumerate(counts.tolist())]
    (seen, labels), weights = own.apply(original, stretches), own.weights(original, stretches)
    ordinary = (original >= len(SPECIAL)) & (np.arange(200) < counts[:, None])
    assert np.array_equal(weights > 0, ordinary)
    assert weights[ordinary] == pytest.approx(np.repeat(1 / rates[0], ordinary.sum(1)))
    assert (seen[labels != IGNORED] == MASK).all()
    assert np.abs((labels != IGNORED).sum(1) / ordinary.sum(1) - rates[0]).max() < 0.3
    assert weights[labels != IGNORED].sum() == pytest.approx(ordinary.sum(), rel=0.05)


def test_the_original_is_left_alone():
    original = tokens(2, 50)
    before = original.copy()
    apply(masker(probability=1.0), original)
    assert np.array_equal(original, before)


def test_generators_of_different_items_differ():
    draws = {
        tuple(generator(seed, epoch, purpose, item).integers(1 << 62, size=2).tolist())
        for seed in (0, 1, -1, 2**63)
        for epoch in (0, 1)
        for purpose in (DOCUMENTS, MASKS)
        for item in (0, 1, 2**40)
    }
    assert len(draws) == 4 * 2 * 2 * 3


@each(
    "config, message",
    [
        ({"probability": 0.0}, "probability must be above 0"),
        ({"probability": 1.5}, "at most 1, got 1.5"),
        ({"mask_share": -0.1}, "mask_share must be between 0 and 1"),
        ({"mask_share": 0.8, "random_share": 0.3}, r"must be at most 1, got 0.8 \+ 0.3"),
        ({"span": 0}, "span must be at least 1, got 0"),
        ({"span_lengths": "uniform"}, "span_lengths must be one of fixed, geometric"),
        ({"span": 4, "probability": 0.81}, "at most 4/5 of the tokens; lower it"),
    ],
)
def test_config_errors(config, message):
    with pytest.raises(ValueError, match=message):
        MaskingConfig(**config)


@pytest.mark.parametrize(
    ("mask_id", "ordinary", "message"),
    [
        (VOCAB, ORDINARY, "outside the vocabulary"),
        (MASK, ORDINARY[:0], "ordinary"),
    ],
)
def test_vocabulary_errors(mask_id, ordinary, message):
    with pytest.raises(ValueError, match=message):
        masker(mask_id=mask_id, ordinary=ordinary)
