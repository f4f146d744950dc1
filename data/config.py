"""What the data part of a run is made of: the `[data]` table of a recipe.

Only the fields are checked here; what needs the files themselves (is there a split, are there enough
tokens for one sequence, is the special id in the vocabulary) is checked by
`matmix.data.loading.loader.build_loader`.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from matmix.data.examples.config import ExamplesConfig
from matmix.data.images.config import ImagesConfig
from matmix.data.storage.remote import refuse_secrets
from matmix.data.synthetic import SyntheticConfig, make_task


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    path: str = ""
    """Prepared dataset: a folder made by `matmix prepare`, or the URL of a copy of one (s3://, gs://,
    file://, ...)."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Several prepared datasets instead of `path`: folder or URL -> weight, the share of its sequences
    (any scale)."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """A generated task instead of `path` or `mixture`."""
    examples: ExamplesConfig = field(default_factory=ExamplesConfig)
    """Files of labelled examples instead of `path` or `mixture`, to fine-tune on."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """A dataset of pictures instead of `path` or `mixture`."""
    validation_path: str = ""
    """Prepared dataset whose validation split is used instead of that of `path` or `mixture`."""
    seqlen: int = 1024
    """Tokens in a sequence."""
    packing: Literal["concat", "document", "rows"] = "concat"
    """concat: documents one after another, cut every `seqlen` tokens, boundaries kept; document: one
    document a sequence, truncated or padded; rows: as concat, but each sequence counts as one document, for
    mixers of a fixed length."""
    prefix: Literal["none", "bos", "cls"] = "none"
    """Special token put before every document."""
    suffix: Literal["none", "eos", "sep"] = "eos"
    """Special token put after every document."""
    shuffle: bool = True
    """Shuffle the training split anew in every epoch; validation is always read in order."""
    shuffle_block: int = 16
    """Shards shuffled together: more mixes better, fewer keeps less open (and, for remote data,
    downloaded) at once."""
    workers: int = 1
    """Reading processes per rank; 0 reads in the training process. Does not change the batches."""
    worker_start: Literal["fork", "spawn", "forkserver"] = "fork"
    """How reading processes are started; spawn is slower to start but safe with any library loaded before."""
    prefetch: int = 4
    """Micro-batches that each reading process prepares ahead."""
    verify: bool = True
    """Check the SHA-256 of every shard when a process first opens it."""
    skip_damaged: bool = False
    """Go on without missing and damaged shards: sequences that need one become padding without targets, and are
    counted."""
    cache_dir: str = ""
    """Folder for downloaded and decompressed shards. Default: .cache inside a local dataset that can be
    written to, unless it is another user's, else matmix/data in the user's cache folder."""
    cache_gigabytes: float = 0.0
    """Size to keep that folder to: the least recently used shards go, except those that a process has open. 0: half of
    the disk that it lies on; inf: any."""

    @property
    def cache_bytes(self) -> int:
        """The same in bytes; 0 and -1 for 0 and inf."""
        return -1 if math.isinf(self.cache_gigabytes) else int(self.cache_gigabytes * 1e9)

    def __post_init__(self) -> None:
        for name in ("path", "mixture", "validation_path", "cache_dir"):
            refuse_secrets(getattr(self, name), f"data.{name}")
        if self.path and self.mixture:
            raise ValueError("data.path and data.mixture are both given: keep one of them")
        for path, weight in self.mixture.items():
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
                raise ValueError(f"data.mixture: the weight of {path} must be a positive number, got {weight}")
        for name in ("seqlen", "shuffle_block", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        if not self.cache_gigabytes >= 0:
            raise ValueError(f"data.cache_gigabytes must be 0 or more, got {self.cache_gigabytes}")
        if self.workers < 0:
            raise ValueError(f"data.workers must be 0 or more, got {self.workers}")
        if self.examples.train:
            self._refuse_other_data("data.examples.train")
        if self.images.datasets:
            self._refuse_other_data("data.images.path")
            for name, given in (("examples.train", self.examples.train), ("synthetic.task", self.synthetic.task)):
                if given:
                    raise ValueError(f"data.{name} and data.images.path are both given: keep one of them")
        if self.synthetic.task:
            self._check_synthetic()
        choices = {
            "packing": ("concat", "document", "rows"),
            "prefix": ("none", "bos", "cls"),
            "suffix": ("none", "eos", "sep"),
            "worker_start": ("fork", "spawn", "forkserver"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"data.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _refuse_other_data(self, name: str, hint: str = "") -> None:
        for other in ("path", "mixture", "validation_path"):
            if getattr(self, other):
                raise ValueError(f"data.{other} and {name} are both given: keep one of them{hint}")

    def _check_synthetic(self) -> None:
        if self.examples.train:
            raise ValueError("data.examples.train and data.synthetic.task are both given: keep one of them")
        self._refuse_other_data("data.synthetic.task", ' (data.synthetic.task = "" generates nothing)')
        if self.packing != "rows":
            raise ValueError(
                f'the samples of data.synthetic.task are rows of one document each: set data.packing = "rows", '
                f'not "{self.packing}"'
            )
        # A task from outside is found when a run begins: reading somebody else's configuration imports nothing.
        if ":" not in self.synthetic.task:
            make_task(self.synthetic).check(self.seqlen)
