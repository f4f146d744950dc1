"""`matmix classify`: the classes that the run's evaluation gives, from runs and exports, for pictures of any mode."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pictures
import pytest
import torch
from image_runs import write_image_recipe
from PIL import Image
from runs import run_recipe

from matmix.data.modalities import build_loader
from matmix.launch.cli import main
from matmix.model.interop.export.images import MatmixImageProcessor
from matmix.train.loop import train
from matmix.train.recipe import load_config
from matmix.use.exporting import export_run
from matmix.use.opening import open_model
from matmix.use.pictures import classify, read_pictures


@pytest.fixture(scope="module")
def export(run):
    return export_run(run, run.parent / "export")


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(pictures.encoded(pictures.pixels(3, 30, 20)))
    return path


def test_probabilities_are_those_of_the_run_s_evaluation(run, tmp_path):
    config = load_config(str(run))
    loader = build_loader(config.data, split="validation", global_batch_size=4, micro_batch_size=4, one_pass=True)
    batch = next(iter(loader))
    loaded = open_model(run)
    with torch.inference_mode():
        expected = loaded.model(batch.inputs).softmax(1)
    sources = sorted((run.parent / "tree").glob("*/*.png"))
    read = read_pictures(sources, loaded.image_inputs)
    for row, probabilities in zip(batch.inputs, expected, strict=True):
        (same,) = (read == row).flatten(1).all(1).nonzero()[:1].flatten().tolist() or [None]
        assert same is not None
        ((label, value), *_) = next(classify(loaded, [sources[same]]))
        assert label == loaded.classes[int(probabilities.argmax())]
        assert value == pytest.approx(float(probabilities.max()), rel=1e-4)


def test_an_export_says_the_same_as_its_run(run, export, photo, capsys):
    said = []
    for source in (run, export):
        assert main(["classify", str(source), str(photo), "--top", "2"]) == 0
        said.append(capsys.readouterr().out.splitlines())
    assert said[0][0] == f"{run}, step 6: 3 classes"
    assert said[1][0] == f"{export}, export: 3 classes"
    assert said[0][1:] == said[1][1:]
    assert said[0][1] == str(photo)
    assert len(said[0]) == 4
    assert all(re.fullmatch(r" +\d+\.\d%  (cat|dog|owl)", line) for line in said[0][2:])


def test_transparent_pixels_show_the_background_of_the_dataset(tmp_path):
    """In a run, whose dataset is gone, in its export and in the export's own image processor."""
    recipe = load_config(str(write_image_recipe(tmp_path)))
    clear = [Image.new("RGBA", (9, 9), (10 * number, 0, 0, 0)) for number in range(12)]
    files = [(f"{number}", number % 3, pictures.encoded(picture)) for number, picture in enumerate(clear)]
    tree = pictures.write_tree(tmp_path / "clear", files)
    dataset = pictures.prepare(tree, tmp_path / "dark", background=7, validation_fraction=0.6)
    images = dataclasses.replace(recipe.data.images, path=str(dataset), mean=(0.0,) * 3, std=(1.0,) * 3)
    data = dataclasses.replace(recipe.data, images=images)
    config = dataclasses.replace(recipe, data=data, steps=1, run_dir=str(tmp_path / "run"))
    train(config)
    with pytest.raises(ValueError, match=r"data\.images\.background = 9, but the pictures were prepared with 7"):
        config.modality.facts(data).fill(dataclasses.replace(data, images=dataclasses.replace(images, background=9)))
    shutil.rmtree(dataset)
    for source in (tmp_path / "run", export_run(tmp_path / "run", tmp_path / "export")):
        read = read_pictures([tree / "cat" / "0.png"], open_model(source).image_inputs)
        assert (read == 7 / 255).all()
    values = json.loads((tmp_path / "export" / "preprocessor_config.json").read_text())
    options = {name: values[name] for name in ("mean", "std", "crop", "size", "interpolation", "background")}
    assert (MatmixImageProcessor(**options).pixels(clear[1]) * 255).round().tolist() == [[[7.0] * 8] * 8] * 3


def test_averaged_weights_give_other_probabilities(run, photo, capsys):
    found = [list(classify(open_model(run, weights=weights), [photo])) for weights in ("raw", "ema")]
    assert found[0] != found[1]
    assert sum(value for _, value in found[1][0]) == pytest.approx(1)
    assert main(["classify", str(run), str(photo), "--weights", "ema"]) == 0
    assert "averaged weights" in capsys.readouterr().out


def test_pictures_of_any_mode_and_size(run, tmp_path):
    grey = Image.fromarray(pictures.pixels(3, 30, 20)[..., 0])
    files = {
        "grey.png": grey,
        "tall.jpg": grey.resize((5, 90)).convert("CMYK"),
        "deep.png": Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
        "palette.gif": grey.convert("P"),
        "clear.png": grey.convert("RGBA"),
        "one.bmp": Image.new("RGB", (1, 1)),
    }
    for name, image in files.items():
        image.save(tmp_path / name)
    loaded = open_model(run)
    found = dict(zip(files, classify(loaded, [tmp_path / name for name in files]), strict=True))
    for name in ("deep.png", "clear.png"):  # the same pixels, otherwise stored
        assert found[name] == found["grey.png"]
    for rows in found.values():
        values = [value for _, value in rows]
        assert values == sorted(values, reverse=True)
        assert sum(values) == pytest.approx(1)


def test_mistakes_are_one_line(run, export, photo, dataset, tmp_path, capsys):
    text = tmp_path / "text"
    run_recipe("debug_hydra", dataset, str(text), "--steps", "1", "--evaluation.every", "0")
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "half.png").write_bytes(photo.read_bytes()[:200])
    (tmp_path / "empty.png").write_bytes(b"")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in export.iterdir():
        if file.is_file() and file.name != "preprocessor_config.json":
            (bare / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in bare.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    settings = json.loads((export / "preprocessor_config.json").read_text())
    (broken / "preprocessor_config.json").write_text(json.dumps({**settings, "crop": 3.0}))
    picture = str(photo)
    cases = [
        ([str(run)], "name the pictures"),
        ([str(run), picture, "--top", "0"], "--top must be 1 or more"),
        ([str(run), str(tmp_path / "nowhere.png")], "there is no picture at"),
        ([str(run), picture, str(tmp_path)], "is a folder; name the pictures in it"),
        ([str(run), str(tmp_path / "words.png")], "words.png gives no picture: it is no picture of a known kind"),
        ([str(run), str(tmp_path / "half.png")], "half.png gives no picture: it is truncated or damaged"),
        ([str(run), str(tmp_path / "empty.png")], "empty.png gives no picture: it is empty"),
        ([str(run), picture, "--step", "4"], "no checkpoint of step 4; there are: 6"),
        ([str(run), picture, "--step", "0"], "step must be 1 or more, got 0"),
        ([str(text), picture], "'encoder', which reads no pictures; matmix generate"),
        ([str(tmp_path / "no_run"), picture], "no run or export at"),
        ([str(tmp_path), picture], "is neither a run (no config.toml) nor an export"),
        ([str(export), picture, "--weights", "ema"], "leave weights out"),
        ([str(export), picture, "--step", "6"], "no steps to choose from"),
        ([str(bare), picture], "has no preprocessor_config.json"),
        ([str(broken), picture], "does not say how to read pictures"),
    ]
    for words, said in cases:
        capsys.readouterr()
        assert main(["classify", *words]) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, words
        assert said in error, words
