"""No URL with a password or a key gets anywhere, and no message repeats it."""

from __future__ import annotations

import pytest
from failures import each

from matmix.data.config import DataConfig
from matmix.data.prepare.merge import merge
from matmix.data.prepare.text import PrepareConfig
from matmix.data.prepare.text.preparation import TextPreparation
from matmix.data.splits.reader import open_dataset
from matmix.data.storage.remote import RemoteFolder, has_secret
from matmix.launch.cli import main
from matmix.train.config import RunConfig
from matmix.train.recipe import load_config
from matmix.train.recipe_files import read_toml
from matmix.train.run.trained import fetch_run, local_outline

SECRET = "hunter2+abc"
WITH_SECRETS = [
    f"s3://AKIA:{SECRET}@bucket/x",
    f"s3://AKIA:{SECRET}/with/slashes@bucket/x",
    f"sftp://me:{SECRET}@host/x",
    f"https://host/x?token={SECRET}",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Expires=5&X-Amz-Signature={SECRET}",
    f"https://account.blob.core.windows.net/x?sv=2020&sig={SECRET}",
    f"simplecache::s3://AKIA:{SECRET}@bucket/x",
]
WITHOUT = [
    "s3://bucket/x",
    "sftp://me@host/x",
    "sftp://me@host:22/x",
    "hdfs://host:8020/a@b",
    "file:///a:b/c@d",
    "runs/lr=1e-3,a@b",
    "https://host/x?page=2",
    "a:b@c",
]


@each("url", WITHOUT)
def test_other_urls_and_paths_are_let_through(url):
    assert not has_secret(url)


@each("url", WITH_SECRETS)
def test_every_option_refuses_it_without_repeating_it(url, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'run_dir = "runs/x"\n[data.mixture]\n"{url}" = 1.0\n')
    for use in (
        lambda: DataConfig(path=url),
        lambda: DataConfig(mixture={"a": 1.0, url: 2.0}),
        lambda: DataConfig(validation_path=url),
        lambda: PrepareConfig(inputs=(url,), out="x"),
        lambda: PrepareConfig(inputs=("x",), out=url),
        lambda: merge(url, TextPreparation),
        lambda: RunConfig(run_dir=url),
        lambda: open_dataset(url),
        lambda: read_toml(recipe),
        lambda: load_config(str(recipe)),
    ):
        with pytest.raises(ValueError, match="may not hold a password") as raised:
            use()
        assert "hunter2" not in str(raised.value)
        assert "\n" not in str(raised.value)
    if "::" not in url:  # where a URL of a run is known by its beginning
        for use in (RemoteFolder, fetch_run, local_outline, load_config):
            with pytest.raises(ValueError, match="may not hold a password") as raised:
                use(url)
            assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("option", ["--data.path", "--run-dir"])
def test_the_command_line_of_a_rank_refuses_it(option):
    with pytest.raises(ValueError, match="may not hold a password") as raised:
        load_config("debug_mru", [option, WITH_SECRETS[0]])
    assert "hunter2" not in str(raised.value)


@each(
    "words",
    [
        ["train", "debug_mru", "--data.path", "URL"],
        ["train", "URL"],
        ["prepare", "URL", "--out", "x"],
        ["prepare", "x.txt", "--out=URL"],
        ["prepare", "--merge", "--out", "URL"],
        ["export", "URL", "--out", "x"],
        ["generate", "URL", "--prompt", "x"],
        ["compare", "URL"],
        ["checkpoints", "URL"],
        ["show-mixer", "URL", "--text", "x"],
        ["import", "--from", "hydra", "URL", "x"],
        ["launch", "slurm", "debug_mru", "--sweep", "data.path=a,URL"],
        ["launch", "local", "debug_mru", "--run-dir", "URL"],
    ],
)
def test_the_command_refuses_it_before_anything_is_written(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("URL", WITH_SECRETS[0]) for word in words]) == 2
    out, err = capfd.readouterr()
    assert "may not hold a password" in err
    assert "hunter2" not in out + err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
