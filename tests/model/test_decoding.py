"""Prompts that are continued as one batch get what each gets alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from every_mixer import language_model_of_all

from matmix.model import build_model
from matmix.model.decoding import decode
from matmix.model.interop.export.generation_state import continue_state, read_prompt
from matmix.model.mixers import MIXERS

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [9, 3, 2, 3, 8]]
LAYERS = {
    "recurrent": ("semiseparable", "retnet", "linear_attention", "sma_semiseparable", "convolution", "gated_delta"),
    "attention": ("mru", "attention", "hyena"),
}


@pytest.fixture
def make(randomize):
    def build(kind):
        layers = LAYERS[kind]
        config = dataclasses.replace(language_model_of_all(), layers=layers, n_layers=len(layers))
        return randomize(build_model(config), std=0.5).eval()

    return build


def continued(model, prompts, *, greedy, end=None, count=12):
    """Tokens by prompt, and how many prompts each step of the model took."""
    generators = [torch.Generator().manual_seed(number) for number in range(len(prompts))]
    sizes, plain = [], model.step

    def step(token_ids, state):
        sizes.append(token_ids.shape[0])
        return plain(token_ids, state)

    def draw(number, logits):
        if greedy:
            return int(logits.argmax())
        return int(torch.multinomial(logits.softmax(0), 1, generator=generators[prompts[number][0] % len(generators)]))

    model.step = step
    try:
        tokens = [[] for _ in prompts]
        for found in decode(model, prompts, draw, max_new_tokens=count, end=end):
            for number, token in found.items():
                tokens[number].append(token)
    finally:
        del model.step
    return tokens, sizes


@pytest.mark.parametrize("kind", LAYERS)
def test_a_batch_gets_what_each_prompt_gets_alone(make, kind):
    model = make(kind)
    alone = [continued(model, [prompt], greedy=True)[0][0] for prompt in PROMPTS]
    together, sizes = continued(model, PROMPTS, greedy=True)
    assert together == alone
    assert all(len(tokens) == 12 for tokens in together)
    assert len({tuple(tokens) for tokens in together}) > 1
    # Where no state grows with the text, a step takes all prompts; else those of one length.
    assert sizes == ([5] * 11 if kind == "recurrent" else [1, 2, 1, 1] * 11)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_prompt_leaves_the_batch_with_its_last_token(make, kind):
    model = make(kind)
    alone = [continued(model, [prompt], greedy=True)[0][0] for prompt in PROMPTS]
    for end in {alone[0][4], alone[2][0], alone[3][7]}:
        wanted = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in alone]
        together, sizes = continued(model, PROMPTS, greedy=True, end=end)
        assert together == wanted
        if kind == "recurrent":
            left = [sum(len(tokens) > step for tokens in wanted) for step in range(11)]
            assert sizes == [count for count in left if count]


def test_drawn_tokens_depend_on_the_prompts_own_generator(make):
    model = make("recurrent")
    prompts = [[number, 7, 3][: 1 + number % 3] for number in range(5)]
    assert len(continued(model, prompts, greedy=False)[0]) == 5
    together, _ = continued(model, prompts, greedy=False)
    again, _ = continued(model, prompts[::-1], greedy=False)
    assert together == again[::-1]


def test_nothing_to_do_and_nothing_to_start_from(make):
    model = make("recurrent")
    assert list(decode(model, [], lambda *_: 0, max_new_tokens=3)) == []
    assert list(decode(model, PROMPTS, lambda *_: 0, max_new_tokens=0)) == []
    assert list(decode(model, PROMPTS, lambda *_: 7, max_new_tokens=3, end=7)) == []
    assert list(decode(model, PROMPTS[:2], lambda number, _: number, max_new_tokens=2)) == [{0: 0, 1: 1}] * 2
    with pytest.raises(ValueError, match=r"^prompt 1 has no tokens; every prompt needs one to start from$"):
        list(decode(model, [[1], []], lambda *_: 0, max_new_tokens=1))


def test_a_text_ends_where_a_layer_does(make):
    """Also where transformers generates it; the last token is not read."""
    cosformer = MIXERS["linear_attention"].Config(headdim=8, feature_map="cosformer", reach=9)
    config = make("recurrent").config
    config = dataclasses.replace(config, mixers=dataclasses.replace(config.mixers, linear_attention=cosformer))
    model, said = build_model(config).eval(), r"^model\.mixers\.linear_attention\.reach = 9: documents of 10 tokens .*$"
    assert len(list(decode(model, PROMPTS, lambda *_: 0, max_new_tokens=3))) == 3
    with pytest.raises(ValueError, match=said):
        list(decode(model, PROMPTS, lambda *_: 0, max_new_tokens=4))
    ids = torch.ones(1, 9, dtype=torch.int64)
    _, state = read_prompt(model, ids, None, slice(8, 9))
    with pytest.raises(ValueError, match=said):
        continue_state(model, ids[:, :1], state, slice(0, 1))
