import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from failures import each

from matmix.model import build_model, initialize
from matmix.model.mixers.attention.softmax_attention import AttentionConfig
from matmix.model.mixers.mru import MRUConfig
from matmix.train.tasks.cross_entropy import linear_cross_entropy

KINDS = {
    "mru": ("language_model", ("mru",)),
    "gpt": ("language_model", ("attention",)),
    "mru-mixed": ("language_model", ("mru", "mru", "attention")),
    "mru-explicit-mlp": ("language_model", ("mru", "mlp", "attention")),
    "hydra": ("encoder", ("hydra",)),
    "mru-and-controls": ("language_model", ("none", "convolution", "mru")),
    "hydra-and-controls": ("encoder", ("none", "hydra", "convolution")),
    "bert": ("encoder", ("attention",)),
    "hydra-mixed": ("encoder", ("hydra", "hydra", "attention")),
}
LANGUAGE_MODELS = [name for name, (architecture, _) in KINDS.items() if architecture == "language_model"]
ENCODERS = [name for name in KINDS if name not in LANGUAGE_MODELS]
CU_SEQLENS = [0, 3, 4, 15, 24, 36]
# Logits of about 1 computed with other shapes: three blocks sum up to 64 terms in another order, with 2^-24 of rounding
# in each. What another token has to do with is off by 1e-2 and more.
CLOSE = {"rtol": 1e-5, "atol": 5e-5}


@each("kind", KINDS)
@each("norm", ["pre", "post"])
def test_every_parameter_gets_a_gradient(small_model, kind, norm):
    model = small_model(*KINDS[kind], norm=norm, norm_bias=True, mlp_bias=True)
    ids = torch.randint(61, (2, 12))
    logits = model(ids)
    assert logits.shape == (2, 12, 61)
    F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@each("activation", ["gelu", "silu"])
def test_gated_mlps_and_rms_norms_are_what_they_say(small_model, activation):
    options = {
        "mlp_gate": True,
        "norm_kind": "rms",
        "norm_eps": 0.1,
        "embedding_norm": "layers",
        "activation": activation,
    }
    model = small_model("language_model", ("none",), n_layers=1, dtype=torch.float64, tie_embeddings=False, **options)
    weights, ids = dict(model.named_parameters()), torch.randint(61, (2, 7))

    def norm(x, name, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def layer(x, name):
        return x @ weights[f"{name}.weight"].mT

    x = norm(weights["embedding.weight"][ids], "embedding_norm", 1e-12)
    inner = norm(x, "blocks.0.norm_mlp", 0.1)
    gate = getattr(F, activation)(layer(inner, "blocks.0.mlp.gate"))
    x = x + layer(gate * layer(inner, "blocks.0.mlp.up"), "blocks.0.mlp.down")
    torch.testing.assert_close(model(ids), layer(norm(x, "norm", 1e-5), "output"))


@each("kind", ["gpt", "bert"])
def test_capped_logits_are_those_that_the_loss_is_of(small_model, kind):
    model, plain = (small_model(*KINDS[kind], logit_softcap=cap, dtype=torch.float64) for cap in (0.5, 0.0))
    ids = torch.randint(61, (2, 9))
    logits = model(ids)
    torch.testing.assert_close(logits, 0.5 * (plain(ids) / 0.5).tanh())
    readout = functools.partial(linear_cross_entropy, targets=ids.flatten())
    wanted = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").float()
    torch.testing.assert_close(model(ids, readout=readout).loss, wanted)
    if kind == "gpt":
        torch.testing.assert_close(model.prefill(ids)[0], logits[:, -1])


def test_an_encoder_without_biases_has_that_of_its_output_alone(small_model):
    model = small_model("encoder", ("attention",), embedding_norm="layers", head_bias=False)
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.bias"]
    assert type(model.embeddings.norm) is torch.nn.LayerNorm
    assert type(small_model("encoder", ("attention",), embedding_norm="none").embeddings.norm) is torch.nn.Identity


@each("kind", KINDS)
def test_neighbouring_documents_do_not_matter(small_model, kind):
    model = small_model(*KINDS[kind])
    ids = torch.randint(61, (2, 18))
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    logits = model(ids, cu_seqlens=cu_seqlens, max_seqlen=12).flatten(0, 1)
    for start, end in itertools.pairwise(CU_SEQLENS):
        others = torch.randint(61, (36,))
        others[start:end] = ids.flatten()[start:end]
        changed = model(others.view(2, 18), cu_seqlens=cu_seqlens, max_seqlen=12).flatten(0, 1)
        assert torch.equal(changed[start:end], logits[start:end])
        alone = model(ids.flatten()[None, start:end])[0]
        torch.testing.assert_close(logits[start:end], alone, **CLOSE)


@each("kind", KINDS)
def test_padding_does_not_matter(small_model, kind):
    model = small_model(*KINDS[kind])
    ids = torch.randint(61, (3, 14))
    mask = torch.arange(14) < torch.tensor([14, 5, 9])[:, None]
    logits = model(ids, attention_mask=mask)
    other_padding = torch.where(mask, ids, torch.randint(61, ids.shape))
    assert torch.equal(model(other_padding, attention_mask=mask)[mask], logits[mask])
    wider = F.pad(ids, (0, 7), value=3)
    assert torch.equal(model(wider, attention_mask=F.pad(mask, (0, 7)))[:, :14][mask], logits[mask])
    left = torch.stack([row.roll(14 - n) for row, n in zip(ids, (14, 5, 9), strict=True)])
    torch.testing.assert_close(model(left, attention_mask=mask.flip(1))[mask.flip(1)], logits[mask], **CLOSE)
    for row, n in enumerate((14, 5, 9)):
        torch.testing.assert_close(logits[row, :n], model(ids[row : row + 1, :n])[0], **CLOSE)


@pytest.mark.parametrize("layers", [("dense",), ("mlp_mixer", "attention"), ("hydra",)])
def test_a_mask_without_padding_is_as_none(small_model, layers):
    """Also for mixers of a fixed length, which take no padded rows: tokenizers return a mask by default."""
    model = small_model("encoder", layers, max_seqlen=16)
    ids, types = torch.randint(61, (3, 16)), torch.arange(16).expand(3, -1) // 8
    for mask in (torch.ones_like(ids), torch.ones(3, 16, dtype=torch.bool)):
        logits = model(ids, attention_mask=mask, token_type_ids=types)
        assert torch.equal(logits, model(ids, token_type_ids=types))


@pytest.mark.parametrize("kind", ["mru-mixed", "hydra-mixed"])
def test_a_row_without_tokens_is_harmless(small_model, kind):
    model = small_model(*KINDS[kind])
    ids = torch.randint(61, (3, 6))
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    logits = model(ids, attention_mask=mask)
    torch.testing.assert_close(logits[0::2], model(ids[0::2]), **CLOSE)
    assert logits.isfinite().all()


@each("kind", KINDS)
def test_select_and_readout_see_the_final_features(small_model, kind):
    model = small_model(*KINDS[kind])
    ids, select = torch.randint(61, (2, 9)), torch.tensor([1, 7, 16])
    logits = model(ids)
    torch.testing.assert_close(model(ids, select=select), logits.flatten(0, 1)[select], **CLOSE)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, select=select, attention_mask=mask), logits.flatten(0, 1)[select], **CLOSE)

    def readout(features, weight, bias):
        assert features.shape == (3, 32)
        assert weight.shape == (61, 32)
        return F.linear(features, weight, bias), "anything"

    value, extra = model(ids, select=select, readout=readout)
    assert extra == "anything"
    torch.testing.assert_close(value, logits.flatten(0, 1)[select], **CLOSE)


@each("kind", LANGUAGE_MODELS)
def test_generation_equals_the_parallel_form(small_model, kind):
    model = small_model(*KINDS[kind])
    ids = torch.randint(61, (2, 12))
    logits = model(ids)
    state = model.initial_state(2)
    for t in range(12):
        step_logits, state = model.step(ids[:, t], state)
        torch.testing.assert_close(step_logits, logits[:, t], **CLOSE)
    prefilled, state = model.prefill(ids[:, :5])
    torch.testing.assert_close(prefilled, logits[:, 4], **CLOSE)
    prefilled, state = model.prefill(ids[:, 5:11], state)
    step_logits, _ = model.step(ids[:, 11], state)
    torch.testing.assert_close(step_logits, logits[:, 11], **CLOSE)
    with pytest.raises(ValueError, match="at least one token"):
        model.prefill(ids[:, :0])


def test_language_models_do_not_see_the_future_and_encoders_do(small_model):
    ids = torch.randint(61, (1, 10))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 61
    for kind in KINDS:
        model = small_model(*KINDS[kind])
        difference = (model(changed) - model(ids)).abs().amax(-1)[0]
        assert difference[7:].min() > 1e-6
        assert (difference[:7].max() < 1e-6) == (kind in LANGUAGE_MODELS)


@pytest.mark.parametrize("kind", ["mru", "hydra"])
def test_embeddings_are_tied_unless_asked(small_model, kind):
    tied = small_model(*KINDS[kind])
    untied = small_model(*KINDS[kind], tie_embeddings=False)
    extra = {name for name, _ in untied.named_parameters()} - {name for name, _ in tied.named_parameters()}
    assert extra == {"output.weight"}
    assert untied(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 2, 61)


def test_positions_begin_again_in_each_document(small_model):
    model = small_model("encoder", ("hydra",), position_embeddings=True, max_seqlen=16)
    ids = torch.randint(61, (1, 16))
    packed = model(ids, cu_seqlens=torch.tensor([0, 7, 16], dtype=torch.int32), max_seqlen=9)
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:]), **CLOSE)


def test_token_types_and_positions_count(small_model):
    model = small_model("encoder", ("hydra",), position_embeddings=True, max_seqlen=16)
    ids = torch.randint(61, (2, 10))
    types = torch.arange(10).expand(2, -1) // 6
    plain, typed = model(ids), model(ids, token_type_ids=types)
    torch.testing.assert_close(model(ids, token_type_ids=torch.zeros_like(ids)), plain)
    assert (typed - plain).abs().max() > 1e-3
    mask = torch.ones_like(ids)
    masked = model(ids, token_type_ids=types, attention_mask=mask)
    torch.testing.assert_close(masked, typed, **CLOSE)
    without = small_model("encoder", ("attention",), type_vocab_size=0, attention=AttentionConfig(headdim=8))
    with pytest.raises(ValueError, match="no token types"):
        without(ids, token_type_ids=types)
    with pytest.raises(ValueError, match="no token types"):
        small_model()(ids, token_type_ids=types)


def test_conflicting_or_missing_arguments_are_refused(small_model, small_config):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="not both"):
        small_model()(ids, attention_mask=ids, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="vocab_size is not set"):
        build_model(small_config(vocab_size=0))


@pytest.mark.parametrize("where", ["dropout", "embedding_dropout"])
def test_dropout_acts_in_training_only(small_model, where):
    model = small_model(**{where: 0.5})
    ids = torch.randint(61, (1, 8))
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


def test_mru_element_dropout_keeps_states_valid(small_model):
    model = small_model(mru=MRUConfig(order=4, construction="cayley", dropout=0.5)).train()
    ids = torch.randint(61, (1, 50))
    assert not torch.equal(model(ids), model(ids))
    assert all(norm == pytest.approx(math.log(2), abs=1e-4) for norm in model.monitor().values())


def test_monitor_names_the_layers(small_model):
    model = small_model(layers=("mru", "attention"))
    assert model.monitor() == {}
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert set(model.monitor()) == {f"blocks.{i}.log_norm_{name}" for i in (0, 2) for name in ("max", "mean")}


@pytest.mark.parametrize("kind", ["mru-mixed", "hydra-mixed"])
def test_a_few_steps_lower_the_loss(small_config, kind):
    model = build_model(small_config(*KINDS[kind]))
    initialize(model, 0)
    ids = torch.randint(61, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(61.0).log().item(), abs=1.0)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("kind", ["mru-mixed", "hydra-mixed"])
def test_bfloat16_autocast_stays_close_to_float32(small_model, kind):
    model = small_model(*KINDS[kind])
    ids = torch.randint(61, (2, 20))
    cu_seqlens = torch.tensor([0, 15, 40], dtype=torch.int32)
    exact = model(ids, cu_seqlens=cu_seqlens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, cu_seqlens=cu_seqlens)
    logits.float().square().mean().backward()
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
