"""Pictures of mixer matrices: the right tokens, the right matrices, the right ranks."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import warnings

import pytest
import torch
from failures import each
from mixer_cases import small_config
from runs import run_recipe

from matmix.launch.cli import main
from matmix.launch.lab.show_mixer.command import ShowMixer
from matmix.launch.lab.show_mixer.matrices import (
    as_head,
    choose_heads,
    is_per_channel,
    mixer_matrices,
    numerical_rank,
    page_of,
)
from matmix.launch.lab.show_mixer.pictures import Fonts, MatrixPage, wrapped
from matmix.launch.lab.show_mixer.subject import fresh, trained
from matmix.model import build_model
from matmix.model.initialization import initialize
from matmix.model.mixers import MIXERS
from matmix.train.command import _closing_words
from matmix.train.recipe import load_config
from matmix.train.state import Result

TEXT = "the king speaks to the queen and the night falls cold"
D_STATE = 8  # of debug_hydra


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory) -> str:
    """A Hydra and attention encoder after two steps, both kept."""
    folder = tmp_path_factory.mktemp("run") / "mine"
    checkpoints = ("--checkpoint.every", "1", "--checkpoint.keep-last", "2", "--evaluation.every", "0")
    run_recipe("debug_hydra", dataset, folder, "--steps", "2", *checkpoints)
    return str(folder)


def png_size(path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", raw[16:24])


@pytest.mark.slow
def test_every_mixing_layer_of_a_run_gets_a_page(run, tmp_path, capsys):
    paths = ShowMixer(recipe=run, text=TEXT, out=str(tmp_path / "pages")).draw()
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in paths] == ["layer-00-hydra-step-2.png", "layer-01-attention-step-2.png"]
    assert sorted(paths) == sorted((tmp_path / "pages").iterdir())
    (width, height), (_, other_height) = map(png_size, paths)
    assert min(width, height) > 600
    assert max(width, height) < 4000
    assert other_height < height  # two heads beside each other, not four in two rows
    tokens = len(trained(run, TEXT, None, None).ids)
    full = tokens // 2
    assert f"4 matrices, rank {tokens} of {tokens}, blocks at most {D_STATE} / {D_STATE}" in lines[0]
    assert f"2 matrices, rank {tokens} of {tokens}, blocks at most {full} / {full}" in lines[1]
    assert lines[2].startswith("Next: ")


def test_a_run_is_shown_at_the_step_that_was_asked_for(run, tmp_path):
    first, last = (trained(run, TEXT, step, None) for step in (1, None))
    assert (first.state, last.state) == ("step 1", "step 2")
    (_, before), (_, after) = (next(mixer_matrices(s.model, s.inputs, [0])) for s in (first, last))
    assert not torch.equal(before, after)
    (path,) = ShowMixer(recipe=run, text=TEXT, out=str(tmp_path), step=1, layers=(1,)).draw()
    assert path.name == "layer-01-attention-step-1.png"


def test_matrices_are_those_of_the_mixers_on_what_they_get_in_the_model(run):
    subject = trained(run, TEXT, None, None)
    model = subject.model
    with torch.no_grad():
        x = model.embed(torch.tensor([subject.ids]), None, None)
        found = dict(mixer_matrices(model, subject.inputs, [0, 1]))
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        for layer, block in enumerate(model.blocks):
            expected = block.mixer.matrix(block.norm_mixer(x))[0]
            assert found[layer].dtype == torch.float64
            torch.testing.assert_close(found[layer].float(), expected, rtol=1e-4, atol=1e-6)
            x = block(x)


def test_tokens_are_those_of_training(run, dataset):
    subject = trained(run, TEXT, None, None)
    assert (subject.pieces[0], subject.pieces[-1]) == ("<cls>", "<sep>")
    assert "".join(subject.pieces[1:-1]).replace("▁", " ") == TEXT
    cut = trained(run, TEXT, None, 6)
    assert cut.ids == [*subject.ids[:5], subject.ids[-1]]  # as a document that is too long ends in training
    assert cut.notes == [f"The first 6 of {len(subject.ids)} tokens."]
    masked = trained(run, "the <mask> speaks", None, None)
    assert "<mask>" in masked.pieces
    decoder = fresh("debug_mru", TEXT, 5, ["--data.path", dataset])
    assert decoder.pieces[0] == "<s>"
    assert decoder.pieces[-1] != "</s>"


def test_a_recipe_shows_its_initial_weights_without_any_data(tmp_path):
    overrides = ["--data.path", str(tmp_path / "nowhere"), "--model.layers", "attention"]
    overrides += ["--model.mixers.attention.nheads", "2"]
    subject = fresh("debug_mru", "né", None, overrides)
    assert subject.ids == list("né".encode())
    assert "bytes of the text" in subject.notes[0]
    assert "nowhere" in subject.notes[0]
    config = load_config("debug_mru", [*overrides, "--model.vocab-size", "256"])
    model = build_model(config.model)
    initialize(model, config.seed)
    (_, matrix) = next(mixer_matrices(model.eval(), subject.inputs, [1]))
    (_, same) = next(mixer_matrices(subject.model, subject.inputs, [1]))
    assert torch.equal(matrix, same)
    assert fresh("debug_mru", "né", None, [*overrides, "--model.vocab-size", "100"]).ids == [10, 95, 69]


def test_mixers_of_a_fixed_length_get_the_text_until_it_is_full(tmp_path, capsys):
    fixed = next(name for name, mixer in MIXERS.items() if mixer.fixed_length and mixer.bidirectional_form)
    overrides = ["--model.layers", fixed, "--model.max-seqlen", "16", "--data.seqlen", "16", "--data.packing", "rows"]
    overrides += [f"--model.mixers.{fixed.replace('_', '-')}.headdim", "8"] * hasattr(MIXERS[fixed].Config(), "headdim")
    subject = fresh("debug_hydra", "abcde", None, [*overrides, "--data.path", "nowhere"])
    assert subject.pieces == list("abcdeabcdeabcdea")
    assert "repeated" in subject.notes[-1]
    assert "16 tokens" in subject.notes[-1]
    (_, matrix) = next(mixer_matrices(subject.model, subject.inputs, [0]))
    assert matrix.shape[-2:] == (16, 16)
    assert len(fresh("debug_hydra", "abcde" * 9, None, [*overrides, "--data.path", "nowhere"]).ids) == 16
    verb = ShowMixer(recipe="debug_hydra", text="abcde", out=str(tmp_path), layers=(0,), max_tokens=5, max_heads=1)
    verb.draw([*overrides, "--data.path", "nowhere"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"--max-tokens 5 does not apply: {fixed} takes exactly 16 tokens"


def test_ranks():
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, 30, 3, dtype=torch.float64, generator=generator)
    low = factors[0] @ factors[1].T
    assert [numerical_rank(m) for m in (low, torch.eye(7).double(), low * 0, low[:0])] == [3, 7, 0, 0]
    head = as_head(low.tril(), "")
    assert (head.rank, head.below, head.above) == (30, 3, 0)
    assert as_head(low + torch.eye(30), "", skip=True).rank == 3
    small = as_head(1e-9 * low + torch.eye(30), "", skip=True)  # what the identity rounded off is no rank
    assert small.rank == 3


def test_the_matrix_of_an_mru_is_that_of_all_rows_of_its_states(mru_and_input):
    mixer, x = mru_and_input
    blocks, values = mixer.matrix(x), mixer.values(x)
    head = as_head(blocks[0, 0], "")
    mixed = mixer.mix(blocks, values)[0, :, 0]  # (L, order, order), each row of a state by itself
    for row in range(4):
        product = torch.from_numpy(head.weights) @ values[0, :, 0, row].flatten()
        torch.testing.assert_close(product, mixed[:, row].flatten())
    assert (head.rank, head.below, head.above) == (24, 4, 0)


def test_an_mru_with_a_convolution_is_drawn():
    """Its convolution has weights beside its matrices, which are no identity in M."""
    subject = fresh("debug_mru", "né", None, ["--model.mixers.mru.shift", "conv"])
    ((_, matrices),) = mixer_matrices(subject.model, subject.inputs, [0])
    page, words = page_of(subject, 0, matrices, 1)
    assert not page.heads[0].skip
    assert words.startswith("1 of 2 matrices, rank ")


@pytest.fixture
def mru_and_input():
    config = MIXERS["mru"].Config(order=4, construction="cayley")
    mixer = MIXERS["mru"](16, config, causal=True, max_seqlen=8, output_std=0.02)
    initialize(mixer, 0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return mixer.double().requires_grad_(False), torch.randn(1, 6, 16, dtype=torch.float64)


def test_heads_are_chosen_evenly_and_named_by_direction():
    full = torch.ones(8, 4, 4)
    assert choose_heads(full, 16) == [(index, f"head {index}") for index in range(8)]
    assert choose_heads(full, 3) == [(0, "head 0"), (2, "head 2"), (5, "head 5")]
    both = torch.cat((full[:2].tril(), full[:2].triu()))
    names = ["head 0, forward", "head 0, backward", "head 1, forward", "head 1, backward"]
    assert choose_heads(both, 16) == list(zip((0, 2, 1, 3), names, strict=True))
    assert [index for index, _ in choose_heads(both, 2)] == [0, 2]


def test_what_a_causal_mixer_never_sees_is_grey_and_any_text_can_be_drawn(tmp_path):
    from matplotlib.image import imread

    head = as_head(torch.rand(6, 6, dtype=torch.float64).tril(), "head 0")
    pieces = ["$a$", "日本", "\n", "<0x24>", "Ġthe", "x" * 40]
    page = MatrixPage(
        title="layer 0: attention",
        subtitle="",
        text="日本",
        notes=["a note"],
        heads=[head],
        pieces=pieces,
        ids=list(range(6)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page.save(tmp_path / "new" / "page.png")
    pixels = (imread(tmp_path / "new" / "page.png")[..., :3] * 255).round()
    grey = (pixels == torch.tensor([0xE4, 0xE4, 0xEA]).numpy()).all(-1)
    # Of the panel, 5.2 inches at 150 dots, 15 of 36 entries.
    assert grey.sum() == pytest.approx(15 / 36 * (5.2 * 150) ** 2, rel=0.05)
    constant = as_head(torch.zeros(3, 3, dtype=torch.float64), "head 0")
    zeros = MatrixPage(title="", subtitle="", text="", notes=[], heads=[constant], pieces=["a"] * 3, ids=[5] * 3)
    zeros.save(tmp_path / "zeros.png")
    assert png_size(tmp_path / "zeros.png")


@pytest.fixture
def small_font(tmp_path):
    """A font that is installed here and has two letters, one of which DejaVu Sans lacks."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen
    from matplotlib.font_manager import fontManager

    names = [".notdef", "sun", "a"]
    pen = TTGlyphPen(None)
    for draw, corner in zip((pen.moveTo, pen.lineTo, pen.lineTo), ((0, 0), (0, 900), (900, 0)), strict=True):
        draw(corner)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord("日"): "sun", ord("a"): "a"})
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Small Test Font", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "small.ttf")
    before = list(fontManager.ttflist)
    fontManager.addfont(tmp_path / "small.ttf")
    yield "Small Test Font"
    fontManager.ttflist[:] = before
    fontManager._findfont_cached.cache_clear()


def test_letters_come_from_any_installed_font_or_are_named_by_ids(small_font, tmp_path):
    """日 is in the small font, the letter U+10FFFD of private use in none."""
    head = as_head(torch.rand(3, 3, dtype=torch.float64), "head 0")
    pieces, nowhere = ["the", "日", "日\U0010fffd"], "\U0010fffd"
    page = MatrixPage(title="layer 0", text="日" + nowhere, heads=[head], pieces=pieces, ids=[11, 12, 13])
    fonts = page.fonts()
    assert fonts.families == ["DejaVu Sans", small_font]
    assert fonts.lacking == {nowhere}
    assert page.labels(fonts) == ["the", "日", "#13"]
    assert fonts.drawable(page.words()[0]) == "Text: 日□"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of letters that it has not
        page.save(tmp_path / "page.png")
    assert Fonts.for_texts(["plain text", "né"]) == Fonts(["DejaVu Sans"], frozenset())


def test_wide_letters_take_the_place_of_two():
    assert wrapped("日本語" * 4, 12) == ["日本語日本語"] * 2
    assert wrapped("to be or not", 6) == ["to be", "or not"]


@each(
    "words, said",
    [
        (["RUN", "--text", ""], "the text is empty"),
        (["RUN", "--text", " \n"], "the text is empty"),
        (["RUN", "--text", "a", "--out", __file__], "is a file; name a folder"),
        (["debug_hydra", "--text", "a", "--out", f"{__file__}/new"], "is a file; name a folder"),
        (
            ["lion_small", "--text", "a"],
            "(matmix compare lion_small) choose a run of them, runs/lion_small/ENTRY/seed-N",
        ),
        (["RUN"], "--text"),
        (["no/such/run", "--text", "a"], "no run at no/such/run"),
        (["RUN", "--text", "a", "--layers", "0", "2"], "has no layer 2; its layers are 0 to 1"),
        (["RUN", "--text", "a", "--step", "7"], "no checkpoint of step 7; there are: 1, 2"),
        (["RUN", "--image", "a.png"], "reads no pictures; give a --text"),
        (["RUN", "--text", "a", "--max-tokens", "2"], "max_tokens must be 3 or more"),
        (["RUN", "--text", "a", "--max-heads", "0"], "max_heads must be 1 or more"),
        (["RUN", "--text", "a", "--model.layers", "mru"], "nothing can be changed: --model.layers mru"),
        (["debug_hydra", "--text", "a", "--step", "1"], "no steps to choose from"),
        (["debug_hydra", "--text", "abc", "--layers", "1", "--model.layers", "hydra", "mlp"], "layers with one: 0"),
        (["debug_mru", "--text", "a"], "fewer than 2 tokens"),
        (["debug_hydra", "--text", "abc", "--modle.layers", "mru"], "modle"),
    ],
)
def test_mistakes_are_one_line(run, words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["show-mixer", *(run if word == "RUN" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.iterdir())


def test_the_command_draws_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes = ["--model.mixers.hydra.headdim", "8"]
    words = ["--layers", "0", "--max-heads", "2", *changes]
    assert main(["show-mixer", "debug_hydra", "--text", "to be or not", *words]) == 0
    page = tmp_path / "pictures/debug_hydra/layer-00-hydra-initial.png"
    assert png_size(page)
    output = capsys.readouterr().out
    assert "2 of 8 matrices" in output
    assert f"Next: matmix train debug_hydra {' '.join(changes)}, then" in output


def test_runs_of_a_comparison_get_pages_of_their_own(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for entry in ("Hydra", "causal"):
        shutil.copytree(run, tmp_path / "runs/mine" / entry / "seed-0")
    subjects = [trained(f"runs/mine/{entry}/seed-0/", TEXT, None, None) for entry in ("Hydra", "causal")]
    assert [subject.name for subject in subjects] == ["Hydra-seed-0", "causal-seed-0"]
    assert subjects[0].where == "runs/mine/Hydra/seed-0"
    (path,) = ShowMixer(recipe="runs/mine/Hydra/seed-0", text=TEXT, layers=(1,)).draw()
    assert str(path) == "pictures/Hydra-seed-0/layer-01-attention-step-2.png"
    for source in ("runs/mine", "runs/mine/Hydra"):
        with pytest.raises(
            ValueError, match=f"^{source} is a comparison .*choose a run of them: runs/mine/Hydra/seed-0"
        ):
            ShowMixer(recipe=source, text=TEXT).draw()


def test_a_page_replaces_none_that_shows_something_else(tmp_path):
    from PIL import Image

    matrix = as_head(torch.rand(2, 2, dtype=torch.float64), "head 0")
    page = MatrixPage(
        title="", subtitle="", text="né 日", notes=[], heads=[matrix], pieces=["a"] * 2, ids=[5, 5], description="né 日"
    )
    other = dataclasses.replace(page, text="other", description="other")
    (tmp_path / "page.png").write_text("no picture of ours")
    path = tmp_path / "page-2.png"
    assert page.save(tmp_path / "page.png") == path
    assert Image.open(path).info["Description"] == "né 日"
    first = path.read_bytes()
    assert other.save(tmp_path / "page.png") == tmp_path / "page-3.png"
    assert page.save(tmp_path / "page.png") == path
    assert path.read_bytes() == first
    assert (tmp_path / "page.png").read_text() == "no picture of ours"


def test_the_text_stands_on_the_page_and_long_ones_begin():
    page = MatrixPage(title="", subtitle="", text="to  be\nor not", notes=["a note"], heads=[], pieces=[], ids=[])
    assert page.words() == ["Text: to be or not", "a note"]
    long = dataclasses.replace(page, text="word " * 100).words()[0]
    assert long.startswith("Text: word word")
    assert long.endswith("…")
    assert len(long) < 200


def test_matrices_of_single_channels_are_called_so():
    for name, word in (("s4d", "channel"), ("mlp_mixer", "channel"), ("hydra", "head")):
        mixer = MIXERS[name](8, small_config(name), causal=False, max_seqlen=4, output_std=0.02)
        initialize(mixer, 0)
        matrices = mixer.matrix(torch.randn(1, 4, 8))[0]
        assert is_per_channel(mixer, matrices) == (word == "channel")
    assert choose_heads(torch.ones(8, 4, 4), 2, "channel") == [(0, "channel 0"), (4, "channel 4")]


def test_training_ends_with_a_look_at_mixers_that_cannot_generate():
    flags = {"steps_done": 8, "step": 8, "steps": 8, "finished": True, "stopped": False, "signal": 0, "saved": True}
    result = Result(**flags, metrics={"loss": 1.0, "masked_accuracy": 0.5}, unigram_entropy=3.0)
    fixed = ["--model.layers", "dense", "--model.max-seqlen", "32", "--data.packing", "rows"]
    masked = "generate runs/debug_hydra --prompt 'TEXT <mask> TEXT'"
    for overrides, verb in (([], masked), (fixed, "show-mixer runs/debug_hydra --text TEXT")):
        last = _closing_words(load_config("debug_hydra", overrides), result).splitlines()[-1]
        assert last == f"Next: matmix {verb}, or matmix export runs/debug_hydra --out DIR"
