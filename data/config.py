"""The `[data]` table of a recipe: where the data is, and how it is read. `[data]` itself belongs to text, its tables to
other modalities (`matmix.data.modalities`), which check the files when they open them."""

import functools
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from matmix.data.storage.remote import refuse_secrets

Limits = Iterable[tuple[str, bool, str]]
"""Of each field its name, whether its value is fine, and the values that are."""


def check_limits(config: object, limits: Limits, table: str) -> None:
    """Raises ValueError (one line) for the first value that is not fine, or none of its `Literal`. table: its table."""
    for name, allowed in _choices(type(config)).items():
        limits = [*limits, (name, getattr(config, name) in allowed, f"one of {', '.join(allowed)}")]
    for name, fine, allowed in limits:
        if not fine:
            raise ValueError(f"{table}{name} must be {allowed}, got {getattr(config, name)!r}")


@functools.cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(kind)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def at_least(config: object, **lows: int) -> Limits:
    """Yields the limits of fields that have a smallest value."""
    for name, low in lows.items():
        yield name, getattr(config, name) >= low, f"at least {low}" if low else "0 or more"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    task: str = ""
    """Task whose samples are generated while training, in place of a prepared dataset: parity, s3, a5, s5, mqar,
    selective_copying, reversal, listops or pathfinder, or your own "package.module:Name". Empty = none."""
    symbols: int = 32
    """mqar: keys, and as many values; selective_copying, reversal: tokens that may have to be copied."""
    items: int = 8
    """mqar: pairs of a key and a value in a sample; selective_copying, reversal: tokens to copy in a sample."""
    depth: int = 5
    """listops: operators inside one another, at most."""
    arguments: int = 5
    """listops: arguments of an operator, at most."""
    dashes: int = 6
    """pathfinder: dashes of the path between two dots; the dots are about 4 pixels apart for each of them."""
    distractors: int = 2
    """pathfinder: shorter paths that lead nowhere."""
    validation_samples: int = 512
    """Samples of the validation split. The training split has no end."""
    eval_lengths: tuple[int, ...] = ()
    """Multiples of data.seqlen at which accuracy is measured after the last step; empty = those of 1, 2, 4 and 8 that
    the model can take and the task has."""

    def __post_init__(self) -> None:
        lows = at_least(self, symbols=2, items=1, depth=1, arguments=2, dashes=3, distractors=0, validation_samples=1)
        multiples = ("eval_lengths", all(multiple >= 1 for multiple in self.eval_lengths), "multiples of 1 or more")
        check_limits(self, [*lows, multiples], "data.synthetic.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplesConfig:
    train: str = ""
    """Training examples: a .tsv, .csv, .jsonl or .parquet file, or a folder with a folder of text files for each
    class. Empty = none; the data is then another one."""
    validation: str = ""
    """Validation examples, in the same form."""
    test: str = ""
    """Test examples, which may lack labels; training does not touch them."""
    tokenizer: str = ""
    """File or folder of the tokenizer, such as RUN/tokenizer."""
    columns: dict[str, str] = field(default_factory=dict)
    """What the task reads -> column of the files that holds it: text and label, and for pairs of texts pair; those left
    out have the same name. Columns of files without a header are numbers from 0 on. Several columns that make up one
    list are divided by commas."""
    labels: tuple[str, ...] = ()
    """Classes in the order of the model's outputs; empty = those of the training examples, sorted."""
    header: bool = True
    """The first line of .tsv and .csv files names the columns."""
    skip_malformed: bool = False
    """Leave out lines of .tsv and .csv files that have another number of fields than the first one; a warning counts
    them."""
    more_fields: bool = False
    """Lines of .tsv and .csv files may have more fields than the first one; nobody reads those."""
    truncate: bool | None = None
    """Cut texts to data.seqlen tokens, the longer one of a pair first, or refuse longer ones. Left out: cut, but with
    data.packing = "rows", for models of a fixed length, refuse."""
    token_types: bool = True
    """Tell the model which tokens are those of the second text of a pair."""
    stride: int = 128
    """Question answering: tokens that two windows of a document which is longer than data.seqlen share."""

    def __post_init__(self) -> None:
        check_limits(self, [("stride", self.stride >= 0, "0 or more")], "data.examples.")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("data.examples.labels names a class twice")
        if self.validation and not self.train:
            raise ValueError("data.examples has no train: name the training examples, too")

    def path(self, split: str) -> str:
        """Returns the file of a split. Raises ValueError (one line) where there is none."""
        if not (path := getattr(self, split)):
            raise ValueError(f"no examples given: set data.examples.{split} to a file or a folder")
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagesConfig:
    path: str = ""
    """Dataset of pictures: a folder made by `matmix prepare-images`, or the URL of a copy of one. Empty = none; the
    data is then another one."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Datasets of the same classes with their weights (any scale), in place of `path`. In each stretch of samples they
    have shares in that proportion; validation takes the validation splits of all of them, once."""
    validation_path: str = ""
    """Dataset whose validation split is used instead of those of `path` or `mixture`."""
    class_count: int = 0
    """Number of the classes of a directory that others made, where `classes` does not name them."""
    classes: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers; empty = those of the dataset. A run keeps them here."""
    background: int | None = None
    """Brightness, 0 to 255, behind transparent pixels; None = that of the dataset. A run keeps it here."""
    size: int = 224
    """Height and width of what the model reads, in pixels."""
    channels: int = 3
    """3 for red, green and blue; 1 for brightness."""
    mean: tuple[float, ...] = ()
    """The number subtracted from each channel, from 0 to 1; empty = that of the training split."""
    std: tuple[float, ...] = ()
    """The number that each channel is divided by; empty = that of the training split."""
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"
    """How pictures are resized. random: bilinear or bicubic in training, bicubic in evaluation."""
    crop: float = 0.875
    """Evaluation: share of the resized picture's short side that the central crop keeps."""
    train_crop: Literal["random_resized", "shift", "none"] = "random_resized"
    """Training: a part of random size and shape, resized; the whole picture, resized and shifted by up to `shift`
    pixels; or the crop of the evaluation."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the picture's area, for random_resized."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """Smallest and largest ratio of width to height, for random_resized."""
    shift: int = 4
    """Pixels, for shift; what comes from outside of the picture is black."""
    hflip: float = 0.5
    """Probability of mirroring left and right."""
    vflip: float = 0.0
    """Probability of mirroring top and bottom."""
    color_jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation; not applied beside `augment`."""
    augment: str = ""
    """RandAugment, AutoAugment or AugMix in timm's notation, such as "rand-m9-mstd0.5-inc1". Empty = none."""
    erasing: float = 0.0
    """Probability of erasing a rectangle."""
    erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    """What it is filled with: the mean, one random colour, or random pixels."""
    erasing_count: int = 1
    """Rectangles, at most."""
    repeats: int = 1
    """Repeated augmentation: each picture comes so often in a row, augmented anew each time, and an epoch of as many
    samples takes only that share of the pictures."""
    mixup: float = 0.0
    """Parameter of the beta distribution of mixup; 0 = none."""
    cutmix: float = 0.0
    """Parameter of the beta distribution of CutMix; 0 = none. With both, each draw takes one of them."""
    mix_probability: float = 1.0
    """Probability that a draw mixes at all."""
    mix_switch: float = 0.5
    """Probability of CutMix where there are both."""
    mix_mode: Literal["batch", "pair"] = "batch"
    """One draw for each global batch, or for each pair of pictures in it."""
    smoothing: float = 0.0
    """Label smoothing: so much of the target is spread over all classes."""

    @property
    def datasets(self) -> dict[str, float]:
        """The datasets to train on with their weights; {} where none are named."""
        return datasets_of(self)

    @property
    def named(self) -> str:
        """The datasets, for messages."""
        return ", ".join(self.datasets)

    @property
    def mixes(self) -> bool:
        """True where training pictures are mixed with others."""
        return self.mix_probability > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft(self) -> bool:
        """True where training targets are shares of the classes instead of their numbers."""
        return self.mixes or self.smoothing > 0

    def __post_init__(self) -> None:
        _check_datasets(self, "data.images")
        if self.validation_path and not self.datasets:
            raise ValueError("data.images has no path: name the pictures to train on, too")
        limits = [
            *at_least(
                self, size=1, shift=0, color_jitter=0, erasing_count=1, class_count=0, repeats=1, mixup=0, cutmix=0
            ),
            ("channels", self.channels in (1, 3), "1 or 3"),
            ("crop", 0 < self.crop <= 1, "in (0, 1]"),
            ("scale", _is_range(self.scale) and self.scale[1] <= 1, "two shares in (0, 1], the smaller first"),
            ("ratio", _is_range(self.ratio), "two positive numbers, the smaller first"),
            ("smoothing", 0 <= self.smoothing < 1, "in [0, 1)"),
            ("std", all(value > 0 for value in self.std), "positive"),
            *((name, len(getattr(self, name)) in (0, self.channels), "one a channel") for name in ("mean", "std")),
        ]
        shares = ("hflip", "vflip", "erasing", "mix_probability", "mix_switch")
        limits += [(name, 0 <= getattr(self, name) <= 1, "in [0, 1]") for name in shares]
        check_limits(self, limits, "data.images.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    path: str = ""
    """Prepared dataset: a folder made by `matmix prepare`, or the URL of a copy of one (s3://, gs://, file://, ...); or
    a folder that `matmix index` has described. With another `reader` also a directory that others made: MDS for
    streaming, .tar files for webdataset (a folder, or names such as s3://bucket/train-{000..099}.tar)."""
    mixture: dict[str, float] = field(default_factory=dict)
    """Several prepared datasets instead of `path`: folder or URL -> weight, the share of its sequences (any scale)."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    """A generated task instead of `path` or `mixture`."""
    examples: ExamplesConfig = field(default_factory=ExamplesConfig)
    """Files of labelled examples instead of `path` or `mixture`, to fine-tune on."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """A dataset of pictures instead of `path` or `mixture`."""
    options: dict[str, Any] = field(default_factory=dict)
    """A table with the fields of your own modality."""
    validation_path: str = ""
    """Prepared dataset whose validation split is used instead of that of `path` or `mixture`; or, beside a directory
    that others made, another such one."""
    validation_samples: int = 1024
    """Rows or pictures that validation takes of a directory that others made, from its beginning on; 0 = all. They are
    read once, into the memory of each rank."""
    tokenizer: str = ""
    """Tokenizer for a directory that others made, as --tokenizer of `matmix prepare` takes it: a file, a folder, a name
    at the Hugging Face hub, bytes or dna. Prepared datasets have their own."""
    text_field: str = "text"
    """What of a sample in a directory that others made is its text: a column of MDS; of .tar files a member by its
    suffix (text: .txt) or a field of .json. Arrays of numbers are ids of tokens, as they are; so are bytes in a column
    `tokens` (int64)."""
    seqlen: int = 1024
    """Tokens in a sequence."""
    window: int = 0
    """Order of the sequences: windows of so many tokens are shuffled, and the sequences in each are read one after
    another. Runs with the same window read the same tokens in the same order, whatever their seqlen, and one can go on
    where another ended. 0 = seqlen."""
    packing: Literal["concat", "document", "rows"] = "concat"
    """concat: documents one after another, cut every `seqlen` tokens, boundaries kept; document: one
    document a sequence, truncated or padded; rows: as concat, but each sequence counts as one document, for
    mixers of a fixed length."""
    prefix: Literal["none", "bos", "cls"] = "none"
    """Special token put before every document."""
    suffix: Literal["none", "eos", "sep"] = "eos"
    """Special token put after every document."""
    reverse_complement: float = 0.0
    """Probability with which a document of DNA in a training sequence, or its part there, becomes its reverse
    complement. Drawn anew in each epoch, from the seed and the number of the sample."""
    shuffle: bool = True
    """Shuffle the training split anew in every epoch; validation is always read in order."""
    carry: bool = False
    """Causal models only: the states at the end of a row enter the row that goes on with its document, in the next
    step. The rows of a global batch then are lanes that each read on in the data, in its order: `shuffle` must be
    false."""
    shuffle_block: int = 16
    """Shards shuffled together: more mixes better, fewer keeps less open (and, for remote data, downloaded) at once."""
    workers: int = 1
    """Reading processes per rank; 0 reads in the training process. Does not change the batches, but with the libraries
    as data.reader."""
    worker_start: Literal["fork", "spawn", "forkserver"] = "fork"
    """How reading processes are started; spawn is slower to start but safe with any library loaded before."""
    reader: Literal["addressable", "streaming", "webdataset"] = "addressable"
    """What reads the training split. addressable: any sequence from anywhere, the same batches on any ranks. streaming
    (MDS) or webdataset (tar files): the library of the format, each reading process through shards of its own, one
    after another; the order then depends on the numbers of ranks and reading processes and the sizes of batches, and
    no run goes on with others. webdataset takes shards straight from their store into memory."""
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

    def streams(self, *, one_pass: bool) -> bool:
        """Returns whether each reading process has shards of its own, which a library reads."""
        return self.reader != "addressable" and not one_pass

    def __post_init__(self) -> None:
        _check_datasets(self, "data")
        refuse_secrets(self.cache_dir, "data.cache_dir")
        lows = at_least(self, seqlen=1, shuffle_block=1, prefetch=1, cache_gigabytes=0, workers=0, validation_samples=0)
        share = ("reverse_complement", 0 <= self.reverse_complement <= 1, "in [0, 1]")
        check_limits(self, [*lows, share], "data.")
        if self.reverse_complement and self.carry:
            raise ValueError("data.reverse_complement would turn parts that data.carry reads on from: set one of them")
        kinds = {
            "path": self.path,
            "mixture": self.mixture,
            "validation_path": self.validation_path,
            "examples.train": self.examples.train,
            "synthetic.task": self.synthetic.task,
            "images.path": self.images.datasets,
        }
        first, *others = [name for name, given in kinds.items() if given] or [""]
        for other in others:
            if "." in other:
                hint = ' (data.synthetic.task = "" generates nothing)' if other == "synthetic.task" else ""
                raise ValueError(f"data.{first} and data.{other} are both given: keep one of them{hint}")
        if self.reader != "addressable":
            images = self.images
            unable = {
                "mixture": self.mixture or images.mixture,
                "window": self.window,
                "carry": self.carry,
                "skip_damaged": self.skip_damaged,
                "images.mixup, cutmix or repeats": images.path and (images.mixes or images.repeats > 1),
                "examples.train": self.examples.train,
                "synthetic.task": self.synthetic.task,
            }
            for name, given in unable.items():
                if given:
                    raise ValueError(
                        f'data.reader = "{self.reader}" cannot be used with data.{name}; take "addressable"'
                    )
        elif self.tokenizer:
            raise ValueError(
                'data.tokenizer is for directories that others made: set data.reader to "streaming" or "webdataset"'
            )
        if self.window:
            is_cut = self.packing != "document" and not self.carry and not any("." in name for name in (first, *others))
            if self.window < 0 or self.window % self.seqlen or not is_cut:
                raise ValueError(
                    f"data.window = {self.window} must be a multiple of data.seqlen = {self.seqlen}, and is for "
                    'prepared text with data.packing = "concat" or "rows" and without data.carry'
                )
        if self.carry:
            other = next((name for name, given in kinds.items() if given and "." in name), "")
            refused = {
                "data.shuffle = true: rows follow in the order of the documents; set it to false": self.shuffle,
                f'data.packing = "{self.packing}": no row goes on with a document; set it to "concat"':
                    self.packing != "concat",
                "data.mixture: rows of one dataset follow each other; set data.path": bool(self.mixture),
                f"data.{other}: it is for prepared text; set data.path": bool(other),
                "data.skip_damaged = true: a row that is left out breaks a lane; set it to false": self.skip_damaged,
            }  # fmt: skip
            for problem, holds in refused.items():
                if holds:
                    raise ValueError(f"data.carry cannot be used with {problem}")
        if self.synthetic.task and self.packing != "rows":
            raise ValueError(
                f'the samples of data.synthetic.task are rows of one document each: set data.packing = "rows", '
                f'not "{self.packing}"'
            )


def datasets_of(config: DataConfig | ImagesConfig, split: str = "train") -> dict[str, float]:
    """Returns the prepared datasets that a split is read from, each with its weight; {} where none are named."""
    if split == "validation" and config.validation_path:
        return {config.validation_path: 1.0}
    return dict(config.mixture) or ({config.path: 1.0} if config.path else {})


def _check_datasets(config: DataConfig | ImagesConfig, table: str) -> None:
    for name in ("path", "mixture", "validation_path"):
        refuse_secrets(getattr(config, name), f"{table}.{name}")
    if config.path and config.mixture:
        raise ValueError(f"{table}.path and {table}.mixture are both given: keep one of them")
    for path, weight in config.mixture.items():
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
            raise ValueError(f"{table}.mixture: the weight of {path} must be a positive number, got {weight}")


def _is_range(values: tuple[float, ...]) -> bool:
    return len(values) == 2 and 0 < values[0] <= values[1]
