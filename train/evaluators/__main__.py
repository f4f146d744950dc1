"""`python -P -m matmix.train.evaluators RUN`: prints what the summary of a finished run says about context."""

import sys
from pathlib import Path

from matmix.data.artifacts import read_json
from matmix.train.evaluators.context import context_words

if __name__ == "__main__":
    print(*context_words(read_json(Path(sys.argv[1]) / "summary.json")["validation"]), sep="\n")
