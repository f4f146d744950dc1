"""`matmix recipes` and `matmix --version`: what a newcomer starts from."""

from importlib.metadata import version

from matmix.launch.cli import main
from matmix.train.recipe import load_config
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes


def test_every_bundled_recipe_has_a_line_that_fits(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*bundled_recipes(), *bundled_comparisons()):
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert len(line) <= 120
        assert len(line.split()) > 4


def test_a_printed_recipe_loads_as_the_bundled_one(tmp_path, capsys):
    assert main(["recipes", "hydra_shakespeare"]) == 0
    mine = tmp_path / "hydra_shakespeare.toml"
    mine.write_text(capsys.readouterr().out)
    assert load_config(str(mine)) == load_config("hydra_shakespeare")


def test_an_unknown_name_is_one_line(capsys):
    assert main(["recipes", "hydra_shakespear"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'did you mean "hydra_shakespeare"?' in line


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["matmix", version("matmix")]


def test_help_names_the_recipes_that_a_verb_takes(capsys):
    for verb, some, others in (
        ("compare", "quickstart", "hydra_shakespeare,"),
        ("ladder", "ladder_small", "hydra_shakespeare,"),
        ("train", "hydra_shakespeare", "quickstart"),
    ):
        assert main([verb, "--help"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bundled recipes: ")]
        assert some in line
        assert others not in line
