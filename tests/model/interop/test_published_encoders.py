"""The recipes of published encoders, narrow and shallow, give what transformers gives with the same weights."""

import dataclasses

import pytest
import torch

from matmix.model import build_model
from matmix.train.recipe import load_phases

WIDTH, HEADS, LAYERS, WORDS = 32, 2, 4, 61
SIZES = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
IN_PAIRS = torch.arange(WIDTH).view(HEADS, 2, -1).mT.flatten()
"""Rows of their queries and keys, whose first half turns with the second one, in our order, where neighbours do."""


def modernbert(**options):
    """Theirs, and ours with its weights. Our first layer has a norm more, which what is normalised already passes."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM  # takes a second, also where no test here runs

    theirs = ModernBertForMaskedLM(
        ModernBertConfig(**SIZES, intermediate_size=48, local_attention=8, norm_eps=1e-12, pad_token_id=0, **options)
    )
    state, ours = randomized(theirs), {}
    state["model.embeddings.norm.weight"].fill_(1)
    state["model.layers.0.attn_norm.weight"] = torch.ones(WIDTH, dtype=torch.float64)
    for index in range(LAYERS):
        there, here = f"model.layers.{index}", f"blocks.{index}"
        q, k, v = state[f"{there}.attn.Wqkv.weight"].chunk(3)
        gate, up = state[f"{there}.mlp.Wi.weight"].chunk(2)
        layers = {
            "q_proj": q[IN_PAIRS],
            "k_proj": k[IN_PAIRS],
            "v_proj": v,
            "out_proj": state[f"{there}.attn.Wo.weight"],
        }
        ours |= {f"{here}.mixer.{name}.weight": value for name, value in layers.items()}
        layers = {"gate": gate, "up": up, "down": state[f"{there}.mlp.Wo.weight"]}
        ours |= {f"{here}.mlp.{name}.weight": value for name, value in layers.items()}
        ours[f"{here}.norm_mixer.weight"] = state[f"{there}.attn_norm.weight"]
        ours[f"{here}.norm_mlp.weight"] = state[f"{there}.mlp_norm.weight"]
    names = {
        "model.embeddings.tok_embeddings.weight": "embeddings.word.weight",
        "model.embeddings.norm.weight": "embeddings.norm.weight",
        "model.final_norm.weight": "norm.weight",
        "head.dense.weight": "head.dense.weight",
        "head.norm.weight": "head.norm.weight",
        "decoder.bias": "head.bias",
    }
    return theirs, ours | {here: state[there] for there, here in names.items()}


def bert(**options):
    from transformers import BertConfig, BertForMaskedLM

    theirs = BertForMaskedLM(BertConfig(**SIZES, intermediate_size=4 * WIDTH, max_position_embeddings=64, **options))
    state, ours = randomized(theirs), {}
    names = {
        "bert.embeddings.word_embeddings": "embeddings.word",
        "bert.embeddings.position_embeddings": "embeddings.position",
        "bert.embeddings.token_type_embeddings": "embeddings.token_type",
        "bert.embeddings.LayerNorm": "embeddings.norm",
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions.bias": "head.bias",
    }
    layers = {
        "attention.self.query": "mixer.q_proj",
        "attention.self.key": "mixer.k_proj",
        "attention.self.value": "mixer.v_proj",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm_mixer",
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
        "output.LayerNorm": "norm_mlp",
    }
    for index in range(LAYERS):
        names |= {f"bert.encoder.layer.{index}.{there}": f"blocks.{index}.{here}" for there, here in layers.items()}
    for there, here in names.items():
        for end in ("", ".weight", ".bias"):
            if there + end in state:
                ours[here + end] = state[there + end]
    return theirs, ours


def randomized(model):
    """Gives a model weights that all matter, in float64, and returns them."""
    model.double().eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(values + ("norm" in name.lower() and name.endswith("weight")))
    return model.state_dict()


@pytest.mark.parametrize(("recipe", "published"), [("modernbert_like_base", modernbert), ("bert_original_base", bert)])
def test_recipes_are_the_published_models(recipe, published):
    config = load_phases(recipe)[-1].model
    small = {"attention": {"nheads": HEADS, "headdim": WIDTH // HEADS}}
    small["local_attention"] = {**small["attention"], "window": 4}
    mixers = {name: dataclasses.replace(getattr(config.mixers, name), **sizes) for name, sizes in small.items()}
    mixers = dataclasses.replace(config.mixers, **mixers)
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "n_layers": LAYERS, "max_seqlen": 64, "mixers": mixers}
    epsilons = {"norm_eps": 1e-12, "final_norm_eps": 1e-12, "embedding_norm_eps": 1e-12, "head_norm_eps": 1e-12}
    model = build_model(dataclasses.replace(config, **sizes, **epsilons)).double().eval()
    theirs, weights = published(attn_implementation="eager")
    model.load_state_dict(weights)
    ids = torch.randint(1, WORDS, (2, 40))
    mask = torch.arange(40) < torch.tensor([[40], [23]])
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
        for row, length in enumerate((40, 23)):
            wanted = theirs(ids[row : row + 1, :length]).logits[0]
            torch.testing.assert_close(found[row, :length], wanted, rtol=1e-5, atol=1e-5)
