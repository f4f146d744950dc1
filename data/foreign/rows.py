"""From the shards of others to micro-batches: each reading process of each rank goes through shards of its own.

Nobody knows beforehand how many samples and tokens there are, so no number says where a row lies. Each *stream*, that
of one reading process, has a cursor in its place: the epoch, which of its shards in the order of that epoch, the number
of the sample in the order of that shard, and how many tokens of that sample rows have used. A batch says where its
stream goes on, the loader keeps what the batches of whole steps say, and a checkpoint has the cursors of all ranks. A
stream that begins at a cursor reads on as if it had never stopped.

Evaluation reads the first `data.validation_samples` rows, in order, into memory when it is opened.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from matmix.data.config import DataConfig
from matmix.data.foreign.shards import Shards, Value
from matmix.data.images import transforms
from matmix.data.images.rows import ImageRows
from matmix.data.images.transforms import Transform
from matmix.data.loading.batch import Batch, packed_batch, selecting
from matmix.data.loading.masking import IGNORED, Masker, MaskingConfig, Stretch
from matmix.data.loading.rows import Cursor, Failure, Reading, errors_as_failures
from matmix.data.rng import DOCUMENTS, SHARDS, generator
from matmix.data.tokenizer import Tokenizer

Place = tuple[int, int, int]
"""A cursor without the tokens."""
_AT_ONCE = 16


def samples_of(
    shards: Shards, reading: Reading, shuffle: bool, stream: int, streams: int, place: Place
) -> Iterator[tuple[Place, str, Value]]:
    """Yields the samples of a stream from a place on, each with its place and words for it: epoch after epoch, or in
    one pass. Raises as `Shards.values`, and ValueError (one line) where an epoch has none."""
    own = np.arange(stream, len(shards.names), streams)
    epoch, at, start = place
    while epoch == 0 or not reading.one_pass:
        order = generator(reading.seed, epoch, SHARDS, stream).permutation(own) if shuffle else own
        found = at > 0 or start > 0
        for number in range(at, len(order)):
            shard = int(order[number])
            draw = generator(reading.seed, epoch, DOCUMENTS, shard) if shuffle else None
            for index, (where, value) in enumerate(shards.values(shard, draw, start), start):
                found = True
                yield (epoch, number, index), where, value
            start = 0
        if not found:
            raise ValueError(f"{shards.path}: {', '.join(shards.names[shard] for shard in own[:3])} hold no samples")
        epoch, at = epoch + 1, 0


class Row(NamedTuple):
    """Tokens int64 (n,), at most one more than a row has, and where documents begin among them."""

    tokens: np.ndarray
    begins: list[int]


class TextStream:
    """Rows of tokens of a stream. After each, `cursor` is where the next one begins."""

    def __init__(
        self, samples: Iterator[tuple[Place, str, Value]], tokenizer: Tokenizer, data: DataConfig, causal: bool
    ) -> None:
        self._samples, self._tokenizer, self._packing = samples, tokenizer, data.packing
        self._width, self._step, self._causal = data.seqlen + causal, data.seqlen, causal
        self._prefix, self._suffix = (
            special_id(tokenizer, which, getattr(data, which)) for which in ("prefix", "suffix")
        )
        self._pending: deque[tuple[Place, np.ndarray]] = deque()
        self._documents = self._read()
        self._used = 0  # tokens of the first pending document
        self.cursor: Cursor = (0, 0, 0, 0)

    def skip(self, tokens: int) -> None:
        """Passes over the first tokens of the first sample, which rows before have used."""
        self._used = tokens

    def __iter__(self) -> Iterator[Row]:
        return self._each() if self._packing == "document" else self._cut()

    def _each(self) -> Iterator[Row]:
        for place, ids in self._documents:
            row = ids[: self._width]
            if len(row) < len(ids) and not self._causal and self._suffix is not None:
                row[-1] = self._suffix
            self.cursor = (*place[:2], place[2] + 1, 0)
            yield Row(row, [0])

    def _cut(self) -> Iterator[Row]:
        pending, have, ended = self._pending, -self._used, False
        while True:
            while have < self._width and not ended:
                if (document := next(self._documents, None)) is None:
                    ended = True
                else:
                    pending.append(document)
                    have += len(document[1])
            if have <= self._causal:
                return
            if self._used > len(pending[0][1]):
                raise ValueError("the saved data position lies behind its sample: the data was changed")
            parts, begins, size, first = [], [], 0, self._used
            for _, ids in pending:
                if first == 0 and size < self._width:
                    begins.append(size)
                parts.append(ids[first : first + self._width - size])
                size, first = size + len(parts[-1]), 0
                if size == self._width:
                    break
            self._advance(min(self._step, have))
            have -= self._step
            yield Row(np.concatenate(parts), begins)

    def _advance(self, tokens: int) -> None:
        self._used += tokens
        # A document that is used up stays until the next one is there: the cursor names it.
        while len(self._pending) > 1 and self._used >= len(self._pending[0][1]):
            self._used -= len(self._pending.popleft()[1])
        self.cursor = (*self._pending[0][0], self._used)

    def _read(self) -> Iterator[tuple[Place, np.ndarray]]:
        """Yields the documents that are not empty, with their special tokens, int64 (n,)."""
        lead, end = ([] if token is None else [token] for token in (self._prefix, self._suffix))
        last = None  # epoch of the last document that was not empty
        while portion := list(itertools.islice(self._samples, _AT_ONCE)):
            texts = [value for _, _, value in portion if isinstance(value, str)]
            encoded = iter(self._tokenizer.encode_batch(texts) if texts else [])
            for place, where, value in portion:
                ids = next(encoded) if isinstance(value, str) else self._checked(value, where)
                last = place[0] if len(ids) or last is None else last
                if place[0] > last + 1:
                    raise ValueError(f"{where}: all samples of an epoch are empty")
                if len(ids):
                    yield place, np.concatenate([lead, ids, end]).astype(np.int64)

    def _checked(self, ids: Value, where: str) -> np.ndarray:
        assert isinstance(ids, np.ndarray)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{where} holds {ids.dtype} of {ids.ndim} axes, not ids of tokens")
        if ids.size and not 0 <= (found := int(ids.min() if ids.min() < 0 else ids.max())) < self._tokenizer.vocab_size:
            raise ValueError(
                f"{where} has the id {found}, outside of the {self._tokenizer.vocab_size} of data.tokenizer"
            )
        return ids


def special_id(tokenizer: Tokenizer, which: str, name: str) -> int | None:
    """Returns the id of `data.prefix` or `data.suffix`. Raises ValueError (one line) where the tokenizer has none."""
    if name == "none":
        return None
    if (token := tokenizer.special.get(name)) is None:
        raise ValueError(f'data.{which} = "{name}", but data.tokenizer has no {name} token; set data.{which} = "none"')
    return token


class ForeignText:
    """`Rows` of text. limit: of an evaluation, the rows that were kept."""

    samples_per_epoch = None

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, data: DataConfig, reading: Reading, masking: MaskingConfig | None
    ) -> None:
        self.shards, self.tokenizer, self.data, self.reading = shards, tokenizer, data, reading
        self.causal, self.masker = masking is None, None
        if masking is not None:
            if tokenizer.special.get("mask") is None:
                raise ValueError("masked-LM batches need a mask token, and data.tokenizer has none")
            self.masker = Masker(masking, tokenizer, reading.seed)
        self.streams = reading.streams(data)
        self.limit, self._kept = None, []
        if reading.one_pass:
            self._kept = list(itertools.islice(self._begin(0, 1, (0, 0, 0, 0)), data.validation_samples or None))
            self.limit, self.shards = len(self._kept), None
        self._live: tuple[TextStream, Iterator[Row]] | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_live": None}

    def _begin(self, stream: int, streams: int, cursor: Cursor) -> TextStream:
        shuffle = self.reading.shuffles(self.data)
        samples = samples_of(self.shards, self.reading, shuffle, stream, streams, cursor[:3])
        rows = TextStream(samples, self.tokenizer, self.data, self.causal)
        rows.skip(cursor[3])
        return rows

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        if self.limit is not None:
            empty = Row(np.zeros(0, dtype=np.int64), [])
            return self._batch(samples, [self._kept[n] if n < self.limit else empty for n in samples])
        if (begin := getattr(samples, "begin", None)) is not None:
            stream = self._begin(begin[0], self.streams, begin[1])
            self._live = stream, iter(stream)
        assert self._live is not None
        batch = self._batch(samples, list(itertools.islice(self._live[1], len(samples))))
        batch.cursor = self._live[0].cursor
        return batch

    def _batch(self, samples: list[int], rows: list[Row]) -> Batch:
        room, seqlen = int(self.causal), self.data.seqlen
        tokens = np.full((len(rows), seqlen + room), self.tokenizer.special.get("pad") or 0, dtype=np.int64)
        begins, counts = np.zeros(tokens.shape, dtype=bool), np.zeros(len(rows), dtype=np.int64)
        stretches = []
        for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            counts[number] = count = len(row.tokens)
            tokens[number, :count] = row.tokens
            begins[number, row.begins] = True
            stretches.append(Stretch((number, slice(count)), 0, sample, 0, row.begins))
        weights = None
        if self.masker is not None:
            inputs, labels = self.masker.apply(tokens, stretches)
            weights = self.masker.weights(tokens, stretches) if self.masker.config.weighted else None
        else:
            hidden = begins | (np.arange(tokens.shape[1]) >= counts[:, None])
            inputs = np.ascontiguousarray(tokens[:, :-1])
            labels = np.ascontiguousarray(np.where(hidden, IGNORED, tokens)[:, 1:])
        batch = packed_batch(inputs, labels, begins[:, :seqlen], np.minimum(counts, seqlen), self.data.packing)
        if weights is not None:
            batch.weights = torch.from_numpy(weights)
        return batch if self.causal else selecting(batch)


class ForeignPictures(ImageRows):
    """`Rows` of pictures. kept: of an evaluation, the encoded pictures and their classes."""

    samples_per_epoch = None

    def __init__(
        self, shards: Shards, data: DataConfig, reading: Reading, classes: int, make: Callable[[], Transform]
    ) -> None:
        self.config, self._make_transform, self.classes, self.reading = data.images, make, classes, reading
        self.seed, self.global_batch, self.training = reading.seed, reading.global_batch_size, not reading.one_pass
        self.shuffle, self.opened = reading.shuffles(data), shards
        self.streams = reading.streams(data)
        self.limit, self.kept, self._live = None, [], None
        if reading.one_pass:
            samples = samples_of(shards, reading, False, 0, 1, (0, 0, 0))
            for _, where, value in itertools.islice(samples, data.validation_samples or None):
                self.kept.append((where, *self._checked(where, value)))
            self.limit, self.opened = len(self.kept), None

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_live": None}

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        if (begin := getattr(samples, "begin", None)) is not None:
            stream, cursor = begin
            self._live = samples_of(self.opened, self.reading, self.shuffle, stream, self.streams, cursor[:3])
        with transforms.borrowed_generators():
            batch = self._batch(samples)
        if self.limit is None:
            batch.cursor = self._cursor
        return batch

    def _encoded(self, sample: int) -> tuple[bytes, int, str, int]:
        if self.limit is not None:
            where, data, label = self.kept[sample]
        else:
            assert self._live is not None
            (epoch, at, index), where, value = next(self._live)
            data, label = self._checked(where, value)
            self._cursor: Cursor = (epoch, at, index + 1, 0)
        return data, label, where, 255

    def _checked(self, where: str, value: Value) -> tuple[bytes, int]:
        assert isinstance(value, tuple)
        if not 0 <= value[1] < self.classes:
            raise ValueError(
                f"{where} has the class {value[1]}, but there are {self.classes} (data.images.class_count)"
            )
        return value

    def _number(self, sample: int) -> int:
        return sample
