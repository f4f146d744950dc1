"""Encoder-decoders: what each position of a target is predicted from, and what trains them."""

import pytest
import torch
from failures import each

from matmix.model import ModelConfig, build_model
from matmix.model.backbone import check_context
from matmix.model.carrying import check_carry
from matmix.model.interop import read_export
from matmix.model.interop.export.directory import export_model
from matmix.use.generation import check_writes
from matmix.use.opening import open_model

LAYERS = ("attention", "s4d")
# The documents of a packed row: with a source and a target, without a source, without a target, with two separators.
DOCUMENTS = ([5, 7, 9, 0, 4, 6], [0, 3, 8], [2, 9, 1], [6, 0, 5, 0, 7])


@pytest.fixture
def make(small_model):
    def make(cross, **options):
        options = {"options": {"cross": cross}, "n_layers": 2, "dtype": torch.float64} | options
        return small_model("encoder_decoder", LAYERS, **options)

    return make


@each("cross", ["softmax", "linear", "none"])
@each("norm", ["pre", "post"])
def test_a_target_is_predicted_from_its_own_source_and_what_stands_before(make, cross, norm):
    """By gradients: each output depends on the source (not without cross mixing) and on the target up to it."""
    model, ids = make(cross, norm=norm), torch.tensor([[5, 7, 9, 0, 4, 6], [8, 0, 5, 0, 7, 2]])
    taken = []
    model.embedding.register_forward_hook(lambda _, __, x: taken.append(x.requires_grad_()) or x)
    logits = model(ids)
    assert not logits[0, :3].any()
    assert not logits[1, :1].any()
    for row, begin in ((0, 3), (1, 1)):
        for place in range(begin, 6):
            (grad,) = torch.autograd.grad(logits[row, place].square().sum(), taken[0], retain_graph=True)
            read = grad.abs().amax(-1) > 1e-12
            wanted = torch.zeros_like(read)
            wanted[row, 0 if cross != "none" else begin : place + 1] = True
            assert (read == wanted).all(), (row, place, read)


@each("cross", ["softmax", "linear"])
def test_packed_padded_and_single_documents_agree(make, cross):
    model = make(cross)
    alone = [model(torch.tensor([document]))[0] for document in DOCUMENTS]
    bounds = torch.tensor([0, 6, 9, 12, 17], dtype=torch.int32)
    packed = model(torch.tensor([[token for document in DOCUMENTS for token in document]]), cu_seqlens=bounds)[0]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    rows = torch.tensor([document + [0] * (6 - len(document)) for document in DOCUMENTS])
    mask = torch.tensor([[1] * len(document) + [0] * (6 - len(document)) for document in DOCUMENTS])
    torch.testing.assert_close(model(rows, attention_mask=mask)[mask.bool()], packed, rtol=1e-5, atol=1e-5)
    assert packed[9:12].abs().max() == 0  # without a target


def test_all_parameters_learn(make):
    model = make("linear")
    model(torch.tensor([DOCUMENTS[0]])).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert sum("cross" in name for name, _ in model.named_parameters()) == 2 * 5


@each(
    "options, message",
    [
        ({"options": {"cross": "sofmax"}}, r"^model.options.cross = 'sofmax': must be one of softmax, linear, none$"),
        ({"options": {"heads": 0}}, r"^model.options: heads = 0, .*must be 1 or more"),
        ({"layers": ("mru",)}, r"^layers over the source \(model.options.source = ''\): .*'mru' sees only earlier"),
        ({"options": {"source": "dense"}}, r"^dense takes sequences of one length"),
    ],
)
def test_options_that_fit_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(architecture="encoder_decoder", **{"layers": ("attention",)} | options)


def test_what_goes_on_from_states_or_parts_of_rows_is_refused(make, small_config):
    config = small_config("encoder_decoder", ("mru",), n_layers=2, options={"source": "hydra"})
    assert [block.mixer.name for block in build_model(config).blocks] == ["hydra", "hydra", "mru", "mru"]
    with pytest.raises(ValueError, match=r"^engine.context: encoder_decoder reads whole sources; set it to 1$"):
        check_context(config)
    with pytest.raises(ValueError, match=r"^data.carry: a model of encoder_decoder reads"):
        check_carry(config)
    with pytest.raises(ValueError, match=r"^an encoder_decoder reads whole documents"):
        make("softmax").initial_state(1)


def test_it_is_exported_as_weights_that_give_the_same_and_writes_no_text(make, tmp_path):
    model, ids = make("softmax", dtype=torch.float32), torch.tensor([DOCUMENTS[0]])
    out = export_model(model.config, model.state_dict(), None, tmp_path / "export")
    assert torch.equal(read_export(out).eval()(ids), model(ids))
    with pytest.raises(ValueError, match=r"^ONNX: encoder_decoder cuts texts .*leave --onnx out$"):
        export_model(model.config, model.state_dict(), None, tmp_path / "onnx", onnx=True)
    with pytest.raises(ValueError, match=r"is a encoder_decoder, which writes no text$"):
        check_writes(open_model(out))
