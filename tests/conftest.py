"""Small prepared datasets that many tests train on; Triton kernels on machines without a GPU."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch
import triton_on_cpu
from hypothesis import HealthCheck, settings
from messages import Heard

gc.disable()  # until all tests are collected: there is no garbage among imports
# One thread per process, here and in those that tests start: they run in parallel, and runs that have to be the same
# bit for bit are only so with as many threads.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
# No test pulls the plug, and waiting for the disk took longer than the steps of a small run; processes that tests start
# do wait.
os.fsync = os.fstat
# One width of the terminal: help pages wrap, and lay boxes side by side, as it says.
os.environ["COLUMNS"] = "100"

# No verdict on how fast a machine makes or tries examples.
_ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("the same everywhere", derandomize=True, **_ANY_MACHINE)
settings.register_profile("others", derandomize=False, **_ANY_MACHINE)

if not torch.cuda.is_available():
    triton_on_cpu.import_kernels()


def pytest_addoption(parser):
    parser.addoption(
        "--seed", type=int, default=0, help="what tests draw starts from; other than 0: other examples too"
    )


def pytest_configure(config):
    settings.load_profile("others" if config.getoption("--seed") else "the same everywhere")


def pytest_collection_finish():
    _keep_imports(look_through=False)  # what little garbage there is may stay: to find it takes a second
    gc.enable()


_modules = 0
"""How many there were when what they hold was put aside."""


def _keep_imports(look_through: bool = True) -> None:
    """What has been imported stays: each run of a test collects garbage, and would look through all of it again."""
    global _modules
    if len(sys.modules) >= _modules + 100:
        if look_through:
            gc.collect()
        gc.freeze()
        gc.collect()  # all garbage is looked for once there is a quarter more than this one finds: next to nothing
        _modules = len(sys.modules)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config) -> int:
    """With -n auto: two more than there are cores, since tests of real processes, Slurm's above all, mostly wait."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 2


_ON_ONE_WORKER = ("/slurm/", "/distributed/", "/docs/", "/export/", "/faults/", "security/test_bombs.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n: the tests of some folders go to one worker each, so that what they share is made once: the cluster, the
    groups of ranks, exported models, runs that nothing happened to. All others go one by one to whoever is free."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((part for part in _ON_ONE_WORKER if part in file), nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _seed(request):
    """Every test draws the same numbers, whichever tests ran before it in the same process."""
    torch.manual_seed(request.config.getoption("--seed"))


@pytest.fixture(autouse=True)
def _no_process_group_stays():
    """A test that leaves a process group behind fails, and not the tests after it that meet the group."""
    yield
    left = torch.distributed.is_initialized()
    if left:
        torch.distributed.destroy_process_group()
    assert not left, "this test left a process group behind: use `with Distributed.from_environment(...)`"


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """No test and no fixture that lives longer leaves the variables of ranks behind, as DeepSpeed and accelerate do.

    A later test in the same process would take itself for one rank of many, and wait for the others.
    """
    before = {name: os.environ.get(name) for name in _RANK_VARIABLES}
    result = yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _keep_imports()
    return result


@pytest.fixture
def told() -> Iterator[Heard]:
    """What is said to people from here on."""
    heard = Heard()
    yield heard
    heard.close()


@pytest.fixture
def interpreter(monkeypatch) -> str:
    """Triton kernels run: on the GPU if there is one, else interpreted on the CPU. Returns the device to use."""
    if torch.cuda.is_available():
        return "cuda"
    triton_on_cpu.interpret(monkeypatch)
    return "cpu"


@pytest.fixture
def launched() -> Iterator[list]:
    """The launches of Triton kernels from here on."""
    from matmix.kernels.launching import record_launches

    with record_launches(run=True) as launches:
        yield launches


_WORDS = [
    *("the", "a", "king", "queen", "sword", "crown", "night", "day", "love", "death", "honour", "grief"),
    *("speaks", "rises", "falls", "gives", "takes", "brings", "to", "from", "with", "under", "over", "and"),
    *("but", "nor", "yet", "soft", "cold", "bright", "bitter", "gentle", "noble", "thy", "my", "his", "her"),
]


def write_corpus(path, documents: int = 160, seed: int = 0) -> None:
    """A jsonl file of made-up verses, 3 to 60 words each, whose next word depends on the one before."""
    draw = random.Random(seed)
    followers = {word: draw.sample(_WORDS, 4) for word in _WORDS}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            words = [draw.choice(_WORDS)]
            for _ in range(draw.randint(2, 59)):
                words.append(draw.choice(followers[words[-1]]))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> str:
    """A prepared dataset of a few thousand tokens (MDS, zstd) with both splits."""
    from matmix.data.prepare.command import prepare
    from matmix.data.prepare.text import PrepareConfig

    folder = tmp_path_factory.mktemp("dataset")
    write_corpus(folder / "verses.jsonl")
    prepare(
        PrepareConfig(
            inputs=(str(folder / "verses.jsonl"),),
            out=str(folder / "prepared"),
            vocab_size=320,
            validation_fraction=0.1,
            processes=1,
        )
    )
    return str(folder / "prepared")
