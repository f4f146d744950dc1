"""`matmix embed RUN FILE ... --out OUT`: one vector for every text, by an encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matmix.launch.texts import TextDocuments, TextFiles, read_texts
from matmix.train.arguments import RunFolder

_SUFFIXES = (".npy", ".parquet")


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
        """Writes the file and returns the exit code."""
        from matmix.use.embedding import Embedder, write_vectors
        from matmix.use.opening import open_model

        if self.out.suffix not in _SUFFIXES:
            raise ValueError(f"--out {self.out}: name a file that ends in {' or '.join(_SUFFIXES)}")
        if self.out.exists():
            raise ValueError(f"--out {self.out} exists; choose another file, or remove it")
        opened = open_model(self.source, step=self.step)
        embedder = Embedder(opened, pooling=self.pooling, max_length=self.max_length)
        options = {"text_field": self.text_field, "text_documents": self.text_documents, "doing": "embedding"}
        texts = read_texts(self.texts, **options)
        count = write_vectors(self.out, embedder, texts, normalize=self.normalize)
        print(f"{self.out}: {count:,} vectors of {embedder.width}, {self.pooling} of {opened.path}")
        return 0
