"""An encoder writes: every mask is filled in and nothing else, and draws are those of the model."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from failures import each
from runs import run_recipe
from transformers import AutoModelForMaskedLM, AutoTokenizer

from matmix.launch.generate import Generate
from matmix.use.exporting import export_run
from matmix.use.generation import Sampling
from matmix.use.opening import open_model
from matmix.use.unmasking import unmask


@pytest.fixture(scope="module")
def diffusion(dataset, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "diffusion"
    options = ["--objective.name", "masked_diffusion", "--steps", "2", "--evaluation.batches", "1"]
    run_recipe("debug_hydra", dataset, run_dir, *options)
    return run_dir


@each("order", ["random", "confidence"])
@each("steps", [1, 3, 5, 100])
def test_gaps_are_filled_and_nothing_else_changes(order, steps, diffusion):
    opened = open_model(diffusion, device="cpu")
    looks = []
    handle = opened.model.register_forward_pre_hook(lambda _, args: looks.append(args[0][0].tolist()))
    found = unmask(opened, "the <mask> speaks <mask:4>", steps=steps, order=order)
    handle.remove()
    mask = opened.reader.special["mask"]
    assert len(looks) == min(steps, 5)
    left = [ids.count(mask) for ids in looks]
    assert left[0] == 5
    assert all(-1 <= (a - b) - 5 / len(looks) <= 1 for a, b in zip(left, [*left[1:], 0], strict=True))
    for before, after in itertools.pairwise(looks):
        assert all(a in (b, mask) for a, b in zip(before, after, strict=True))
    assert len(found.tokens) == 5
    assert not set(found.tokens) & set(opened.reader.special.values())
    last = iter(found.tokens)
    whole = [next(last) if token == mask else token for token in looks[0]]
    assert found.text == opened.reader.marking.decode(whole)
    assert unmask(opened, "the <mask> speaks <mask:4>", steps=steps, order=order) == found


def test_draws_are_those_of_the_model():
    """Of pairs that are "ab" or "ba", one after the other gives only these, both at once also "aa" and "bb"; the most
    confident first where one place is surer."""
    a, b, mask = 0, 1, 2

    def model(inputs, select):
        (ids,) = inputs.tolist()
        sure = {a: [-20.0, 0.0, 9.0], b: [0.0, -20.0, 9.0], mask: [0.0, 0.0, 9.0]}
        return torch.tensor([sure[ids[1 - place]] for place in select.tolist()])

    marking = SimpleNamespace(
        decode=lambda ids: "".join("ab_"[i] for i in ids),
        encode=lambda text: SimpleNamespace(ids=["ab_".index(letter) for letter in text]),
        id_to_token=lambda index: "ab_"[index],
        get_vocab_size=lambda: 3,
    )
    config = SimpleNamespace(
        causal=False, model_class=SimpleNamespace(takes_head=False), vocab_size=3, check_seqlen=lambda _: None
    )
    reader = SimpleNamespace(marking=marking, special={"mask": mask})
    opened = SimpleNamespace(model=model, reader=reader, config=config, device="cpu", path="toy")
    as_is = Sampling(temperature=1.0, top_p=1.0)
    for order in ("random", "confidence"):
        texts = [unmask(opened, "<mask:2>", steps=2, order=order, sampling=as_is, seed=n).text for n in range(200)]
        assert set(texts) == {"ab", "ba"}
        assert 70 < texts.count("ab") < 130
        assert unmask(opened, "<mask>a", steps=2, order=order).text == "ba"
    at_once = {unmask(opened, "<mask:2>", steps=1, sampling=as_is, seed=n).text for n in range(60)}
    assert at_once == {"aa", "ab", "ba", "bb"}


@each(
    "text, count",
    [
        ("the <mask> [MASK] speaks", 2),
        ("the ____ speaks", 4),
        ("the __ speaks", 3),  # no gap: the tokens of max_new_tokens follow
        ("the <mask:0> speaks", 0),
        ("", 3),
    ],
)
def test_gaps_as_people_write_them(text, count, diffusion):
    opened = open_model(diffusion, device="cpu")
    found = unmask(opened, text, steps=2, max_new_tokens=3)
    assert len(found.tokens) == count
    assert found.text.startswith(text.partition(" ")[0])
    assert ("speaks" in found.text) == ("speaks" in text)


def test_gaps_that_are_too_long_are_one_line(diffusion):
    opened = open_model(diffusion, device="cpu")
    with pytest.raises(ValueError, match="a gap of 99,999,999,999 tokens is too long; it can have 1,000,000"):
        unmask(opened, "<mask:99999999999>")
    fixed = dataclasses.replace(opened.config, position_embeddings=True, max_seqlen=16)
    with pytest.raises(ValueError, match="16") as error:
        unmask(SimpleNamespace(config=fixed, reader=opened.reader, path="toy"), "<mask:20>")
    assert "\n" not in str(error.value)


@each("options", [{}, {"order": "confidence", "temperature": 1.3, "top_k": 9}, {"temperature": 0.0, "steps": 1}])
@pytest.mark.slow
def test_an_export_writes_the_same(options, diffusion, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "diffusion-export"
    if not folder.is_dir():
        export_run(diffusion, folder)
    text, options = "the <mask> speaks <mask><mask> it<mask>", {"steps": 3, "seed": 5, **options}
    pieces = []
    Generate(source=str(diffusion), device="cpu", **options).print([text], pieces.append)
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    never = {"mask_token_id": tokenizer.mask_token_id, "never": tokenizer.all_special_ids}
    filled = model.unmask(tokenizer(text, return_tensors="pt")["input_ids"], **never, **options)
    assert tokenizer.decode(filled[0], skip_special_tokens=True) + "\n" == pieces[0]


def test_the_command_writes_texts(diffusion, dataset):
    pieces = []
    options = {"steps": 2, "num_samples": 2, "json": True, "max_new_tokens": 6, "device": "cpu"}
    Generate(source=str(diffusion), **options).print(["the king", "a <mask>"], pieces.append)
    rows = [json.loads(piece) for piece in pieces]
    assert [(row["prompt"], row["sample"], len(row["tokens"])) for row in rows] == [
        ("the king", 0, 6),
        ("the king", 1, 6),
        ("a <mask>", 0, 1),
        ("a <mask>", 1, 1),
    ]
    assert all(row["text"].startswith("the king") for row in rows[:2])
    assert rows[0]["tokens"] != rows[1]["tokens"]
    opened = open_model(diffusion, device="cpu")
    (one, *_) = rows
    assert one["text"] == unmask(opened, "the king", steps=2, max_new_tokens=6).text
    with pytest.raises(ValueError, match="which no --stop can end"):
        Generate(source=str(diffusion), steps=2, stop=(".",)).print([""], pieces.append)
    with pytest.raises(ValueError, match="steps must be 0 or more"):
        Generate(source=str(diffusion), steps=-1).print([""], pieces.append)
    with pytest.raises(ValueError, match="order must be one of random, confidence"):
        unmask(opened, order="left")
