"""Recipes of comparisons: what an entry is, equal parameters, equal data."""

import dataclasses
import os

import pytest
import torch
from comparisons import ENTRIES, TINY, VARIANTS
from nightly import nightly

from matmix.launch.lab.compare.config import keep_recipe, missing_controls, read_comparison, tasks_of
from matmix.launch.lab.compare.width import differing_keys, match_width, matched, words_on_differences
from matmix.launch.many.planned import matters
from matmix.model.build import count_parameters, headdims
from matmix.model.config import NO_MIXER, MixerOptions, ModelConfig
from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.train.entry import main as train_command
from matmix.train.loaders import make_loader
from matmix.train.optim.config import RuleConfig
from matmix.train.recipe import config_from_dict, config_to_dict, differences, load_config
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes

# -- recipes ------------------------------------------------------------------------------------------------------


def test_an_entry_is_the_recipe_with_its_own_keys_and_the_command_lines(recipe):
    comparison = read_comparison(recipe(TINY + ENTRIES), ["--steps", "7", "--model.mixers.hydra.d-state=2"])
    first, second = (entry.config for entry in comparison.entries)
    assert first.steps == second.steps == 7
    comparison = read_comparison(recipe("epochs = 2.0\n" + TINY + ENTRIES), ["--steps", "7"])
    assert [(entry.config.steps, entry.config.epochs) for entry in comparison.entries][:2] == [(7, 0)] * 2
    text = "epochs = 2.0\n" + TINY.replace("steps = 4\n", "") + ENTRIES + "steps = 5\n"
    _, own = (entry.config for entry in read_comparison(recipe(text)).entries)
    assert (own.steps, own.epochs) == (5, 0)
    _, own = (entry.config for entry in read_comparison(recipe(text), ["--epochs", "3"]).entries)
    assert own.epochs == 3
    assert (first.model.layers, second.model.layers) == (("attention",), ("hydra",))
    (begun, *_) = read_comparison(recipe(TINY + ENTRIES), ["--init.from", "runs/x"]).entries
    assert begun.config.init.from_ == "runs/x"
    assert second.model.mixers.hydra.d_state == 2
    assert second.model.mixers.hydra.headdim == 8
    assert [entry.folder for entry in comparison.entries] == ["attention", "Hydra-2-x"]
    assert str(comparison.home) == "runs/mine"


def test_entries_and_the_command_line_may_have_rules(recipe, tmp_path):
    own = (
        ENTRIES
        + "\n[[comparison.entry]]\nname = 'ruled'\n[[comparison.entry.optimizer.rule]]\nmatch = '*.up.weight'\nlr = 2"
    )
    *others, ruled = read_comparison(recipe(TINY + own)).entries
    assert [entry.config.optimizer.rule for entry in others] == [()] * len(others)
    assert ruled.config.optimizer.rule == (RuleConfig(match="*.up.weight", lr=2.0),)
    given = ["--optimizer.rule", "{match = '*.down.weight', clip = 1}", "--run-dir", str(tmp_path / "home")]
    comparison = read_comparison(recipe(TINY + own), given)
    keep_recipe(comparison)
    for entry in (*comparison.entries, *read_comparison(str(tmp_path / "home")).entries):
        assert entry.config.optimizer.rule == (RuleConfig(match="*.down.weight", clip=1.0),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[comparison]\nsedes = [1]", ["unknown key", "sedes", '"seeds"']),
        ("[comparison]\nseeds = [1, 1]", ["comparison.seeds", "twice"]),
        ("[comparison]\nseeds = 1", ["[comparison]", '"seeds" is a list']),
        ("[comparison]\ntolerance = 2", ["comparison.tolerance", "between 0 and 1"]),
        ("[comparison]", ["comparison.entry is empty"]),
        ("[comparison]\n[[comparison.entry]]\nsteps = 2", ["[[entry]] has no name"]),
        ("[comparison]\n[[comparison.entry]]\nname = 'a b'\n[[comparison.entry]]\nname = 'A-b'", ["share the folder"]),
        ("[comparison]\n[[comparison.entry]]\nname = 'report'", ["taken"]),
        ("[comparison]\n[[comparison.entry]]\nname = 'a'\nseed = 3", ["seed", "comparison.seeds"]),
        ("[comparison]\ncontrols = 'no'\n[[comparison.entry]]\nname = 'a'", ["[comparison]", "controls", "bool"]),
        ("[comparison]\n[[comparison.entry]]\nname = 'No mixer'", ["share the folder", "comparison.controls"]),
        (
            "[comparison]\n[[comparison.entry]]\nname = 'a'\n[[comparison.variant]]\ndata.seqlen = 8",
            ["[[variant]] has no name"],
        ),
        (
            "[comparison]\n[[comparison.entry]]\nname = 'a'\n[[comparison.variant]]\nname = 'b'\nrun_dir = 'c'",
            ['[[variant]]: "b" sets run_dir'],
        ),
        (
            "[comparison]\n[[comparison.entry]]\nname = 'a'\n[[comparison.variant]]\nname = 'b'\ndata.seqlem = 8",
            ['"a"', 'variant "b"', "seqlem", "data.seqlen"],
        ),
        ("[comparison]\nvariant = 3\n[[comparison.entry]]\nname = 'a'", ["[[comparison.variant]]"]),
        (
            "[comparison]\n[[comparison.entry]]\nname = 'a'\nmodel.layer = ['mru']",
            ['"a"', "model.layer", "model.layers"],
        ),
        ("[comparison]\n[[comparison.entry]]\nname = 'a'\nmodel.layers = ['hidra']", ['"a"', "hidra", "hydra"]),
        ("[comparison]\ntune = 3\n[[comparison.entry]]\nname = 'a'", ["tune", "a table"]),
        ("[comparison]\ntune.optimizer.lt = [1]\n[[comparison.entry]]\nname = 'a'", ["tune", '"optimizer.lr"']),
        ("[comparison]\ntune.seed = [1]\n[[comparison.entry]]\nname = 'a'", ["comparison.tune has seed", "seeds"]),
        ("[comparison]\ntune.steps = [3, 3]\n[[comparison.entry]]\nname = 'a'", ["values for steps", "twice"]),
        (
            "[comparison]\ntune_seed = 2\ntune.optimizer.lr = [1]\n[[comparison.entry]]\nname = 'a'",
            ["tune_seed", "not among the seeds"],
        ),
        (
            "[comparison]\ntune.optimizer.lr = [1]\n[[comparison.entry]]\nname = 'a'\noptimizer.lr = 1",
            ['"a" sets optimizer.lr', "comparison.tune"],
        ),
        ("", ["no table [comparison]", "matmix train"]),
    ],
)
def test_a_bad_comparison_is_one_line_that_names_file_and_key(recipe, text, words):
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        read_comparison(recipe(TINY + text))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["report", "speed.json", "Comparison.toml", "Finetune"])
def test_a_name_that_a_file_of_the_comparison_has_is_refused(recipe, name):
    with pytest.raises(ValueError, match="is taken by a file of the comparison"):
        read_comparison(recipe(TINY + f"[comparison]\n[[comparison.entry]]\nname = '{name}'"))


def test_overrides_may_repair_a_recipe_and_set_the_comparison(recipe):
    dense = '[[comparison.entry]]\nname = "dense"\nmodel.layers = ["dense"]\nsteps = 9\n'
    path = recipe(TINY + ENTRIES + dense + "model.mixers.dense.headdim = 8\nmodel.max_seqlen = 32\n")
    with pytest.raises(ValueError, match=r'mine\.toml: entry "dense": .* data\.packing = "rows"'):
        read_comparison(path)
    words = ["--data.packing", "rows", "--model.n-layers=1", "--steps", "3"]
    words += ["--comparison.seeds", "4", "5", "--comparison.parameters", "9000", "--comparison.tolerance", "0.2"]
    comparison = read_comparison(path, words)
    assert {entry.config.data.packing for entry in comparison.entries} == {"rows"}
    assert {entry.config.steps for entry in comparison.entries} == {3}  # also where an entry has its own
    settings = comparison.settings
    assert (settings.seeds, settings.parameters, settings.tolerance) == ((4, 5), 9000, 0.2)
    for wrong, text in (
        (["--model.d-model", "8"], "follow from comparison.parameters = 9,000"),
        (["--comparison.entry", "x"], "seeds, parameters, tolerance, controls, tune, tune_seed can be given"),
        (["--comparison.tune.optimizer.lr", "0.1"], """give the table, as in .* '{"optimizer.lr" = """),
        (["--steps", "x"], "steps"),
        (["--seed", "1"], "comparison.seeds"),
    ):
        with pytest.raises(ValueError, match=text):
            read_comparison(path, [*words, *wrong])


def test_the_folder_of_a_comparison_stands_for_its_recipe_with_overrides(recipe, tmp_path):
    first = read_comparison(recipe(TINY + ENTRIES), ["--steps", "7", "--run-dir", str(tmp_path / "home")])
    keep_recipe(first)
    (tmp_path / "home").rename(tmp_path / "moved")
    again = read_comparison(str(tmp_path / "moved"))
    assert again.home == tmp_path / "moved"
    assert again.settings == first.settings
    assert [entry.config.steps for entry in again.entries] == [7, 7]
    with pytest.raises(FileNotFoundError, match=r"no comparison\.toml"):
        read_comparison(str(tmp_path))


def test_two_commands_may_begin_a_comparison_at_once(recipe, tmp_path, monkeypatch):
    """As two that train other entries of it: neither takes away the file that the other is about to rename."""
    comparison = read_comparison(recipe(TINY + ENTRIES), ["--run-dir", str(tmp_path / "home")])

    def replace(*paths, original=os.replace):
        monkeypatch.setattr(os, "replace", original)
        with monkeypatch.context() as another:
            another.setattr(os, "getpid", lambda: 1)
            keep_recipe(comparison)
        original(*paths)

    monkeypatch.setattr(os, "replace", replace)
    keep_recipe(comparison)
    assert os.listdir(tmp_path / "home") == ["comparison.toml"]
    assert read_comparison(str(tmp_path / "home")).settings == comparison.settings


def test_comparisons_are_not_offered_for_training(capsys):
    assert not set(bundled_comparisons()) & set(bundled_recipes())
    assert train_command(["matrix_mixers_small"]) == 2
    assert "matmix compare matrix_mixers_small" in capsys.readouterr().err
    assert train_command(["--help"]) == 0
    assert "matrix_mixers" not in capsys.readouterr().out


# -- controls and variants ----------------------------------------------------------------------------------------

CONTROLLED = ENTRIES.replace("controls = false", "")


def test_controls_come_by_themselves_and_have_equally_many_parameters(recipe):
    words = ["--model.vocab-size", "64"]
    comparison = matched(read_comparison(recipe(TINY + CONTROLLED), words))
    assert [entry.control for entry in comparison.entries] == [None, None, "no mixer", "convolution only"]
    assert [entry.folder for entry in comparison.entries[2:]] == ["no-mixer", "convolution-only"]
    first, _, empty, convolution = comparison.entries
    assert empty.config.model.mixer_names() == []
    assert convolution.config.model.mixer_names() == ["convolution"]
    assert convolution.config.model.mixers.convolution.d_conv == 7  # Hydra's
    for control in (empty, convolution):
        assert abs(control.parameters / first.parameters - 1) <= 0.1
        assert control.config.data == first.config.data
        assert control.config.optimizer == first.config.optimizer
    without = read_comparison(recipe(TINY + CONTROLLED), [*words, "--comparison.controls", "False"])
    assert len(without.entries) == 2
    assert without.entries[0].title == "attention"


def test_a_control_that_the_recipe_has_is_not_added(recipe):
    own = '[[comparison.entry]]\nname = "empty"\nmodel.layers = ["none", "mlp"]\nmodel.mlp_ratio = 1.0\n'
    comparison = read_comparison(recipe(TINY + CONTROLLED + own))
    assert [entry.name for entry in comparison.entries] == ["attention", "Hydra, 2 x", "empty", "convolution only"]
    only_attention = TINY + CONTROLLED.split('[[comparison.entry]]\nname = "Hydra')[0]
    assert [entry.name for entry in read_comparison(recipe(only_attention)).entries] == ["attention", "no mixer"]


def test_rules_are_held_against_every_entry_before_any_is_trained(recipe):
    """Controls have them as far as they have the parameters."""
    words = ["--model.vocab-size", "64", "--model.mlp-ratio", "1.0"]
    rules = "[[optimizer.rule]]\nmatch = ['*.out_proj.weight', '*norm*']\nlr = 0.5\n"
    rules += "[[optimizer.rule]]\nmatch = '*.out_proj.weight'\nclip = 0.5\n"
    comparison = matched(read_comparison(recipe(TINY + rules + CONTROLLED), words))
    *entries, empty, convolution = [entry.config.optimizer.rule for entry in comparison.entries]
    assert entries == [convolution] * 2
    assert [len(rule.patterns) for rule in convolution] == [2, 1]
    assert empty == (RuleConfig(match=("*norm*",), lr=0.5),)
    with pytest.raises(ValueError, match=r'entry "attention": .*"\*\.in_proj\.weight" matches no parameter'):
        matched(read_comparison(recipe(TINY + rules.replace("out_proj", "in_proj") + CONTROLLED), words))


def test_a_control_that_cannot_be_matched_says_how_to_do_without(recipe):
    text = TINY.replace("[model]", "[model]\nvocab_size = 64") + CONTROLLED.replace(
        "tolerance = 0.1", "tolerance = 0.001"
    )
    text = text.split('[[comparison.entry]]\nname = "Hydra')[0]
    with pytest.raises(ValueError, match=r'entry "no mixer": no width .*--comparison\.controls False\)$'):
        matched(read_comparison(recipe(text)))
    others = matched(read_comparison(recipe(text)), only=["attention"]).entries  # which is asked for and can be
    assert "attention" in [entry.name for entry in others]
    assert "no mixer" not in [entry.name for entry in others]
    with pytest.raises(ValueError, match=r'^--only: no entry and no variant is called "atention"'):
        matched(read_comparison(recipe(text)), only=["atention"])


@pytest.mark.parametrize(
    ("d_conv", "causal", "taken"),
    [(5, True, 5), (4, True, 4), (3, False, 3), (11, False, 0)],
)
def test_the_convolution_by_itself_is_that_of_the_first_entry_it_can_be(d_conv, causal, taken):
    """A wider one than it knows is left for its own."""
    layer = "semiseparable" if causal else "toeplitz_dd"
    options = MIXERS[layer].Config(d_conv=d_conv, expand=1, conv_bias=False)
    model = ModelConfig(
        architecture="language_model" if causal else "encoder",
        layers=(layer,),
        mixers=MixerOptions(**{layer: options}),
    )
    found = missing_controls([model])["convolution only"]["model"]["mixers"]["convolution"]
    assert found.get("d_conv", 0) == taken
    assert "headdim" not in found
    MIXERS["convolution"].Config(**found)


def test_a_causal_convolution_is_not_taken_for_an_encoder():
    causal = ModelConfig(architecture="encoder", layers=("semiseparable",), causal_mixers=True)
    hydra = ModelConfig(architecture="encoder", layers=("hydra",))
    found = missing_controls([causal, hydra])["convolution only"]["model"]["mixers"]["convolution"]
    assert found["d_conv"] == 7
    assert missing_controls([causal])["convolution only"]["model"]["mixers"] == {"convolution": {}}
    mru = ModelConfig(layers=("mru",), d_model=64)
    blended = dataclasses.replace(mru, mixers=MixerOptions(mru=MIXERS["mru"].Config(shift="blend")))
    assert "convolution only" not in missing_controls([blended])
    found = missing_controls([mru])["convolution only"]["model"]["mixers"]["convolution"]
    assert found == {"d_conv": 4, "bias": False, "expand": 1, "project": False, "norm": False}


@pytest.mark.parametrize(
    ("name", "options", "reads"),
    [("mru", {"order": 4, "shift": "conv"}, "state_down"), ("matrix_memory", {}, "query_proj.weight")],
)
def test_the_convolution_by_itself_is_the_block_without_its_states(name, options, reads):
    """A model whose layers read nothing has its losses, at all widths."""
    options = MIXERS[name].Config(**options)
    mixer = MIXERS[name](32, options, causal=True, max_seqlen=9, output_std=0.02)
    alone = MIXERS["convolution"].Config(d_conv=4, **MIXERS[name].convolution_alone(options))
    control = MIXERS["convolution"](32, alone, causal=True, max_seqlen=9, output_std=0.02)
    for layer in (mixer, control):
        initialize(layer, 0)
    with torch.no_grad():
        mixer.get_parameter(reads).zero_()
    read_in = [mixer.gate_proj.weight, *([mixer.value_proj.weight] if alone.project else [])]
    control.load_state_dict(
        {
            "in_proj.weight": torch.cat(read_in),
            "out_proj.weight": mixer.out_proj.weight * mixer.skip,
            **{f"conv1d.{name}": value for name, value in mixer.conv1d.named_parameters()},
        }
    )
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(control(x), mixer(x))


def test_every_entry_meets_every_variant(recipe, tmp_path):
    own = '\n[[comparison.entry]]\nname = "long"\nsteps = 9\n'
    arguments = ["--model.vocab-size", "64", "--run-dir", str(tmp_path / "home"), "--comparison.tolerance", "0.2"]
    comparison = matched(read_comparison(recipe(TINY + ENTRIES + own + VARIANTS), arguments))
    assert [(entry.name, entry.variant) for entry in comparison.entries] == [
        (name, variant) for variant in ("short rows", "deep") for name in ("attention", "Hydra, 2 x", "long")
    ]
    facts = {
        entry.title: (c.data.seqlen, c.steps, c.model.n_layers) for entry in comparison.entries for c in [entry.config]
    }
    assert facts["attention, short rows"] == (16, 3, 2)
    assert facts["Hydra, 2 x, deep"] == (32, 4, 3)
    assert facts["long, short rows"] == (16, 9, 2)  # an entry's own value counts
    short, deep = comparison.by_variant()
    for part in (short, deep):  # parameters are equal within a variant
        assert {entry.target for entry in part.entries} == {part.entries[0].parameters}
    assert deep.entries[0].target > short.entries[0].target
    tasks = tasks_of(comparison)
    assert len({task.config.run_dir for task in tasks}) == len(tasks) == 12
    assert str(tasks[0].run.path) == str(tmp_path / "home/attention/short-rows/seed-0")
    given = read_comparison(recipe(TINY + ENTRIES + own + VARIANTS), [*arguments, "--steps", "7", "--data.seqlen", "8"])
    assert {(entry.config.steps, entry.config.data.seqlen) for entry in given.entries} == {(7, 8)}
    keep_recipe(comparison)
    assert read_comparison(str(tmp_path / "home")).settings == comparison.settings


# -- equal parameters ---------------------------------------------------------------------------------------------


FULL_SIZE = ("bidirectional", "language_models", "lion", "lion_imagenet", "matrix_mixers")


@pytest.mark.parametrize("name", [nightly(name, condition=name in FULL_SIZE) for name in bundled_comparisons()])
def test_all_entries_of_the_bundled_comparisons_have_equally_many_parameters(name):
    comparison = matched(read_comparison(name))
    for part in comparison.by_variant():
        target = comparison.settings.parameters or count_parameters(part.entries[0].config.model)
        for entry in part.entries:
            config = entry.config
            assert abs(count_parameters(config.model) / target - 1) <= comparison.settings.tolerance, entry.title
            assert config_from_dict(config_to_dict(config), "again") == config
        assert "no mixer" in {entry.control for entry in part.entries}
        assert not differing_keys(part.entries)
    # A step of the width is a few percent of a model as narrow as those of the generated tasks and of single pixels;
    # widths of models with sine and cosine positions are multiples of 4.
    first = comparison.entries[0].config
    is_narrow = first.data.synthetic.task or first.model.d_model < 40
    in_fours = first.model.image.positions == "sincos"
    most = 0.06 if is_narrow else 0.04 if first.model.d_model < 50 else 0.02 if in_fours else 0.015
    assert comparison.settings.tolerance <= most


@pytest.mark.parametrize("name", ["state_tracking_small", "recall_small", "recall_bidirectional_small"])
def test_generated_tasks_are_tried_with_every_mixer_and_compared_with_both_controls(name):
    comparison = read_comparison(name)
    used = {layer for entry in comparison.entries for layer in entry.config.model.layers}
    form = "bidirectional_form" if "bidirectional" in name else "causal_form"
    # A window is a part of attention: where samples fit into it the two are one.
    every = {layer for layer, mixer in MIXERS.items() if getattr(mixer, form)} - {"local_attention"}
    beside = {"semiseparable"} if "bidirectional" in name else set()  # one scan, where others are of two
    assert used == every | beside | {NO_MIXER}


def test_the_quickstart_is_compared_as_it_is_trained():
    """Its first entry is the model, the data and the schedule of the recipe that newcomers train, at a rate tried."""
    comparison, trained = read_comparison("quickstart"), load_config("mru_shakespeare", [])
    found = {key for key, _, _ in differences(config_to_dict(trained), comparison.entries[0].config) if matters(key)}
    assert found <= {"model.vocab_size", "evaluation.every", "optimizer.lr"}
    assert trained.optimizer.lr in comparison.settings.tune["optimizer.lr"]


def test_a_headdim_is_kept_where_it_fits_and_else_the_nearest_is_taken():
    hydra = ModelConfig(
        architecture="encoder", vocab_size=30528, d_model=768, n_layers=12, mlp_ratio=0.0, layers=("hydra",)
    )
    target = count_parameters(hydra)
    assert match_width(hydra, target, 0.01) == hydra
    deep = dataclasses.replace(hydra, n_layers=23)
    kept = match_width(deep, target, 0.06)
    assert headdims(kept) == {"hydra": 64}
    assert abs(count_parameters(kept) / target - 1) <= 0.06
    changed = match_width(deep, target, 0.01)
    assert 64 / 1.5 <= headdims(changed)["hydra"] <= 64 * 1.5
    assert abs(count_parameters(changed) / target - 1) <= 0.01
    # Patterns: every mixer of the layers keeps to what divides the width; rotary attention to even numbers.
    mixed = match_width(dataclasses.replace(hydra, layers=("hydra", "attention", "mlp"), mlp_ratio=2.0), target, 0.01)
    assert abs(count_parameters(mixed) / target - 1) <= 0.01
    assert headdims(mixed)["attention"] % 2 == 0


def test_what_entries_do_not_share_is_said(recipe):
    text = TINY + ENTRIES.replace(
        '["hydra"]', '["hydra"]\nmodel.causal_mixers = false\nmodel.position_embeddings = true'
    )
    comparison = matched(read_comparison(recipe(text), ["--model.vocab-size", "64", "--comparison.parameters", "9000"]))
    lines = "\n".join(words_on_differences(comparison.entries))
    assert "model.position_embeddings: false in attention; true in the others." in lines
    for entry in comparison.entries:
        (own,), (now,) = entry.own_headdims.values(), headdims(entry.config.model).values()
        assert (f"{entry.name} {own} -> {now}" in lines) == (own != now)


def test_at_which_rates_entries_are_compared_is_said(recipe):
    comparison = read_comparison(recipe(TINY + ENTRIES), ["--model.vocab-size", "64", "--optimizer.lr", "3e-3"])
    first, second = comparison.entries[:2]
    (line,) = [line for line in words_on_differences([first, second]) if "earning rate" in line]
    assert "0.003" in line
    assert "tuned for none" in line
    config = dataclasses.replace(second.config, optimizer=dataclasses.replace(second.config.optimizer, lr=6e-3))
    lines = words_on_differences([first, dataclasses.replace(second, config=config)])
    assert lines == [f"Learning rate: 0.003 in {first.name}; 0.006 in the others."]


def test_where_no_width_fits_the_nearest_are_named(recipe):
    model = read_comparison(recipe(TINY + ENTRIES), ["--model.vocab-size", "64"]).entries[0].config.model
    target = count_parameters(model)
    assert match_width(model, target, 0.0001) == model
    words = rf"no width has {target + 9:,} parameters .* {target:,} \(-0\.\d+%\) at d_model = 16, .* d_model = 17"
    with pytest.raises(ValueError, match=words):
        match_width(model, target + 9, 0.0001)


def test_the_vocabulary_comes_from_the_data(recipe, dataset):
    comparison = matched(read_comparison(recipe(TINY + ENTRIES), ["--data.path", dataset]))
    assert {entry.config.model.vocab_size for entry in comparison.entries} == {320}
    first, second = (entry.parameters for entry in comparison.entries)
    assert abs(second / first - 1) <= 0.1


# -- equal data ---------------------------------------------------------------------------------------------------


def test_for_one_seed_all_entries_see_the_same_batches(recipe, dataset):
    comparison = matched(read_comparison(recipe(TINY + ENTRIES), ["--data.path", dataset]))
    batches = {}
    for task in tasks_of(comparison):
        loader = make_loader(task.config, "train", 0, 1)
        stream = iter(loader)
        seen = [next(stream) for _ in range(3)]
        batches[task.entry, task.seed] = torch.stack([torch.stack((one.input_ids, one.labels)) for one in seen])
        loader.close()
    names = [entry.name for entry in comparison.entries]
    for seed in (0, 1):
        assert torch.equal(batches[names[0], seed], batches[names[1], seed])
    assert not torch.equal(batches[names[0], 0], batches[names[0], 1])


def test_epochs_are_counted_also_where_the_vocabulary_is_given(recipe, dataset):
    """Without the data, as a report may be, there is nothing to count."""
    path = recipe(TINY.replace("steps = 4", "epochs = 2.0") + ENTRIES)
    words = ["--comparison.tolerance", "0.3", "--model.vocab-size", "320", "--data.path"]
    steps = {entry.config.steps for entry in matched(read_comparison(path, [*words, dataset])).entries}
    assert steps == {
        entry.config.steps for entry in matched(read_comparison(path, [*words[:3], "0", words[4], dataset])).entries
    }
    assert steps != {entry.config.steps for entry in matched(read_comparison(path, [*words, "absent"])).entries}
