"""Embeds texts: one vector for every text, by an encoder."""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor

from matmix.model import build_model
from matmix.use.opening import TrainedModel

Pooling = Literal["mean", "cls"]
Batches = Iterator[tuple[list[str], Tensor]]
"""Some texts at a time, and their vectors (n, d_model), float32 on the CPU."""
_PACK = 1 << 14  # tokens in one forward pass, except for a single longer text


class Embedder:
    """Turns texts into vectors, as the encoder of a trained model sees them; a head that the model has is left out."""

    def __init__(self, opened: TrainedModel, *, pooling: Pooling = "mean", max_length: int = 0) -> None:
        """pooling: "mean" over all tokens of a text, special ones included, or "cls", the features of the first token;
        max_length: tokens of a text that are read, special ones included, 0 = as many as in training. Raises ValueError
        (one line) for models that are no encoders, or take texts of one length only."""
        config = opened.config
        self._reader, self._packed = opened.reader, opened.packed
        if config.causal:
            raise ValueError(f"{opened.path} is a {config.architecture}, which sees no later tokens: give an encoder")
        if fixed := config.fixed_length_mixers():
            raise ValueError(f"{opened.path} takes texts of exactly {config.max_seqlen} tokens ({', '.join(fixed)})")
        self.max_length, self.width = max_length or opened.seqlen, config.d_model
        config.check_seqlen(self.max_length)
        head = dataclasses.replace(config.head, pooling=pooling)
        model = build_model(dataclasses.replace(config, architecture="text_embedder", head=head))
        state = opened.model.state_dict()
        model.load_state_dict({name: state[name] for name in model.state_dict()})
        self.model = model.to(opened.device).eval()

    def batches(self, texts: Iterable[str]) -> Batches:
        """Yields texts and vectors in order; many texts are packed documents of one forward pass."""
        waiting: list[tuple[str, list[int]]] = []
        tokens = 0
        for text in texts:
            ids = self._reader.ids(text, self.max_length)
            if waiting and tokens + len(ids) > _PACK:
                yield self._vectors(waiting)
                waiting, tokens = [], 0
            waiting.append((text, ids))
            tokens += len(ids)
        if waiting:
            yield self._vectors(waiting)

    @torch.inference_mode()
    def _vectors(self, encoded: Iterable[tuple[str, list[int]]]) -> tuple[list[str], Tensor]:
        texts, ids = zip(*encoded, strict=True)
        return list(texts), self.model(**self._packed(ids)).float().cpu()


def embed(opened: TrainedModel, texts: Iterable[str], *, pooling: Pooling = "mean", max_length: int = 0) -> Tensor:
    """Returns one vector for every text, float32 (texts, d_model) on the CPU; arguments and errors as of `Embedder`."""
    embedder = Embedder(opened, pooling=pooling, max_length=max_length)
    vectors = [vectors for _, vectors in embedder.batches(texts)]
    return torch.cat(vectors) if vectors else torch.empty(0, embedder.width)


def write_vectors(out: Path, embedder: Embedder, texts: Iterable[str], *, normalize: bool = False) -> int:
    """Writes one vector for every text into a new file, which appears whole or not at all; returns their number. out:
    .npy, float32 (texts, d_model), or .parquet with the columns text and embedding; normalize: vectors of length 1."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".part-{out.name}")
    batches = embedder.batches(texts)
    if normalize:
        batches = ((some, torch.nn.functional.normalize(vectors, dim=1)) for some, vectors in batches)
    try:
        count = (_write_parquet if out.suffix == ".parquet" else _write_numpy)(part, embedder.width, batches)
        part.rename(out)
    finally:
        part.unlink(missing_ok=True)
    return count


def _write_numpy(path: Path, width: int, batches: Batches) -> int:
    """Writes a header twice: it has room for the number of rows, known at the end."""
    facts, count = {"descr": "<f4", "fortran_order": False}, 0
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {**facts, "shape": (0, width)})
        for _, vectors in batches:
            file.write(np.ascontiguousarray(vectors.numpy(), dtype="<f4").tobytes())
            count += len(vectors)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**facts, "shape": (count, width)})
    return count


def _write_parquet(path: Path, width: int, batches: Batches) -> int:
    vector, count = pyarrow.list_(pyarrow.float32(), width), 0
    schema = pyarrow.schema({"text": pyarrow.string(), "embedding": vector})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for texts, vectors in batches:
            flat = pyarrow.array(vectors.numpy().reshape(-1), pyarrow.float32())
            columns = [pyarrow.array(texts), pyarrow.FixedSizeListArray.from_arrays(flat, width)]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
            count += len(texts)
    return count
