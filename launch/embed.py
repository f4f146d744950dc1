"""`matmix embed RUN FILE ... --out OUT`: one vector for every text, by an encoder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from matmix.launch.loading import Source, load_source
from matmix.launch.texts import TextDocuments, TextFiles, read_texts
from matmix.model import build_model
from matmix.model.backbone import Backbone
from matmix.train.arguments import RunFolder

_PACK = 1 << 14  # tokens in one forward pass, but for a single longer text
_TEXTS = 256  # that are tokenised at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embed:
    """Write one vector for every text: row i is that of the i-th text of the files."""

    source: RunFolder
    """Run directory of an encoder, its URL, or an export."""
    texts: TextFiles
    out: Path
    """A .npy file, float32 (texts, d_model), or a .parquet file with the columns text and embedding."""
    text_field: str = "text"
    """Field of .jsonl objects, or column of .parquet files, that holds the text."""
    text_documents: TextDocuments = "line"
    """What is a text in .txt files."""
    pooling: Literal["mean", "cls"] = "mean"
    """mean: over all tokens of a text, special ones included; cls: the features of the first token."""
    normalize: bool = False
    """Divide every vector by its length."""
    max_length: int = 0
    """Tokens of a text that are read, special ones included; 0 = as many as in training."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Writes the file; the exit code."""
        if self.out.suffix not in _WRITERS:
            raise ValueError(f"--out {self.out}: name a file that ends in {' or '.join(_WRITERS)}")
        if self.out.exists():
            raise ValueError(f"--out {self.out} exists; choose another file, or remove it")
        source = load_source(self.source, step=self.step)
        model = as_embedder(source, self.pooling)
        length = self.max_length or source.seqlen
        model.config.check_seqlen(length)
        options = {"text_field": self.text_field, "text_documents": self.text_documents, "doing": "embedding"}
        texts = read_texts(self.texts, **options)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_name(f".part-{self.out.name}")
        count, writer = 0, _WRITERS[self.out.suffix](part, model.config.d_model)
        try:
            for some, vectors in embed_texts(source, model, texts, max_length=length):
                if self.normalize:
                    vectors = torch.nn.functional.normalize(vectors, dim=1)
                writer.write(some, vectors.numpy())
                count += len(some)
            writer.close()
            part.rename(self.out)
        finally:
            part.unlink(missing_ok=True)
        print(f"{self.out}: {count:,} vectors of {model.config.d_model}, {self.pooling} of {source.path}")
        return 0


def as_embedder(source: Source, pooling: str) -> Backbone:
    """The encoder in `source` as a text_embedder, whose outputs are one vector for each document; a head that it has is
    left out. Raises ValueError (one line) for models that are no encoders, or take texts of one length only."""
    config = source.model.config
    if config.causal:
        raise ValueError(f"{source.path} is a {config.architecture}, which sees no later tokens: give an encoder")
    if fixed := config.fixed_length_mixers():
        raise ValueError(f"{source.path} takes texts of exactly {config.max_seqlen} tokens ({', '.join(fixed)})")
    head = dataclasses.replace(config.head, pooling=pooling)
    model = build_model(dataclasses.replace(config, architecture="text_embedder", head=head))
    state = source.model.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model.to(source.device).eval()


@torch.inference_mode()
def embed_texts(
    source: Source, model: Backbone, texts: Iterable[str], *, max_length: int
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Some texts and their vectors (n, d_model), float32 on the CPU, in order; many as packed documents in one forward
    pass. model: of `as_embedder`."""
    rest, texts = True, iter(texts)
    waiting: list[tuple[str, list[int]]] = []
    while rest:
        some = list(itertools.islice(texts, _TEXTS))
        rest = len(some) == _TEXTS
        for text in some:
            read = source.reader.ids(text, max_length)
            if waiting and sum(len(ids) for _, ids in waiting) + len(read) > _PACK:
                yield _vectors(source, model, waiting)
                waiting = []
            waiting.append((text, read))
    if waiting:
        yield _vectors(source, model, waiting)


def _vectors(
    source: Source, model: Backbone, encoded: Sequence[tuple[str, list[int]]]
) -> tuple[list[str], torch.Tensor]:
    lengths = [len(ids) for _, ids in encoded]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=source.device)
    read = torch.tensor([list(itertools.chain.from_iterable(ids for _, ids in encoded))], device=source.device)
    vectors = model(read, cu_seqlens=bounds, max_seqlen=max(lengths))
    return [text for text, _ in encoded], vectors.float().cpu()


class _NumpyFile:
    """Grows with every write; the header has room for the number of rows, which is known at the end."""

    def __init__(self, path: Path, width: int) -> None:
        self._file, self._shape = path.open("wb"), (0, width)
        self._write_header()

    def _write_header(self) -> None:
        facts = {"descr": "<f4", "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, facts)

    def write(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(vectors, dtype="<f4").tobytes())
        self._shape = (self._shape[0] + len(vectors), self._shape[1])

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()


class _ParquetFile:
    def __init__(self, path: Path, width: int) -> None:
        vector = pyarrow.list_(pyarrow.float32(), width)
        self._schema = pyarrow.schema({"text": pyarrow.string(), "embedding": vector})
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)

    def write(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        flat = pyarrow.array(vectors.reshape(-1), pyarrow.float32())
        rows = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        self._writer.write_table(pyarrow.Table.from_arrays([pyarrow.array(texts), rows], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


_WRITERS = {".npy": _NumpyFile, ".parquet": _ParquetFile}
"""Suffix -> what writes such a file."""
