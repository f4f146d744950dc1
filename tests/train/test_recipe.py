"""Configuration: precedence, round trip, and errors that name the nearest key."""

import dataclasses

import pytest
from failures import each

from matmix.train.entry import main
from matmix.train.optim.config import RuleConfig
from matmix.train.recipe import config_to_dict, differences, load_config, load_phases, write_config
from matmix.train.recipe_files import bundled_recipes, find_recipe


@pytest.fixture
def recipe(tmp_path):
    def write(text: str):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write


@each("name", list(bundled_recipes()))
def test_bundled_recipes_are_valid_and_survive_a_round_trip(name, tmp_path):
    for config in load_phases(name):
        write_config(config, tmp_path / "config.toml")
        assert load_config(str(tmp_path / "config.toml")) == config


def test_a_byte_order_mark_is_no_part_of_a_recipe(recipe):
    assert load_config(recipe("\ufeffsteps = 7\r\n")).steps == 7


def test_command_line_wins_over_recipe_and_recipe_over_defaults(recipe):
    path = recipe("steps = 7\n[optimizer]\nlr = 0.5\nweight_decay = 0\n")
    config = load_config(path, ["--optimizer.lr", "3e-4", "--data.mixture", "a", "1", "b", "2.5"])
    assert (config.steps, config.optimizer.lr, config.optimizer.weight_decay) == (7, 3e-4, 0.0)
    assert isinstance(config.optimizer.weight_decay, float)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.mixture == {"a": 1.0, "b": 2.5}
    assert config.run_dir == "runs/mine"


@pytest.mark.parametrize("underscored", [True, False])
def test_keys_may_be_written_with_underscores_or_hyphens(recipe, underscored):
    flag = "--optimizer.weight_decay" if underscored else "--optimizer.weight-decay"
    assert load_config(recipe(""), [flag, "0.5"]).optimizer.weight_decay == 0.5


RATES = ("lr", "eps", "embedding_lr", "weight_decay")


@each(
    "text, words",
    [
        ("[optimizer]\nlearning_rate = 1", ['unknown key "optimizer.learning_rate"', "nearest", "optimizer."]),
        ("stesp = 3", ['unknown key "stesp"', '"steps"']),
        ("[optimzer]\nlr = 1", ['unknown key "optimzer"', '"optimizer"']),
        ("lr = 1", ['unknown key "lr"', '"optimizer.lr"']),
        ("[optimizer]\nlr = 'fast'", ['"optimizer.lr"', "float", "'fast'"]),
        *((f"[optimizer]\n{name} = inf", [f"optimizer.{name} must be", "finite, got inf"]) for name in RATES),
        ("steps = 2.5", ['"steps"', "int", "2.5"]),
        ("optimizer = 3", ['"optimizer" is a table']),
        ("[model]\nlayers = 'mru'", ['"model.layers" is a list', "write layers = ['mru']"]),
        ("[model]\nlayers = [1]", ["model.layers", "a list of strings, got [1]"]),
        ("[model]\nd_model = 'wide'", ["model.d_model", "int", "wide"]),
        ("[objective]\nname = 'causal'", ["objective.name", "'causal'", "'causal_lm'", "masked_lm"]),
        ("steps = 0", ["steps must be >= 1"]),
        ("steps = \n", ["not valid TOML", "line 1"]),
        ("[data]\nseqlen = 0", ["seqlen"]),
        ("[model.mixers.mru]\nhead = 3", ['"model.mixers.mru.head"', "nearest"]),
        ("[objective]\nname = 'masked_lm'", ["masked_lm", "encoder", "language_model"]),
        ("[optimizer.rule]\nmatch = '*'\nlr = 1", ["[[optimizer.rule]] is a list of tables"]),
        ("[[optimizer.rule]]\nlr = 1", ["[[optimizer.rule]] has no match"]),
        ("[[optimizer.rule]]\nmatch = '*'\nclpi = 1", ['"clpi"', '"clip"']),
        ("[[optimizer.rule]]\nmatch = '*'\nlr = 'fast'", ['[[optimizer.rule]]: "lr"', "'fast'"]),
        ("[[optimizer.rule]]\nmatch = [1]\nlr = 1", ['[[optimizer.rule]]: "match"']),
        ("[[optimizer.rule]]\nmatch = '*'\nlr = -1", ['optimizer.rule "*"', "lr = -1"]),
        ("[[optimizer.rule]]\nmatch = '*'", ['optimizer.rule "*" changes nothing']),
    ],
)
def test_a_bad_recipe_is_one_line_that_names_file_and_key(recipe, text, words):
    path = recipe(text)
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        load_config(path)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@each(
    "arguments, words",
    [
        (["--optimizer.lrr", "1"], ["optimizer.lrr", "optimizer.lr"]),
        (["--optimizer.lr", "fast"], ["--optimizer.lr", "fast"]),
        (["--optimizer.lr"], ["--optimizer.lr"]),
        (["--objective.name", "x"], ["objective.name", "causal_lm"]),
        (["surprise"], ["surprise"]),
        (["--steps", "0"], ["steps must be >= 1"]),
        (["--optimizer.rule", "lr=1"], ["--optimizer.rule", "{KEY = VALUE, ...}", "lr=1"]),
        (["--optimizer.rule", "{match = '*', lrr = 1}"], ['"lrr"', '"lr"']),
        (["--optimizer.rule", "{match = '*', clip = 0}"], ["clip = 0"]),
        (["--optimizer.rule", "{match = 3, lr = 1}"], ["match"]),
    ],
)
def test_a_bad_argument_is_one_line(recipe, arguments, words):
    with pytest.raises(ValueError, match="command line") as error:
        load_config(recipe(""), arguments)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_rules_of_a_recipe_the_command_line_and_the_written_config(recipe, tmp_path, capsys):
    path = recipe(
        "[[optimizer.rule]]\nmatch = '*.a'\nlr = 1\n[[optimizer.rule]]\nmatch = ['*.b', 'c']\nweight_decay = 0"
    )
    config = load_config(path, ["--optimizer.lr", "1e-3"])
    rules = (RuleConfig(match="*.a", lr=1.0), RuleConfig(match=("*.b", "c"), weight_decay=0.0))
    assert config.optimizer.rule == rules
    write_config(config, tmp_path / "config.toml")
    assert load_config(str(tmp_path / "config.toml")).optimizer == config.optimizer
    given = load_config(
        path, ["--optimizer.rule", "{match = '*.d', clip = inf}", "{match = ['*.b', 'c'], weight_decay = 0}"]
    )
    assert given.optimizer.rule == (RuleConfig(match="*.d", clip=float("inf")), rules[1])
    words = ["--optimizer.rule", "{match = '*.d', clip = inf}", "--steps", "7"]
    twice = load_config(path, [*words, "--optimizer.rule={match = ['*.b', 'c'], weight_decay = 0}", "--seed", "3"])
    assert (twice.optimizer.rule, twice.steps, twice.seed) == (given.optimizer.rule, 7, 3)
    assert load_config(path, ["--optimizer.rule"]).optimizer.rule == ()
    with pytest.raises(SystemExit, match="0"):
        main([path, "--help"])
    assert '{match = ["*.b", "c"],' in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_missing_recipe_names_the_nearest():
    with pytest.raises(FileNotFoundError, match="mru_shakespeare"):
        find_recipe("mru_shakespear")


@pytest.mark.parametrize("name", ["glue_rte", "glue/glue_rte.toml", "train/recipes/glue/glue_rte.toml"])
def test_bundled_recipes_are_found_by_name_and_by_the_end_of_their_path(name):
    assert find_recipe(name).name == "glue_rte.toml"
    with pytest.raises(FileNotFoundError, match="did you mean"):
        find_recipe("other/glue_rte.toml")


def test_differences_are_listed_by_dotted_key(recipe):
    config = load_config(recipe(""))
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=1.0))
    assert differences(config_to_dict(config), other) == [("optimizer.lr", config.optimizer.lr, 1.0)]


def test_options_of_mixers_that_no_layer_holds_are_no_difference(recipe):
    """So an entry that a comparison gains, with options of its mixer for all, leaves the runs of the others alone."""
    model = '[model]\nlayers = ["attention"]\n[model.mixers]\n'
    config, other = load_config(recipe(model)), load_config(recipe(model + "rwkv7 = { headdim = 32 }"))
    assert other.model.mixers != config.model.mixers
    assert differences(config_to_dict(config), other) == differences(config_to_dict(other), config) == []
    other = load_config(recipe(model + "attention = { headdim = 32 }"))
    assert [key for key, _, _ in differences(config_to_dict(config), other)] == ["model.mixers.attention.headdim"]


@pytest.mark.parametrize(
    ("global_batch", "micro", "ranks", "words"),
    [(10, 0, 4, ["10", "4 ranks", "8 or 12"]), (2, 0, 4, ["use 4"])],
)
def test_a_batch_that_does_not_divide_names_sizes_that_do(recipe, global_batch, micro, ranks, words):
    config = load_config(recipe(f"global_batch_size = {global_batch}\nmicro_batch_size = {micro}"))
    with pytest.raises(ValueError, match="does not divide") as error:
        config.micro_batch(ranks)
    for word in words:
        assert word in str(error.value)


@each("ranks", [1, 2, 4, 8, 128, 1024])
def test_the_micro_batch_is_at_most_what_the_recipe_says_on_any_number_of_ranks(recipe, ranks):
    """So that one command starts on a laptop, and resumes on a thousand GPUs."""
    config = load_config(recipe("global_batch_size = 1024\nmicro_batch_size = 48"))
    micro, share = config.micro_batch(ranks), 1024 // ranks
    assert micro == min(32, share)
    words = config.micro_batch_words(ranks)
    assert f"passes have {micro} sequences" in words
    assert f"a rank's {share} (" in words
    exact = dataclasses.replace(config, micro_batch_size=micro)
    assert (exact.micro_batch(ranks), exact.micro_batch_words(ranks)) == (micro, "")


@each("word, value", [("true", True), ("False", False), ("no", False), ("YES", True)])
def test_booleans_in_their_common_spellings(recipe, word, value):
    file = recipe("")
    for words in (["--data.shuffle", word], [f"--data.shuffle={word}"]):
        assert load_config(file, words).data.shuffle is value
    with pytest.raises(ValueError, match="maybe"):
        load_config(file, ["--data.shuffle", "maybe"])


def test_help_shows_the_options_of_the_mixers_in_use(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["debug_mru", "--help"])
    shown = capsys.readouterr().out
    assert "--model.mixers.mru.order" in shown
    assert "--model.mixers.hydra" not in shown
    with pytest.raises(SystemExit, match="0"):
        main(["debug_mru", "--model.layers", "hydra", "--help"])
    assert "--model.mixers.hydra.d-state" in capsys.readouterr().out


def test_options_of_mixers_that_no_layer_is_are_kept_only_where_they_were_set(recipe, tmp_path):
    config = load_config(recipe("[model.mixers.attention]\nheaddim = 16"), ["--model.mixers.mru.order", "4"])
    assert set(config_to_dict(config)["model"]["mixers"]) == {"attention", "mru", "matrix_memory"}
    write_config(config, tmp_path / "config.toml")
    assert load_config(str(tmp_path / "config.toml")) == dataclasses.replace(config, run_dir="runs/mine")
