"""The table [data.examples] of a recipe: files of labelled examples, in place of a prepared dataset."""

from dataclasses import dataclass, field


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
        if self.stride < 0:
            raise ValueError(f"data.examples.stride must be 0 or more, got {self.stride}")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("data.examples.labels names a class twice")
        if self.validation and not self.train:
            raise ValueError("data.examples has no train: name the training examples, too")

    def path(self, split: str) -> str:
        """The file of a split. Raises ValueError (one line) where there is none."""
        if not (path := getattr(self, split)):
            raise ValueError(f"no examples given: set data.examples.{split} to a file or a folder")
        return path
