"""Runs where transformers, PyTorch and Pillow are installed and matmix is not; checks exported image classifiers there.

    python -I -S bare_images.py WORK [SITE]

WORK holds one folder for each export: `export/` itself, `picture.png`, and `reference.safetensors` with what the
training's own evaluation makes of the picture, `pixels` and `logits`.
"""

# ruff: noqa: E402  (the import path is set up first)

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
if len(sys.argv) > 2:
    sys.path.insert(0, sys.argv[2])
else:
    sys.modules |= dict.fromkeys(("matmix", "torchvision", "timm"))
for missing in ("matmix", "torchvision", "timm"):
    assert importlib.util.find_spec(missing) is None, f"{missing} must not be importable here"

import copy

import numpy as np
import torch
import transformers
from bare_arguments import check_signature, refusal
from bare_loading import check_no_attentions, check_recomputing, fine_tune, largest, load
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline


def check(folder: Path) -> None:
    path, reference = folder / "export", load_file(folder / "reference.safetensors")
    model, problems = load(AutoModelForImageClassification, path)
    assert not problems, problems
    processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=True)
    picture = Image.open(folder / "picture.png")
    inputs = processor(picture, return_tensors="pt")
    # Eight bits, rounded: one step of them after the normalisation, seldom two.
    assert largest(inputs["pixel_values"], reference["pixels"]) <= 0.05
    assert (inputs["pixel_values"] - reference["pixels"]).abs().mean() <= 1e-3
    with torch.no_grad():
        assert largest(model(reference["pixels"]).logits, reference["logits"]) <= 1e-5
        logits = model(**inputs).logits
        assert largest(logits, reference["logits"]) <= 0.05
        several = processor([picture.convert("RGBA"), picture.convert("L")], return_tensors="pt")
        assert model(**several).logits.shape == (2, logits.shape[1])
        streams = model(**inputs, output_hidden_states=True).hidden_states
        found = AutoModel.from_pretrained(path, trust_remote_code=True).eval()(**inputs)
    assert len(streams) == model.config.num_hidden_layers + 1
    assert largest(streams[-1], found.last_hidden_state) <= 1e-5
    assert found.pooler_output.shape == (1, model.config.hidden_size)
    names = [model.config.id2label[index] for index in range(logits.shape[1])]
    assert names == ["cat", "dog", "hen"]
    check_pictures(processor, picture)
    half = copy.deepcopy(model).bfloat16()
    assert largest(half(**inputs).logits, logits) <= 0.2, "half precision takes the processor's float32"
    guess = pipeline("image-classification", model=model, image_processor=processor)(picture, top_k=1)[0]
    assert guess["label"] == names[logits.argmax()]
    assert abs(guess["score"] - logits.softmax(1).max().item()) < 1e-4
    check_no_attentions(model, **inputs)
    for own in (model, AutoModel.from_pretrained(path, trust_remote_code=True).eval()):
        check_signature(own, pixel_values=inputs["pixel_values"])
    if importlib.util.find_spec("accelerate"):
        from bare_steps import check_image_steps

        check_image_steps(path, several["pixel_values"][0])
    check_recomputing(model, pixel_values=several["pixel_values"], labels=torch.tensor([0, 2]))
    fine_tune(model, "classes", pixel_values=several["pixel_values"], labels=torch.tensor([0, 2]))
    saved = folder / f"saved-{transformers.__version__}"
    model.save_pretrained(saved)
    processor.save_pretrained(saved)
    again, problems = load(AutoModelForImageClassification, saved)
    assert not problems, problems
    processed = AutoImageProcessor.from_pretrained(saved, trust_remote_code=True)(picture, return_tensors="pt")
    assert torch.equal(processed["pixel_values"], inputs["pixel_values"])
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model.eval()(**inputs).logits)
    other, _ = load(AutoModelForImageClassification, path, num_labels=5, ignore_mismatched_sizes=True)
    assert other(**inputs).logits.shape == (1, 5)


def check_pictures(processor, picture: Image.Image) -> None:
    """Arrays are the picture in either order of their dimensions, alone and several; what has no known range and
    options that would be lost are refused."""
    expected = processor(picture)["pixel_values"]
    array = np.asarray(picture)
    for same in (array, array.transpose(2, 0, 1), torch.tensor(array).permute(2, 0, 1), array[None]):
        assert np.array_equal(processor(same)["pixel_values"], expected), f"an array of {same.shape}"
    narrow = torch.tensor(array[:, :3]).permute(2, 0, 1)
    cut = processor(picture.crop((0, 0, 3, picture.height)))["pixel_values"]
    assert np.array_equal(processor(narrow)["pixel_values"], cut), "three columns are no channels"
    grey = picture.convert("L")
    levels, expected = np.asarray(grey), processor(grey)["pixel_values"]
    for same in (levels, levels[None], levels[..., None], Image.fromarray(levels.astype(np.uint16) * 257)):
        assert np.array_equal(processor(same)["pixel_values"], expected)
    wrong = {
        "mode I": lambda: processor(grey.convert("I")),
        "mode F": lambda: processor(grey.convert("F")),
        "image of float64": lambda: processor(array / 255),
        "image of shape (34, 45, 2)": lambda: processor(array[..., :2]),
        "image is a str": lambda: processor("picture.png"),
        "no use for do_rescale = False": lambda: processor(picture, do_rescale=False),
        "no use for size": lambda: processor(picture, size={"height": 8, "width": 8}),
        "no use for do_normalize": lambda: type(processor)(do_normalize=False),
        "size = {'shortest_edge': 8}": lambda: type(processor)(size={"shortest_edge": 8}),
    }
    for words, call in wrong.items():
        message = refusal(call)
        assert words in message, f"{words}: {message}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for place in sorted(path for path in Path(sys.argv[1]).iterdir() if (path / "export").is_dir()):
        check(place)
    print(f"ok: transformers {transformers.__version__}, torch {torch.__version__}")
