"""Reading and writing shards loads of the libraries what they need, and no more."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from matmix.data.config import DataConfig
from matmix.data.modalities import build_loader

config = DataConfig(path=sys.argv[1], seqlen=24, workers=0)
next(iter(build_loader(config, global_batch_size=4, micro_batch_size=4)))
print(sorted({"streaming", "transformers", "sklearn", "scipy"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_reader_imports_of_streaming_the_codec(small):
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, str(small)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]"], done.stderr
