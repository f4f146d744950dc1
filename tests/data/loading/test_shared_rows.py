"""Ranks that share the rows of a micro-batch are given parts of it, which make up what one rank is given."""

import itertools

import torch
from failures import each

from matmix.data.config import DataConfig, SyntheticConfig
from matmix.data.loading.batch import Batch
from matmix.data.loading.masking import DiffusionMasking, MaskingConfig
from matmix.data.loading.rows import WHOLE, Part
from matmix.data.modalities import build_loader
from matmix.data.splits.reader import TokenShards

GLOBAL, SEQLEN, MICRO, PAD = 16, 24, 2, 0
TOKENS = MICRO * SEQLEN
MASKED = {"masking": MaskingConfig(), "prefix": "cls", "suffix": "sep"}
VALIDATION = {"split": "validation", "one_pass": True}
KINDS = {
    "causal": {},
    "masked": MASKED,
    "spans": {**MASKED, "masking": MaskingConfig(span=5)},
    "documents": {"packing": "document"},
    "masked documents": {"packing": "document", **MASKED},
    "rows": {"packing": "rows"},
    "masked rows": {"packing": "rows", **MASKED},
    "diffusion": {"masking": DiffusionMasking()},
    "carried": {"carry": True, "shuffle": False},
    "validation": VALIDATION,
    "validation documents": {"packing": "document", **VALIDATION},
    "generated": {"packing": "rows", "synthetic": SyntheticConfig(task="mqar", items=3)},
    "masked generated": {
        "packing": "rows",
        "synthetic": SyntheticConfig(task="listops", depth=2, validation_samples=13),
        "masking": MaskingConfig(),
        **VALIDATION,
    },
}


def taken(path, parts: int, *, first: int = 0, count: int = 12, **options) -> list[list[Batch]]:
    """The next micro-batches of each part, from a global sample on."""
    reading = {name: options.pop(name) for name in ("split", "one_pass", "masking") if name in options}
    source = {} if "synthetic" in options else {"path": str(path)}
    config = DataConfig(**{"seqlen": SEQLEN, "workers": 0, "shuffle_block": 2, **source, **options})
    found = []
    for number in range(parts):
        loader = build_loader(
            config, global_batch_size=GLOBAL, micro_batch_size=MICRO, part=Part(number, parts), **reading
        )
        loader.load_state_dict({**loader.state_dict(), "samples": first})
        found.append(list(itertools.islice(loader, count)))
    return found


def documents(batch: Batch, packing: str) -> list[int]:
    """The borders of the documents of whole rows, where padding is a document."""
    if packing == "concat":
        return batch.cu_seqlens.tolist()
    borders = set(range(0, TOKENS + 1, SEQLEN))
    if packing == "document":
        real = batch.attention_mask & (batch.inputs != PAD)  # a row without a token keeps one
        borders |= {row * SEQLEN + n for row, n in enumerate(real.sum(1).tolist())}
    return sorted(borders)


@each("kind", KINDS)
def test_parts_make_up_the_whole(kind, small):
    options = KINDS[kind]
    packing = options.get("packing", "concat")
    whole = taken(small, 1, **options)[0]
    assert len(whole) > 5
    for parts in (2, 3, 16):
        length = TOKENS // parts
        for batch, *own in zip(whole, *taken(small, parts, **options), strict=True):
            assert all(part.inputs.shape == part.labels.shape == (1, length) for part in own)
            for name in ("inputs", "labels"):
                joined = torch.cat([getattr(part, name)[0] for part in own])
                assert torch.equal(joined, getattr(batch, name).flatten()), name
            if kind == "diffusion":
                assert torch.equal(torch.cat([part.weights[0] for part in own]), batch.weights.flatten())
                assert 0 < int((batch.weights > 0).sum()) <= batch.n_tokens
            assert sum(part.n_tokens for part in own) == batch.n_tokens
            if batch.select is not None:
                selected = torch.cat([part.select + number * length for number, part in enumerate(own)])
                assert torch.equal(selected, batch.select)
            pairs = list(itertools.pairwise(documents(batch, packing)))
            for number, part in enumerate(own):
                for row, *_ in Part(number, parts).pieces(MICRO, SEQLEN) if kind == "carried" else ():
                    assert part.continues[row] == batch.continues[row]
                assert part.attention_mask is None
                assert part.cu_seqlens.dtype == torch.int32
                first, last = number * length, (number + 1) * length
                here = [(a - first, b - first) for a, b in pairs if a < last and b > first]
                assert list(itertools.pairwise(part.cu_seqlens.tolist())) == here
                assert part.max_seqlen == max(b - a for a, b in here)


def test_a_rank_reads_the_documents_of_its_part_only(small, monkeypatch):
    read = TokenShards.read
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(TokenShards, "read", lambda self, *which: seen.append(which) or read(self, *which))
    of_each = []
    for number in range(4):
        seen.clear()
        taken(small, 4, count=1)[number]
        of_each.append(len(seen) / 4)
    seen.clear()
    taken(small, 1, count=1)
    assert max(of_each) < len(seen)


def test_resuming_does_not_depend_on_the_parts(small):
    whole = taken(small, 1, first=GLOBAL, count=3, masking=MaskingConfig())[0]
    for batch, *own in zip(whole, *taken(small, 3, first=GLOBAL, count=3, masking=MaskingConfig()), strict=True):
        assert torch.equal(torch.cat([part.labels[0] for part in own]), batch.labels.flatten())


def test_pieces_of_rows():
    assert list(WHOLE.pieces(2, 3)) == [(0, 0, 3), (1, 0, 3)]
    assert list(Part(1, 3).pieces(3, 5)) == [(1, 0, 5)]
    assert list(Part(1, 4).pieces(2, 6)) == [(0, 3, 6)]
    assert list(Part(1, 3).pieces(2, 6)) == [(0, 4, 6), (1, 0, 2)]
    pieces = [piece for number in range(8) for piece in Part(number, 8).pieces(4, 6)]
    assert [row * 6 + at for row, start, stop in pieces for at in range(start, stop)] == list(range(24))
