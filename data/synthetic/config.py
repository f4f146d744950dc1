"""Which task is generated, and how large it is: the `[data.synthetic]` table of a recipe."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    task: str = ""
    """Task whose samples are generated while training, in place of a prepared dataset: parity, s3, a5, s5, mqar,
    selective_copying or listops, or your own "package.module:Name". Empty = none."""
    symbols: int = 32
    """mqar: keys, and as many values; selective_copying: tokens that may have to be copied."""
    items: int = 8
    """mqar: pairs of a key and a value in a sample; selective_copying: tokens to copy in a sample."""
    depth: int = 5
    """listops: operators inside one another, at most."""
    arguments: int = 5
    """listops: arguments of an operator, at most."""
    validation_samples: int = 512
    """Samples of the validation split. The training split has no end."""
    eval_lengths: tuple[int, ...] = ()
    """Multiples of data.seqlen at which accuracy is measured after the last step; empty = those of 1, 2, 4 and 8 that
    the model can take."""

    def __post_init__(self) -> None:
        least = {"symbols": 2, "items": 1, "depth": 1, "arguments": 2, "validation_samples": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"data.synthetic.{name} must be at least {low}, got {getattr(self, name)}")
        for multiple in self.eval_lengths:
            if multiple < 1:
                raise ValueError(f"data.synthetic.eval_lengths must be multiples of 1 or more, got {multiple}")
