"""Reading a shard loads of mosaicml-streaming what reading needs, and leaves the library whole for others."""

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
WHOLE = """
import streaming
import streaming.base.util
from streaming.base.storage import CloudDownloader
from streaming.base.format.mds.reader import MDSReader
print(streaming.StreamingDataset.__module__, streaming.base.format.mds.reader.MDSReader is MDSReader)
print(streaming.text.StreamingC4.__mro__[1] is streaming.base.StreamingDataset, hasattr(streaming, "nothing"))
"""


def printed(program, path):
    done = subprocess.run([sys.executable, "-P", "-c", program, str(path)], capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr


def test_a_reader_imports_no_transformers(small):
    lines, error = printed(PROGRAM, small)
    assert lines == ["['streaming']"], error


@pytest.mark.slow
def test_the_library_stays_whole(small):
    lines, error = printed(PROGRAM + WHOLE, small)
    assert lines == ["['streaming']", "streaming.base.dataset True", "True False"], error
