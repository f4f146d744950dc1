"""Generated tasks: labels against what they mean, and the same samples whatever reads them."""

import hashlib
import itertools
import json
import math

import numpy as np
import pytest
import torch
from failures import each

from matmix.data.config import DataConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.loader import Loader
from matmix.data.loading.masking import IGNORED, MaskingConfig
from matmix.data.modalities import MODALITIES, build_loader
from matmix.data.synthetic import GENERATED, Puzzle, SyntheticConfig, make_generated
from matmix.data.synthetic.listops import evaluate
from matmix.data.synthetic.word_problems import cycles, group

GLOBAL = 8
BIDIRECTIONAL = [name for name, task in GENERATED.items() if task.bidirectional_form]


PICTURE = {"dashes": 3, "distractors": 0}
LENGTHS = {"pathfinder": 401}
"""Of tasks whose samples cannot have 24 tokens."""


def task_of(name: str, **options) -> Puzzle:
    return make_generated(SyntheticConfig(task=name, **{"symbols": 7, "items": 5, **PICTURE, **options}))


def config_of(task: str = "mqar", *, seqlen: int = 0, workers: int = 0, **options) -> DataConfig:
    given = {"symbols": 7, "items": 5, "validation_samples": 20, **PICTURE, **options}
    length = seqlen or LENGTHS.get(task, 24)
    return DataConfig(synthetic=SyntheticConfig(task=task, **given), packing="rows", seqlen=length, workers=workers)


def loader_of(config: DataConfig, *, micro: int = 4, world: int = 1, rank: int = 0, **options) -> Loader:
    sizes = {"global_batch_size": GLOBAL, "micro_batch_size": micro}
    return build_loader(config, **{**sizes, "data_size": world, "data_rank": rank, **options})


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def samples(name: str, seqlen: int, count: int = 40, *, masked: bool = False, **options):
    """(names of the tokens, names of the labels or "") of samples."""
    task = task_of(name, **options)
    names = (*task.tokens, "<unk>", "<pad>", "<mask>")
    for seed in range(count):
        ids, labels = task.sample(np.random.default_rng(seed), seqlen, len(task.tokens) + 2 if masked else None)
        yield [names[i] for i in ids], [names[i] if i != IGNORED else "" for i in labels]


# -- what the labels mean


def test_parity():
    for tokens, labels in samples("parity", 17):
        for place in range(17):
            assert labels[place] == str(tokens[: place + 1].count("1") % 2)


def moved(text: str, things: str) -> str:
    """A row of things after the cycles of `text`: "(123)" sends what stands at 1 to 2, at 2 to 3, at 3 to 1."""
    row = list(things)
    for cycle in text.strip("()").split(")("):
        for begin, end in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            row[int(end) - 1] = things[int(begin) - 1]
    return "".join(row)


@pytest.mark.parametrize(("name", "things"), [("s3", "abc"), ("a5", "abcde"), ("s5", "abcde")])
def test_word_problems_move_things(name, things):
    for tokens, labels in samples(name, 21):
        row = things
        for token, label in zip(tokens, labels, strict=True):
            row = moved(token, row)
            assert row == moved(label, things)


@pytest.mark.parametrize(("name", "order"), [("s3", 6), ("a5", 60), ("s5", 120)])
def test_groups(name, order):
    elements, table = group(GENERATED[name].degree, GENERATED[name].even)
    assert len(elements) == len(set(map(cycles, elements))) == order
    everything = np.arange(order)
    assert (table[0] == everything).all()
    assert (table[:, 0] == everything).all()
    for one in range(order):
        assert sorted(table[one]) == sorted(table[:, one]) == list(everything)
    left, right = table[table], table[:, table]  # [a, b, c]: (a b) c and a (b c)
    assert (left == right).all()
    assert (table != table.T).any()


@each("masked", [False, True])
@each("seqlen", [20, 33])
def test_recall(masked, seqlen):
    places = set()
    for tokens, labels in samples("mqar", seqlen, masked=masked):
        pairs = dict(zip(tokens[0:10:2], tokens[1:10:2], strict=True))
        assert len(pairs) == 5
        assert all(key[0] == "k" and value[0] == "v" for key, value in pairs.items())
        asked = [place for place in range(10, seqlen) if tokens[place][0] == "k"]
        assert sorted(tokens[place] for place in asked) == sorted(pairs)
        answers = {place + masked: pairs[tokens[place]] for place in asked}
        assert {place: label for place, label in enumerate(labels) if label} == answers
        rest = {tokens[place] for place in range(10, seqlen) if place not in asked}
        assert rest <= ({".", "<mask>"} if masked else {"."})
        assert [tokens[place] == "<mask>" for place in answers] == [masked] * 5
        places |= set(asked)
    assert len(places) >= min(5, (seqlen - 10) // 2)


@pytest.mark.parametrize("masked", [False, True])
def test_selective_copying(masked):
    places = set()
    for tokens, labels in samples("selective_copying", 23, masked=masked):
        assert labels[:-5] == [""] * 18
        assert [token for token in tokens[:-5] if token != "."] == labels[-5:]
        assert tokens[-5:] == (["<mask>"] if masked else [">"]) * 5
        places |= {place for place in range(18) if tokens[place] != "."}
    assert places == set(range(18))


def test_reversal():
    for tokens, labels in samples("reversal", 13):
        assert tokens[:3] == ["."] * 3
        assert len(set(tokens[3:8]) - {">", "."}) == 5
        assert labels == [""] * 8 + tokens[7:2:-1]
        assert tokens[8:] == [">", *labels[8:12]]


def by_python(tokens: list[str]) -> int:
    """The value of an expression by Python's own parser."""
    calls = {
        "[MIN": "min([",
        "[MAX": "max([",
        "[MED": "int(np.median([",
        "[SM": "(lambda v: sum(v) % 10)([",
    }
    text, open_ = "", []
    for token in tokens:
        if token in calls:
            open_.append(token)
            text += calls[token]
        else:
            text += "])" + ")" * (open_.pop() == "[MED") + "," if token == "]" else f"{token},"
    return eval(text.rstrip(","), {"np": np})


@each("masked", [False, True])
@each("seqlen, depth, arguments", [(5, 5, 5), (16, 1, 9), (40, 5, 5), (200, 3, 4)])
def test_list_operations(masked, seqlen, depth, arguments):
    longest, seen = 0, set()
    for tokens, labels in samples("listops", seqlen, depth=depth, arguments=arguments, masked=masked):
        assert labels[:-1] == [""] * (seqlen - 1)
        assert tokens[-1] == ("<mask>" if masked else "=")
        start = next(place for place, token in enumerate(tokens) if token != ".")
        expression = tokens[start:-1]
        assert labels[-1] == str(by_python(expression))
        level = np.cumsum([(token[0] == "[") - (token == "]") for token in expression])
        assert 1 <= level.max() <= depth
        assert level[-1] == 0
        longest, seen = max(longest, len(expression)), seen | set(expression)
    limit = 1
    for _ in range(depth):
        limit = 2 + arguments * limit
    assert min(limit, seqlen - 1) // 2 <= longest <= min(limit, seqlen - 1)
    assert {"[MIN", "[MAX", "[MED", "[SM"} <= seen


def test_paths():
    """Dots are as far apart where no path joins them, and whoever follows dashes over small gaps mostly finds out."""
    from scipy import ndimage

    right, apart = 0, {"apart": [], "joined": []}
    for tokens, labels in samples("pathfinder", 32 * 32 + 1, 150, distractors=2):
        assert tokens[-1] == "="
        assert labels[:-1] == [""] * 1024
        picture = np.array(tokens[:-1]).reshape(32, 32)
        dots, count = ndimage.label(picture == "o")
        assert count == 2
        assert (picture == "o").sum() == 18
        apart[labels[-1]].append(math.dist(*ndimage.center_of_mass(picture == "o", dots, [1, 2])))
        found, _ = ndimage.label(ndimage.binary_dilation(picture != "."), np.ones((3, 3)))
        right += (len(set(found[picture == "o"])) == 1) == (labels[-1] == "joined")
    assert right > 0.8 * 150
    means = [np.mean(distances) for distances in apart.values()]
    assert abs(means[0] - means[1]) < 0.5
    assert min(map(len, apart.values())) > 50


@each(
    "text, value",
    [("7", 7), ("[MED 1 2 ]", 1), ("[MED 9 1 4 ]", 4), ("[SM 9 9 9 ]", 7), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9)],
)
def test_the_parser_on_examples(text, value):
    assert evaluate(text.split()) == value


@pytest.mark.slow
@each("name", GENERATED)
def test_a_constant_guess_is_right_as_often_as_the_histogram_says(name):
    loader = loader_of(config_of(name))
    histogram = loader.facts.token_histogram
    assert histogram.shape == (loader.facts.vocab_size,)
    count = 100 if name in LENGTHS else 500
    labels = torch.cat([batch.labels[batch.labels != IGNORED] for batch in take(loader, count)])
    found = torch.bincount(labels, minlength=loader.facts.vocab_size).numpy() / len(labels)
    said = histogram / histogram.sum()
    # Six standard deviations of a share of so many answers, twice that where answers of a sample depend on one another.
    assert (np.abs(found - said) <= 12 * np.sqrt(said * (1 - said) / len(labels))).all()


# -- the same samples whatever reads them


def digests(loaders: list[Loader], count: int) -> list[str]:
    """Hashes of the next global batches of loaders that are the ranks of one run."""
    steps = loaders[0].micro_batches_per_step
    per_rank = [take(loader, count * steps) for loader in loaders]
    found = []
    for step in range(count):
        batches = [b for rank in per_rank for b in rank[step * steps : (step + 1) * steps]]
        content = torch.cat([torch.stack([b.input_ids, b.labels]) for b in batches], dim=1)
        found.append(hashlib.sha256(content.contiguous().numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("masking", [None, MaskingConfig()])
def test_global_batches_do_not_depend_on_ranks_workers_or_resuming(masking):
    expected = digests([loader_of(config_of(), masking=masking)], 6)
    assert len(set(expected)) == 6
    for world, workers, micro in [(1, 2, 2), (2, 0, 4), (4, 0, 1), (2, 1, 2)]:
        ranks = [
            loader_of(config_of(workers=workers), world=world, rank=r, micro=micro, masking=masking)
            for r in range(world)
        ]
        assert digests(ranks, 2) == expected[:2]
        state = json.loads(json.dumps(ranks[0].state_dict()))
        assert state["samples"] == 2 * GLOBAL
        later = loader_of(config_of(), micro=8, masking=masking)
        later.load_state_dict(state)
        assert digests([later], 4) == expected[2:]
        for loader in ranks:
            loader.close()


def test_splits_and_seeds_are_different_streams_and_validation_is_fixed():
    def rows(**options) -> set[bytes]:
        loader = loader_of(config_of("s5"), **options)
        return {row.numpy().tobytes() for batch in itertools.islice(loader, 10) for row in batch.input_ids}

    train, other = rows(), rows(seed=1)
    validation = loader_of(config_of("s5"), split="validation", one_pass=True)
    batches = list(validation)
    assert len(batches) == 6  # 20 samples in global batches of 8: the last is filled with rows of padding
    assert sum(batch.n_tokens for batch in batches) == 20 * 24
    ids, labels = torch.cat([b.input_ids for b in batches]), torch.cat([b.labels for b in batches])
    assert (ids[20:] == validation.facts.tokenizer.special["pad"]).all()
    assert (labels[20:] == IGNORED).all()
    assert (labels[:20] != IGNORED).all()
    held_out = {row.numpy().tobytes() for row in ids[:20]}
    assert len(held_out) == 20
    assert len(train | other | held_out) == len(train) + len(other) + len(held_out)
    assert torch.equal(torch.cat([b.input_ids for b in validation]), ids)


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_masked_batches_select_the_masks(name):
    loader = loader_of(config_of(name), masking=MaskingConfig())
    for batch in take(loader, 5):
        assert batch.cu_seqlens is batch.attention_mask is None
        masks = (batch.input_ids == loader.facts.tokenizer.special["mask"]).flatten()
        assert torch.equal(batch.select, masks.nonzero()[:, 0])
        assert torch.equal(batch.select, (batch.labels.flatten() != IGNORED).nonzero()[:, 0])


def test_longer_samples_have_the_same_vocabulary_and_as_many_items():
    short, long = (loader_of(config_of(seqlen=seqlen)) for seqlen in (24, 192))
    assert short.facts.tokenizer.sha256 == long.facts.tokenizer.sha256
    for loader in (short, long):
        assert ((take(loader, 1)[0].labels != IGNORED).sum(dim=1) == 5).all()


@each("name", GENERATED)
def test_the_tokenizer_reads_and_writes_the_tokens(name, tmp_path):
    from matmix.data.tokenizer import Tokenizer

    loader = loader_of(config_of(name))
    tokenizer = loader.facts.tokenizer
    text = " ".join(make_generated(loader.config.synthetic).tokens)
    ids = list(range(len(text.split())))
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.ordinary_ids().tolist() == ids
    assert loader.facts.vocab_size == len(ids) + 3
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert (again.sha256, again.special, again.encode(text)) == (tokenizer.sha256, tokenizer.special, ids)


# -- bad input


@each(
    "options, message",
    [
        ({"task": "parety"}, "data.synthetic.task = 'parety' is no task; did you mean 'parity'"),
        ({"task": "m24"}, "is no task; known: parity, s3, a5"),
        ({"task": "mqar", "items": 8}, "data.synthetic.items = 8 pairs .*symbols = 7"),
        ({"task": "mqar", "seqlen": 19}, "data.seqlen = 19 is too short for mqar, .* at least 20 tokens"),
        ({"task": "selective_copying", "seqlen": 9}, "data.seqlen = 9 is too short for selective_copying, .* 10 t"),
        ({"task": "reversal", "items": 8}, "data.synthetic.items = 8 different tokens, .*symbols = 7; raise"),
        ({"task": "listops", "seqlen": 4}, "data.seqlen = 4 is too short for listops, .* 5 tokens"),
        ({"task": "pathfinder", "seqlen": 400}, "data.seqlen = 400 is too short for pathfinder, .* 401 tokens"),
        ({"task": "pathfinder", "seqlen": 500}, "not a square picture and a mark: for 22 x 22 pixels set 485"),
        ({"task": "pathfinder", "dashes": 2}, "data.synthetic.dashes must be at least 3, got 2"),
        ({"symbols": 1}, "data.synthetic.symbols must be at least 2, got 1"),
        ({"items": 0}, "data.synthetic.items must be at least 1, got 0"),
        ({"task": "listops", "arguments": 1}, "data.synthetic.arguments must be at least 2, got 1"),
        ({"validation_samples": 0}, "data.synthetic.validation_samples must be at least 1"),
        ({"eval_lengths": (1, 0)}, "data.synthetic.eval_lengths must be multiples of 1 or more, got .1, 0."),
    ],
)  # fmt: skip
def test_config_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        MODALITIES["samples"].check(config_of(**options), causal=True)
    assert "\n" not in str(error.value)


@each(
    "options, message",
    [
        ({"path": "somewhere"}, "data.path and data.synthetic.task are both given"),
        ({"mixture": {"a": 1.0}}, "data.mixture and data.synthetic.task are both given"),
        ({"validation_path": "somewhere"}, "data.validation_path and data.synthetic.task are both given"),
        ({"packing": "concat"}, 'set data.packing = "rows", not "concat"'),
    ],
)
def test_a_task_and_other_data(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"packing": "rows", "synthetic": SyntheticConfig(task="parity"), **options})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "selective_copying"}, "task was 'mqar' and is now 'selective_copying'"),
        ({"symbols": 9}, "symbols was 7 and is now 9"),
        ({"seqlen": 48}, "seqlen was 24 and is now 48"),
    ],
)
def test_a_position_of_another_task_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loader_of(config_of(**changes)).load_state_dict(loader_of(config_of()).state_dict())
