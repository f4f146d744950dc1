"""Classifiers and embedders: one output for each document or position, however the documents are laid out."""

from __future__ import annotations

import itertools

import pytest
import torch
from failures import each
from torch.utils.flop_counter import FlopCounterMode

from matmix.model import HeadConfig, ModelConfig, build_model, count_parameters, flops_per_token, initialize
from matmix.model.config import model_config_from_dict, model_config_to_dict
from matmix.model.interop import read_export
from matmix.model.interop.export.directory import export_model
from matmix.train.config import RunConfig
from matmix.train.recipe import config_from_dict, config_to_dict, differences, with_defaults

LENGTHS = (9, 1, 14, 5)
LAYERS = {"hydra": ("hydra",), "lion": ("lion_d",), "attention": ("attention",)}
HEADS = {
    "cls": ("sequence_classifier", HeadConfig(outputs=3)),
    "mean": ("sequence_classifier", HeadConfig(outputs=3, pooling="mean", hidden=False)),
    "embedder": ("text_embedder", HeadConfig(pooling="mean")),
    "tokens": ("token_classifier", HeadConfig(outputs=3)),
    "spans": ("span_classifier", HeadConfig(hidden=False)),
}
PER_DOCUMENT = ("cls", "mean", "embedder")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def in_rows(documents: list[torch.Tensor], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (B, 16), padded with 7."""
    ids, mask = torch.full((len(documents), 16), 7), torch.zeros(len(documents), 16, dtype=torch.int64)
    for row, document in enumerate(documents):
        place = slice(16 - len(document), 16) if left else slice(len(document))
        ids[row, place], mask[row, place] = document, 1
    return ids, mask


def layouts(model, documents, head):
    """The outputs of the same documents alone, packed, and padded on either side: (ndocs, outputs), or (tokens,
    outputs) where there is one for each position."""
    per_document = head in PER_DOCUMENT
    borders = torch.tensor([0, *itertools.accumulate(map(len, documents))], dtype=torch.int32)
    yield torch.cat([model(document[None]).flatten(0, -2) for document in documents])
    packed = model(torch.cat(documents)[None], cu_seqlens=borders, max_seqlen=max(LENGTHS))
    yield packed if per_document else packed[0]
    for left in (False, True):
        ids, mask = in_rows(documents, left=left)
        padded = model(ids, attention_mask=mask)
        yield padded if per_document else padded[mask.bool()]


@each("layers", LAYERS)
@each("head", HEADS)
def test_outputs_and_gradients_do_not_depend_on_the_layout(small_model, head, layers):
    architecture, options = HEADS[head]
    model = small_model(architecture, LAYERS[layers], head=options, d_model=64, n_layers=2, norm_bias=True)
    documents = [torch.randint(61, (length,)) for length in LENGTHS]
    expected, gradients = None, None
    for outputs in layouts(model, documents, head):
        model.zero_grad()
        outputs.sin().sum().backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        if expected is None:
            expected, gradients = outputs.detach(), found
            size = 64 if head == "embedder" else options.count
            assert expected.shape == (len(documents) if head in PER_DOCUMENT else sum(LENGTHS), size)
            assert all(gradient.abs().max() > 0 for gradient in gradients.values())
        torch.testing.assert_close(outputs.detach(), expected, **CLOSE)
        scale = max(gradient.abs().max().item() for gradient in gradients.values())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient / scale, gradients[name] / scale, **CLOSE, msg=name)


@pytest.mark.parametrize("head", PER_DOCUMENT)
def test_a_document_without_tokens_disturbs_nobody(small_model, head):
    architecture, options = HEADS[head]
    model = small_model(architecture, ("hydra",), head=options, n_layers=1)
    ids, mask = in_rows([torch.randint(61, (length,)) for length in LENGTHS], left=False)
    expected = model(ids, attention_mask=mask)
    some = torch.tensor([1, 0, 1, 0])
    outputs = model(ids, attention_mask=mask * some[:, None])
    assert outputs.isfinite().all()
    torch.testing.assert_close(outputs[some.bool()], expected[some.bool()], **CLOSE)


def test_a_readout_gets_one_row_for_each_document(small_model):
    """However many positions the batch selects: they select among positions, of which none is left."""
    model = small_model("sequence_classifier", ("hydra",), n_layers=1)
    ids = torch.randint(61, (4, 6))
    features, weight, bias = model(ids, select=torch.arange(20), readout=lambda *given: given)
    assert torch.equal(torch.nn.functional.linear(features, weight, bias), model(ids))
    features, weight, bias = small_model("text_embedder", ("hydra",))(ids, readout=lambda *given: given)
    assert features.shape == (4, 32)
    assert weight is bias is None


@each("head", HEADS)
def test_cost_agrees_with_torchs_counter(small_config, head):
    architecture, options = HEADS[head]
    config = small_config(architecture, ("attention",), head=options)
    with FlopCounterMode(display=False) as counter:
        build_model(config, device="meta")(torch.zeros(1, 48, dtype=torch.int64, device="meta"))
    assert flops_per_token(config, 48, head_share=1.0) * 48 == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_names_are_those_of_the_encoder(small_config):
    """So that a pretrained encoder's weights fit, and only what is declared new is left."""
    encoder = build_model(small_config("encoder", ("hydra",), tie_embeddings=False))
    own = {name for name in encoder.state_dict() if not name.startswith(encoder.head_parameters)}
    for architecture, options in HEADS.values():
        model = build_model(small_config(architecture, ("hydra",), head=options))
        names = set(model.state_dict())
        assert names >= own
        assert all(name.startswith(model.new_parameters) for name in names - own)
    config = small_config("sequence_classifier", ("hydra",), head=HeadConfig(outputs=5))
    trunk = sum(tensor.numel() for name, tensor in encoder.state_dict().items() if name in own)
    assert count_parameters(config) == trunk + 32 * 32 + 32 + 32 * 5 + 5


def test_the_head_starts_from_the_seed_alone(small_config):
    first, second = (build_model(small_config("sequence_classifier", ("hydra",), n_layers=n)) for n in (1, 2))
    initialize(first, 3)
    initialize(second, 3)
    assert torch.equal(first.classifier.dense.weight, second.classifier.dense.weight)
    assert first.classifier.output.weight.std().item() == pytest.approx(first.config.matrix_std, rel=0.3)
    assert not first.classifier.output.bias.any()


@pytest.mark.parametrize("head", HEADS)
def test_an_export_is_read_back_as_the_same_model(small_model, head, tmp_path):
    architecture, options = HEADS[head]
    model = small_model(architecture, ("hydra",), head=options)
    again = read_export(export_model(model.config, model.state_dict(), None, tmp_path / "export")).eval()
    assert model_config_to_dict(again.config) == model_config_to_dict(model.config)
    ids = torch.randint(61, (2, 9))
    assert torch.equal(again(ids), model(ids))


def test_configurations_hold_a_head_where_there_is_one(small_config):
    assert "head" not in model_config_to_dict(small_config("encoder", ("hydra",)))
    config = small_config("token_classifier", ("hydra",), head=HeadConfig(outputs=7))
    assert model_config_from_dict(model_config_to_dict(config)).head == config.head
    with pytest.raises(ValueError, match=r"head\.pooling\" should be 'cls' or 'mean', got 'max'"):
        config_from_dict({"model": {"head": {"pooling": "max"}}}, "recipe")
    before = config_to_dict(RunConfig())
    del before["model"]["head"]  # as runs of earlier versions have it
    assert not differences(with_defaults(before), RunConfig())


@each(
    "fields, words",
    [
        ({"head": {"outputs": -1}}, "model.head.outputs = -1: must be 1 or more, or 0 to take it from the data"),
        ({"head": {"pooling": "max"}}, "model.head.pooling = 'max'; known: cls, mean"),
        ({"head": {"dropout": 1.0}}, "model.head.dropout = 1.0: must be at least 0 and below 1"),
        ({"head": {"outputs": 3}}, "model.head.outputs = 3: a span_classifier has 2, start and end"),
        ({"architecture": "encoder", "head": {"outputs": 3}}, "model.head is of no use to model.architecture = 'enc"),
        ({"layers": ("mru",)}, "'mru' sees only earlier tokens"),
    ],
)
def test_mistakes_are_one_clear_line(fields, words):
    with pytest.raises(ValueError, match=r"^model\.") as caught:
        ModelConfig(
            **{"architecture": "span_classifier", "layers": ("hydra",)}
            | fields
            | {"head": HeadConfig(**fields.get("head", {}))}
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_earlier_versions_wrote_of_heads_is_read():
    """They gave every model a head of two outputs, also those that have no use for one."""
    ModelConfig(architecture="encoder", layers=("attention",), head=HeadConfig(outputs=2))
    with pytest.raises(ValueError, match=r"model\.head is of no use"):
        ModelConfig(architecture="encoder", layers=("attention",), head=HeadConfig(outputs=3))
