"""Encoders of both strands of DNA: their equivariance, and what they refuse."""

import pytest
import torch
from failures import each

from matmix.data.tokenizer import Tokenizer
from matmix.model import ModelConfig, build_model, flops_per_token
from matmix.model.architectures.reverse_complement import StrandOptions
from matmix.model.backbone import check_context

COMPLEMENT = str.maketrans("ACGTacgt", "TGCAtgca")
CLOSE = 1e-11
"""Of logits of about 1 in float64; another base changes them by more than 0.1."""
PAIRS = {"dna": StrandOptions().complements, "dna-cased": "0-3 1-2 5-8 6-7 12-13 14-15"}


@pytest.fixture
def make_model(small_model):
    def make(tokenizer="dna", layers=("hydra",), **options):
        options |= {"vocab_size": Tokenizer.load(tokenizer).vocab_size, "options": {"complements": PAIRS[tokenizer]}}
        return small_model("strand_encoder", layers, dtype=torch.float64, n_layers=2, **options)

    return make


@each("tokenizer, layers, tied", [("dna", ("hydra",), True), ("dna-cased", ("attention", "convolution"), False)])
def test_the_reverse_complement_of_the_input_gives_that_of_the_output(make_model, tokenizer, layers, tied):
    lengths = [1, 2, 3, 7, 64, 65, 130]
    tokens = Tokenizer.load(tokenizer)
    model = make_model(tokenizer, layers, tie_embeddings=tied, position_embeddings=tied, max_seqlen=130)
    letters = "ACGTN" if tokenizer == "dna" else "ACGTNacgtn"
    texts = ["".join(letters[i] for i in torch.randint(len(letters), (length,)).tolist()) for length in lengths]
    turned = [text[::-1].translate(COMPLEMENT) for text in texts]
    swapped = model.complement(torch.arange(tokens.vocab_size))
    assert swapped[tokens.encode(letters)].tolist() == tokens.encode(letters.translate(COMPLEMENT))
    special = tokens.special
    assert swapped[[special["bos"], special["cls"]]].tolist() == [special["eos"], special["sep"]]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    ids, ids_turned = (torch.tensor([tokens.encode("".join(strand))]) for strand in (texts, turned))
    with torch.no_grad():
        packed, packed_turned = model(ids, cu_seqlens=boundaries), model(ids_turned, cu_seqlens=boundaries)
        assert (packed - packed_turned).abs().max() > 0.1
        for logits, other, text in zip(packed[0].split(lengths), packed_turned[0].split(lengths), texts, strict=True):
            torch.testing.assert_close(other, logits.flip(0)[:, swapped], rtol=0, atol=CLOSE)
            torch.testing.assert_close(model(torch.tensor([tokens.encode(text)]))[0], logits, rtol=0, atol=CLOSE)


def test_padding_streams_and_gradients_are_those_of_both_strands(make_model):
    model = make_model(type_vocab_size=0)
    ids, mask = torch.randint(5, (2, 9)), torch.ones(2, 9)
    mask[1, 5:] = 0
    streams = []
    logits = model(ids, attention_mask=mask, streams=streams)
    torch.testing.assert_close(logits[1, :5], model(ids[1:, :5])[0], rtol=0, atol=CLOSE)
    torch.testing.assert_close(logits[:1], model(ids[:1]), rtol=0, atol=CLOSE)
    assert [stream.shape for stream in streams] == [(2, 9, 64)] * 3
    found = model(ids, readout=lambda *given: given)
    torch.testing.assert_close(torch.nn.functional.linear(*found).unflatten(0, (2, 9)), model(ids), rtol=0, atol=CLOSE)
    model.train()(ids, attention_mask=mask).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_what_a_model_of_both_strands_costs_and_refuses():
    options = {"vocab_size": 12, "d_model": 64, "n_layers": 2, "layers": ("hydra",)}
    config, encoder = (ModelConfig(architecture=name, **options) for name in ("strand_encoder", "encoder"))
    assert flops_per_token(config, 100) == 2 * flops_per_token(encoder, 100)
    with pytest.raises(ValueError, match="reads documents from both ends"):
        check_context(config)
    with pytest.raises(ValueError, match="needs token ids"):
        build_model(config)(torch.zeros(1, 4, 64))
    for pairs, message in (
        ("0:3", "write pairs"),
        ("0-3-1", "write pairs"),
        ("0-3 1-3", "an id twice"),
        ("0-12", "12 ids only"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(architecture="strand_encoder", options={"complements": pairs}, **options)
