"""Random numbers that depend on what they are for, and on nothing else.

Every draw in the data room comes from Philox, a counter-based generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011): the key is (seed, epoch), and the upper two words of the 256-bit counter name the purpose and
the item. Streams of different items cannot overlap, and no process keeps a generator whose state would have to be
saved.
"""

import numpy as np

SHARDS, DOCUMENTS, WINDOWS, MASKS, GENERATED_TRAINING, GENERATED_VALIDATION, GENERATED_ANSWERS, EXAMPLES = range(8)
AUGMENTATION, MIXING, INPUT_ORDER, RATES, STRANDS = range(8, 13)
"""The purposes: order of shards in an epoch, of documents in a block, of sequences in a block; masking
of a sample; a generated sample of the training split, of the validation split, and to count answers with;
order of labelled examples in an epoch; augmentation of a picture, mixing of those of a step; order in which the
pictures of a folder are prepared; where the rates of masking begin; which documents of a sample
are read from the other strand."""

_WORD = (1 << 64) - 1


def generator(seed: int, epoch: int, purpose: int, item: int, *, skip: int = 0) -> np.random.Generator:
    """Returns the generator of one item: the same for the same four numbers, on any process and machine. skip: how many
    of its words are left out, of which each uniform float64 takes one."""
    key = np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, item & _WORD, purpose], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter)
    if skip:
        words.advance(skip // 4)  # each number of the counter gives four
        words.random_raw(skip % 4)
    return np.random.Generator(words)
