"""Folders at places that can be guessed: another user who was there first gets nothing to replace or to follow."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from matmix.data.storage.private import check_named, private_folder, standard_folder
from matmix.data.storage.remote import SCRATCH_VARIABLE, scratch_folder
from matmix.data.storage.storage import Storage
from matmix.launch.jobs.rank import defaults

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
OTHER_USER = 54321


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    (folder / "inductor").mkdir()
    for path in (folder, folder / "inductor"):
        path.chmod(0o777)


def _open_to_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o775)


def _link(folder: Path) -> None:
    target = folder.with_name("attackers")
    target.mkdir()
    folder.symlink_to(target)


def _of_another_user(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give folders away")
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER_USER, OTHER_USER)


TAKEN = [_open_to_all, _open_to_a_group, _link, _of_another_user]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def shared(tmp_path) -> Path:
    """A folder as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("take", TAKEN)
def test_compilers_do_not_use_what_another_user_made(take, shared, told):
    taken = shared / f"matmix-{os.getuid()}"
    take(taken)
    first, second = (defaults({"MATMIX_NODE_DISK": str(shared)}) for _ in range(2))
    for name in _CACHES:
        cache = Path(first[name])
        assert not cache.resolve().is_relative_to(taken.resolve())
        assert cache.parent.parent == shared
        assert (cache.stat().st_uid, mode(cache), mode(cache.parent)) == (os.geteuid(), 0o700, 0o700)
        assert second[name] == first[name]  # what was compiled is found again
    [warning] = set(told)
    assert warning.startswith(f"warning: {taken}") or f" {taken} " in warning
    assert "is used in its place" in warning


def test_own_folders_are_used_without_a_word(shared, capsys):
    first, second = (defaults({"MATMIX_NODE_DISK": str(shared)}) for _ in range(2))
    assert first == second
    assert Path(first["TRITON_CACHE_DIR"]) == shared / f"matmix-{os.getuid()}" / "triton"
    assert mode(shared / f"matmix-{os.getuid()}") == 0o700
    assert capsys.readouterr().err == ""


def test_every_start_sets_the_caches_before_torch_would_choose_them(shared):
    """Also those that no launcher prepares: torch's own choice is /tmp/torchinductor_<user>."""
    code = (
        "import os, sys; from matmix.train.process.console import begin_training; "
        f"assert begin_training() == 0; print(*(os.environ[n] for n in {_CACHES})); "
        "assert 'torch' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name not in _CACHES}
    environment |= {"TMPDIR": str(shared), "MATMIX_NODE_DISK": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.split():
        assert path.startswith(f"{shared}/matmix-{os.getuid()}/")


def test_a_named_cache_that_everybody_may_write_to_is_refused(shared):
    (shared / "cache").mkdir()
    (shared / "cache").chmod(0o777)
    named = {"MATMIX_NODE_DISK": str(shared), "TORCHINDUCTOR_CACHE_DIR": str(shared / "cache")}
    with pytest.raises(ValueError, match=r"TORCHINDUCTOR_CACHE_DIR = .*cannot be trusted: every user may write to"):
        defaults(named)
    (shared / "cache").chmod(0o770)  # a team's: the user has named it
    assert "TORCHINDUCTOR_CACHE_DIR" not in defaults(named)


def test_a_folder_below_one_that_anybody_may_rename_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="every user may replace what is in"):
        private_folder(tmp_path / "open" / "mine" / "cache")
    with pytest.raises(ValueError, match="every user may replace what is in"):
        check_named(tmp_path / "open" / "mine", "data.cache_dir")


def test_folders_above_are_made_private_as_well(tmp_path):
    old = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    assert [mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert standard_folder(made) == made


@pytest.mark.parametrize("take", [_open_to_all, _link, _of_another_user])
def test_scratch_of_runs_is_refused_where_another_user_was_first(take, tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path))
    take(tmp_path / "runs")
    with pytest.raises(ValueError, match=SCRATCH_VARIABLE):
        scratch_folder("runs", "s3://bucket/runs/a")


def test_scratch_that_umask_left_open_to_a_group_is_closed(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path))
    _open_to_a_group(tmp_path / "runs")
    assert scratch_folder("runs", "s3://bucket/runs/a").parent == tmp_path / "runs"
    assert mode(tmp_path / "runs") == 0o755


def test_shards_are_kept_where_nobody_else_can_replace_them(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    copy = tmp_path / "set"
    subprocess.run(["cp", "-r", dataset, str(copy)], check=True)
    subprocess.run(["rm", "-rf", str(copy / ".cache")], check=True)
    old = os.umask(0o002)
    try:
        storage = Storage(str(copy))
        storage.shard("train", storage.manifest.splits["train"].shards[0])
    finally:
        os.umask(old)
    assert storage.cache.parent == copy / ".cache"
    assert mode(copy / ".cache") == 0o700

    # Another user's folder in the same dataset is not read, nor a link followed.
    (copy / ".cache").rename(tmp_path / "theirs")
    (copy / ".cache").symlink_to(tmp_path / "theirs")
    assert Storage(str(copy)).cache.parent == tmp_path / "home" / "matmix" / "data"

    (tmp_path / "everybodys").mkdir()
    (tmp_path / "everybodys").chmod(0o777)
    with pytest.raises(ValueError, match=r"data\.cache_dir = .*cannot be trusted"):
        Storage(str(copy), cache_dir=str(tmp_path / "everybodys"))
