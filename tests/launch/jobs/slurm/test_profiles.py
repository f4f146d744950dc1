"""Site profiles: where they are found, how they combine with the command line, and what they refuse."""

import pytest
from failures import each

from matmix.launch.jobs.slurm.options import SlurmOptions, from_layers, load_profile, profiles_path

FILE = """
default = "small"

[small]
partition = "debug"
tasks_per_node = 2

[big]
partition = "gpu"
gpus_per_node = 4
setup = ["module load CUDA"]
sbatch = ["exclusive"]
env = { A = "1", B = "two words" }
"""


@pytest.fixture
def clusters(tmp_path, monkeypatch):
    path = tmp_path / "clusters.toml"
    path.write_text(FILE)
    monkeypatch.setenv("MATMIX_CLUSTERS", str(path))
    return path


def test_the_file_lies_where_configuration_does(tmp_path, monkeypatch):
    monkeypatch.delenv("MATMIX_CLUSTERS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert profiles_path() == tmp_path / "matmix" / "clusters.toml"
    assert load_profile(None) == {}
    profiles_path().parent.mkdir()
    profiles_path().write_text(FILE)
    assert load_profile(None)["partition"] == "debug"


def test_the_command_line_beats_the_profile_and_adds_to_its_lists(clusters):
    given = {"partition": "long", "nodes": 8, "qos": None, "sbatch": ["constraint=h100"], "env": ["B=3", "C"]}
    options = from_layers(load_profile("big"), given)
    assert (options.partition, options.nodes, options.gpus, options.qos) == ("long", 8, 4, "")
    assert options.sbatch == ("exclusive", "constraint=h100")
    assert options.env == {"A": "1", "B": "3", "C": None}
    assert options.setup == ("module load CUDA",)


def test_a_value_may_hold_an_equals_sign(clusters):
    assert from_layers({}, {"env": ["FLAGS=--a=b", "EMPTY="]}).env == {"FLAGS": "--a=b", "EMPTY": ""}


@each(
    "limit, seconds",
    [("5", 300), ("5:30", 330), ("1:00:05", 3605), ("1-2", 93600), ("1-2:30", 95400), ("2-00:00:01", 172801)],
)
def test_a_limit_must_leave_time_before_saving(limit, seconds):
    assert SlurmOptions(time=limit, save_seconds=seconds - 1).time == limit
    with pytest.raises(ValueError, match=f"time {limit} must be longer than save_seconds = {seconds}"):
        SlurmOptions(time=limit, save_seconds=seconds)


def test_no_limit_is_long_enough():
    assert [SlurmOptions(time=limit).time for limit in ("", "0", "UNLIMITED")] == ["", "0", "UNLIMITED"]


WRONG = {
    "unknown profile": ("[big]\n", "bigg", ["bigg", '"big"']),
    "unknown key": ('[big]\npartitoin = "gpu"\n', "big", ["[big]", "partitoin", '"partition"']),
    "type": ('[big]\nnodes = "two"\n', "big", ["nodes", "should be int", "'two'"]),
    "list": ('[big]\nsetup = "module load"\n', "big", ["setup", "is a list", "setup = ['module load']"]),
    "not a table": ('big = "gpu"\n', "big", ["big", "table"]),
    "not TOML": ("[big\n", "big", ["clusters.toml", "TOML"]),
    "default": ('default = "huge"\n[big]\n', None, ["huge", '"big"']),
}


@each("case", WRONG)
def test_mistakes_name_file_and_key(case, clusters):
    text, name, words = WRONG[case]
    clusters.write_text(text)
    with pytest.raises(ValueError, match=r"clusters\.toml") as caught:
        load_profile(name)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_was_named_must_exist(clusters):
    clusters.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        load_profile(None)
