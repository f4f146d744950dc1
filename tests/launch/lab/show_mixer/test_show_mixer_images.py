"""`matmix show-mixer --image`: the rows of the model's own matrices, at the patches that they belong to."""

from __future__ import annotations

import numpy as np
import pictures
import pytest
import torch
from failures import each
from image_runs import write_image_recipe
from PIL import Image

from matmix.launch.cli import main
from matmix.launch.lab.show_mixer.command import ShowMixer
from matmix.launch.lab.show_mixer.image_pages import (
    PatchHead,
    chosen_place,
    mixer_notes,
    patch_head,
    patch_page,
    place_label,
    reading_orders,
)
from matmix.launch.lab.show_mixer.matrices import mixer_matrices
from matmix.launch.lab.show_mixer.subject import Subject, fresh, trained
from matmix.model.images.scans import scan_orders
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.use.exporting import export_run

LION = ["--model.layers", "lion_s", "--model.mixers.lion_s.headdim", "8"]
SNAKE = [*LION, "--model.mixers.lion_s.gate_sets", "2", "--model.image.scan", "snake"]
OUTSIDE = ["--model.image.class_token", "first", "--model.image.class_outside", "True"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_image_recipe(tmp_path_factory.mktemp("recipe"), each=4)


@pytest.fixture(scope="module")
def run(recipe):
    path = recipe.parent / "run"
    train(load_config(str(recipe), ["--run-dir", str(path), "--steps", "2", "--evaluation.every", "0"]))
    return str(path)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(pictures.encoded(pictures.pixels(5, 40, 30)))
    return str(path)


def subject_of(recipe, photo: str, *changes: str, size: int = 16) -> Subject:
    sized = ["--model.image.size", str(size), "--data.images.size", str(size)]
    return fresh(str(recipe), None, None, [*sized, *changes], photo)


@each("changes", [[], SNAKE, [*SNAKE, *OUTSIDE], ["--model.image.class_token", "middle"]])
def test_rows_of_the_matrices_make_the_outputs_of_the_mixers(changes, recipe, photo):
    """A mixer's output at a position is what its row of M takes of the values: the same is asked of the rows drawn."""
    subject = subject_of(recipe, photo, *changes)
    model, streams = subject.model, []
    with torch.no_grad():
        model.stream(subject.inputs, streams)
        orders = scan_orders(subject.image, 4, 4)
        for layer, matrices in mixer_matrices(model, subject.inputs, [0, 1]):
            mixer = model.blocks[layer].mixer.double()
            x = model.blocks[layer].norm_mixer(streams[layer]).double()
            heads = [patch_head(row, "", None, subject) for row in matrices[:, 3]]
            flat = torch.stack([torch.from_numpy(head.weights).flatten() for head in heads])
            if subject.image.class_tokens:
                place = subject.image.class_place(16)
                own = torch.tensor([[head.class_weight] for head in heads])
                flat = torch.cat((flat[:, :place], own, flat[:, place:]), 1)
            y = mixer.combine(mixer.mix(flat[None, :, None], mixer.values(x)).expand(-1, x.shape[1], -1, -1), x)
            found = mixer(x) if orders is None else mixer.forward_in_orders(x, orders)
            torch.testing.assert_close(y[0, 3], found[0, 3], rtol=1e-6, atol=1e-9)


def test_orders_are_those_of_the_model(recipe, photo):
    (row,) = reading_orders(subject_of(recipe, photo, size=12)).values()
    assert row.tolist() == list(range(9))
    snake = reading_orders(subject_of(recipe, photo, *SNAKE, *OUTSIDE, size=12))
    assert list(snake) == ["rows, in a snake", "columns, in a snake"]
    rows, columns = snake.values()
    assert rows.tolist() == [0, 1, 2, 5, 4, 3, 6, 7, 8]
    assert columns.tolist() == [0, 3, 6, 7, 4, 1, 2, 5, 8]
    middle = subject_of(recipe, photo, "--model.image.class_token", "middle", "--model.image.scan", "column", size=12)
    (column,) = reading_orders(middle).values()
    assert column.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]


def test_the_distance_of_what_a_patch_takes():
    weights = np.zeros((3, 3))
    weights[1, 1], weights[1, 2], weights[0, 0] = 9.0, -3.0, 1.0
    assert PatchHead("", weights, None, (1, 1)).distance == pytest.approx((3 + 2**0.5) / 4)
    assert PatchHead("", weights, None, (1, 1)).signed
    assert PatchHead("", weights, 0.5, None).distance is None
    assert PatchHead("", weights * 0, None, (1, 1)).distance is None


def test_a_run_gets_a_page_a_layer_and_an_export_the_same_picture(run, photo, tmp_path, capsys):
    paths = ShowMixer(recipe=run, image=photo, patch="0,1", out=str(tmp_path / "pages")).draw()
    names = [f"layer-{layer:02}-attention-step-2-patch-0-1.png" for layer in (0, 1)]
    assert [path.name for path in paths] == names
    lines = capsys.readouterr().out.splitlines()
    assert "2 matrices, mean distance" in lines[0]
    assert lines[-1].startswith("Next: ")
    for path in paths:
        with Image.open(path) as image:
            assert min(image.size) > 600
            assert photo in image.info["Description"]
    export = export_run(run, tmp_path / "export")
    one, other = trained(run, None, None, None, file=photo), trained(str(export), None, None, None, file=photo)
    torch.testing.assert_close(one.inputs, other.inputs, rtol=0, atol=0)
    assert one.picture.shape == (8, 8, 3)
    assert 0 <= one.picture.min() < one.picture.max() <= 1
    (_, first), (_, second) = (next(mixer_matrices(s.model, s.inputs, [0])) for s in (one, other))
    torch.testing.assert_close(first, second)
    (page,) = ShowMixer(recipe=str(export), image=photo, layers=(1,), out=str(tmp_path / "pages")).draw()
    assert page.name == "layer-01-attention-export-patch-1-1.png"


def test_averaged_weights_have_pages_of_their_own(run, photo, tmp_path, capsys):
    words = ["show-mixer", run, "--image", photo, "--layers", "0", "--out", str(tmp_path)]
    assert main([*words, "--weights", "ema"]) == 0
    assert main(words) == 0
    names = {path.name for path in tmp_path.glob("layer*.png")}
    assert names == {f"layer-00-attention-step-2{which}-patch-1-1.png" for which in ("", "-ema")}
    averaged, raw = trained(run, None, None, None, "ema", photo), trained(run, None, None, None, file=photo)
    assert averaged.state == "step 2, averaged weights"
    (_, first), (_, second) = (next(mixer_matrices(s.model, s.inputs, [0])) for s in (averaged, raw))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("mixer", "changes", "note"),
    [
        ("hydra", ["headdim", "8"], ""),
        ("s4d", [], "M is the same for every picture"),
        ("semiseparable", ["headdim", "8"], "no later patches"),
        ("mru", ["order", "4"], "norms of the products"),
        ("dense", ["headdim", "8"], ""),
    ],
)
def test_pages_of_a_recipe_without_its_data(mixer, changes, note, recipe, photo, tmp_path):
    changes = [f"--model.mixers.{mixer}.{changes[0]}", changes[1]] if changes else []
    changes += ["--model.layers", mixer, "--data.images.path", str(tmp_path / "nowhere")]
    changes += ["--model.causal_mixers", str(mixer in ("semiseparable", "mru"))]
    subject = subject_of(recipe, photo, *changes)
    assert "there is no dataset at" in subject.notes[0]
    ((layer, matrices),) = mixer_matrices(subject.model, subject.inputs, [0])
    page, words = patch_page(subject, layer, matrices, 2, (2, 3))
    assert "mean distance" in words
    assert note in " ".join(mixer_notes(subject, subject.model.blocks[0].mixer))
    with Image.open(page.save(tmp_path / "page.png")) as image:
        assert image.format == "PNG"


def test_the_class_token_takes_from_the_picture(recipe, photo):
    subject = subject_of(recipe, photo, *SNAKE, *OUTSIDE)
    assert chosen_place("class", subject) is None
    ((layer, matrices),) = mixer_matrices(subject.model, subject.inputs, [1])
    _, words = patch_page(subject, layer, matrices, 4, None)
    assert place_label(None) == "class"
    assert "of itself" in words


@each(
    "words, said",
    [
        (["RUN"], "--image FILE"),
        (["RUN", "--text", "a"], "'image_classifier', which reads no text; give an --image"),
        (["RUN", "--text", "a", "--image", "PHOTO"], "give one of them"),
        (["RUN", "--image", "nowhere.png"], "there is no picture at nowhere.png"),
        (["RUN", "--image", "PHOTO", "--patch", "2,0"], "2 x 2 patches; rows and columns are 0 to 1"),
        (["RUN", "--image", "PHOTO", "--patch", "middle"], "give ROW,COLUMN"),
        (["RUN", "--image", "PHOTO", "--patch", "class"], "has no class token"),
        (["RUN", "--image", "PHOTO", "--layers", "7"], "has no layer 7"),
        (["RUN", "--image", "PHOTO", "--max-tokens", "9"], "--max-tokens is for texts"),
        (["hydra_vit_b_imagenet", "--image", "PHOTO", "--weights", "ema"], "whose weights are not averaged yet"),
        (["debug_hydra", "--image", "PHOTO"], "reads no pictures; give a --text"),
        (["debug_hydra", "--text", "abc", "--patch", "0,0"], "--patch belongs to --image"),
        (["hydra_vit_b_imagenet", "--text", "abc"], "reads no text; give an --image"),
    ],
)
def test_mistakes_are_one_line(run, words, said, photo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {"RUN": run, "PHOTO": photo}
    assert main(["show-mixer", *(given.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "pictures").exists()
