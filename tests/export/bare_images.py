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

import torch
import transformers
from bare_arguments import check_signature
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


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for place in sorted(path for path in Path(sys.argv[1]).iterdir() if (path / "export").is_dir()):
        check(place)
    print(f"ok: transformers {transformers.__version__}, torch {torch.__version__}")
