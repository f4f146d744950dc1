"""A tokenizer for a task: its tokens are words between spaces."""

from pathlib import Path

import tokenizers

from matmix.data.synthetic.task import GeneratedSamples
from matmix.data.tokenizer import FastTokenizer

_UNKNOWN, _PADDING, _MASK = "<unk>", "<pad>", "<mask>"


class TaskTokenizer(FastTokenizer):
    """The tokens of the task by their ids, then <unk>, <pad> and <mask>."""

    def __init__(self, task: GeneratedSamples) -> None:
        vocabulary = {name: index for index, name in enumerate((*task.tokens, _UNKNOWN))}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens([_UNKNOWN, _PADDING, _MASK])
        super().__init__(Path(f"the tokens of {task.name}"), backend.to_str(pretty=True).encode())
