"""The modelling file is the sources themselves, no more of them than needed, and stands alone."""

from __future__ import annotations

import ast
import dataclasses
import math
import sys
import types

import pytest
import torch
from every_mixer import SEQLEN, encoder_of_all, language_model_of_all
from nightly import each_value_once
from small_models import MODELS
from transformers.dynamic_module_utils import get_imports

from matmix.model import build_model, initialize
from matmix.model.config import used_mixers
from matmix.model.interop.export import bundle as bundling
from matmix.model.interop.export.bundle import bundle
from matmix.model.interop.export.directory import write_code
from matmix.model.mixers.attention.softmax_attention import AttentionConfig, LocalAttentionConfig


@pytest.fixture(scope="module", params=list(MODELS))
def code(request, tmp_path_factory):
    """(configuration, text of modeling_matmix.py)"""
    folder = tmp_path_factory.mktemp("code")
    write_code(folder, MODELS[request.param])
    return MODELS[request.param], (folder / "modeling_matmix.py").read_text(encoding="utf-8")


def names_in(text: str) -> set[str]:
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_only_what_the_layers_need_is_there(code):
    config, text = code
    classes = {"mru": "MRU", "hydra": "Hydra", "attention": "Attention"}
    for mixer, name in classes.items():
        assert (name in names_in(text)) == (mixer in config.layers)
    assert ("LanguageModel" in names_in(text)) == config.causal
    assert ("Encoder" in names_in(text)) == (not config.causal)
    assert "Copyright" in text.splitlines()[0]


def test_matmix_is_imported_only_where_it_may_be_absent(code):
    config, text = code
    tree = ast.parse(text)
    guards = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_installed_kernels"]
    project = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("matmix"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("matmix") for alias in node.names))
    ]
    assert bool(project) == bool(guards) == bool(config.mixer_names())  # without mixers no kernel is called
    assert all(guard.lineno <= line <= guard.end_lineno for guard in guards for line in project)


def test_transformers_asks_for_nothing_but_torch(code, tmp_path):
    (tmp_path / "modeling_matmix.py").write_text(code[1], encoding="utf-8")
    standard = set(sys.stdlib_module_names)
    assert set(get_imports(tmp_path / "modeling_matmix.py")) - standard == {"torch", "transformers"}


def test_definitions_are_the_sources_as_they_stand(code):
    _, text = code
    from matmix.model import backbone

    with open(backbone.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source[source.index("class Backbone") :].strip() in text


@pytest.mark.slow
def test_installed_kernels_are_used_only_in_the_same_series(exports, monkeypatch):
    import importlib.metadata

    from transformers import AutoModelForCausalLM

    import matmix.kernels

    model = AutoModelForCausalLM.from_pretrained(exports / "mru" / "export", trust_remote_code=True)
    module = sys.modules[type(model).__module__]
    assert module.matrix_product_scan is matmix.kernels.matrix_product_scan
    assert module._installed_kernels() is matmix.kernels
    ours = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.10.0" if name == "matmix" else ours(name))
    assert module._installed_kernels() is None


@pytest.mark.parametrize("name", ["mru", "hydra"])
def test_installed_kernels_give_the_same_logits(exports, name):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto_class = AutoModelForCausalLM if MODELS[name].causal else AutoModelForMaskedLM
    model = auto_class.from_pretrained(exports / name / "export", trust_remote_code=True).eval()
    reference = load_file(exports / name / "reference.safetensors")
    assert (model(reference["input_ids"]).logits - reference["logits"]).abs().max() <= 1e-4


def test_fresh_models_start_as_training_starts_them(exports):
    """from_config draws the same distributions as `initialize`."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(exports / "hydra" / "export", trust_remote_code=True)
    fresh = AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    expected = build_model(MODELS["hydra"])
    initialize(expected, 0)
    for name, parameter in fresh.model.named_parameters():
        other = expected.get_parameter(name)
        if other.unique().numel() == 1:
            assert torch.equal(parameter, other), name
        elif name.endswith("dt_bias"):
            # softplus^-1 of step sizes from 0.001 to 0.1
            assert parameter.unique().numel() > 1
            assert -6.91 <= parameter.min() <= parameter.max() <= -2.25
        else:
            assert parameter.numel() >= 64
            assert 0.7 < parameter.std() / other.std() < 1.4, name
            assert parameter.mean().abs() < 0.5 * other.std(), name


@pytest.mark.parametrize("name", ["mixed", "hydra"])
def test_options_of_blocks_go_along(name, exported, tokenizer, tmp_path):
    """Gates, maps, norms, windows, shared keys and capped logits, also in answers, which grow beyond a window."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    mixers = dataclasses.replace(
        MODELS[name].mixers,
        attention=AttentionConfig(headdim=8, kv_heads=2, qk_norm=True),
        local_attention=LocalAttentionConfig(headdim=8, kv_heads=1, window=3),
    )
    options = {"mlp_gate": True, "norm_kind": "rms", "embedding_norm": "layers", "head_bias": False}
    options["mlp"] = {"mixed": "btt", "hydra": "monarch"}[name]
    layers = ("attention", "local_attention")
    config = dataclasses.replace(MODELS[name], layers=layers, mixers=mixers, logit_softcap=2.0, **options)
    model, ids = exported(tmp_path / f"modern_{name}", config, tokenizer), torch.arange(8, 20)[None]
    auto_class = AutoModelForCausalLM if config.causal else AutoModelForMaskedLM
    there = auto_class.from_pretrained(tmp_path / f"modern_{name}" / "export", trust_remote_code=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(there(ids).logits, model(ids))
        assert model(ids).abs().max() < 2
        if config.causal:
            settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
            answers = [there.generate(ids, use_cache=cached, **settings) for cached in (True, False)]
            assert torch.equal(*answers)


# ---- the bundler on a toy project


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Write modules of a project called toybox; returns a function that bundles them."""
    (tmp_path / "toybox").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bundling, "PROJECT", "toybox")
    monkeypatch.setattr(bundling, "KERNELS", "toybox.kernels")

    def make(roots, registries=None, **modules: str) -> str:
        for name, text in modules.items():
            (tmp_path / "toybox" / f"{name}.py").write_text(text)
        return bundle(roots, header='"""Toy."""', version="1.2.3", registries=registries)

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "toybox"]:
        del sys.modules[name]


def run(text: str) -> dict:
    scope: dict = {"__name__": "bundled"}
    exec(compile(text, "bundled", "exec"), scope)
    return scope


def test_follows_names_through_modules_in_order(toy):
    text = toy(
        [("toybox.top", "answer")],
        top="""
from functools import cache
from toybox.middle import double


@cache
def answer():
    return double(BASE)


# why 21
BASE = 21
'''Half of it.'''

UNUSED = 1
""",
        middle="""
import math as m
from toybox.bottom import Number


def double(x: Number) -> Number:
    return m.prod([2, x])
""",
        bottom="""
Number = int | float


def unused():
    return other()
""",
    )
    assert run(text)["answer"]() == 42
    assert "UNUSED" not in text
    assert "unused" not in text
    assert "# why 21\nBASE = 21\n'''Half of it.'''" in text
    assert text.index("Number = ") < text.index("def double") < text.index("def answer")


def test_cuts_registries(toy):
    text = toy(
        [("toybox.top", "build")],
        registries={"KINDS": frozenset({"a"})},
        top="from toybox.kinds import KINDS\n\n\ndef build(name):\n    return KINDS[name]()\n",
        kinds='from toybox.a import A\nfrom toybox.b import B\n\nKINDS: dict[str, type] = {"a": A, "b": B}\n',
        a="class A:\n    pass\n",
        b="class B:\n    pass\n",
    )
    assert type(run(text)["build"]("a")).__name__ == "A"
    assert "class B" not in text


def test_sources_may_be_written_as_they_like(toy):
    """Two modules define one name and import another, names are imported under others and inside functions."""
    text = toy(
        [("toybox.top", "h")],
        top="""
from math import pi as x
from toybox.a import f as first


def h():
    from toybox.b import g
    é = first() + g()  # bytes and letters are not the same
    return [é, one(), x]


def one(one_of_three=x):
    def inner():
        from toybox.b import g
    return inner() or one_of_three
""",
        a="from math import e as x\n\n\ndef f():\n    return one() + x\n\n\n@staticmethod\ndef one():\n    return 1\n",
        b="x = 10\n\n\ndef g():\n    return one.value + x\n\n\nclass one:\n    value = 2\n",
    )
    assert run(text)["h"]() == [1 + math.e + 2 + 10, math.pi, math.pi]
    assert "toybox import" not in text
    assert {"one_a", "one_b"} & names_in(text)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"top": "from .a import f\n\n\ndef h():\n    return f()\n", "a": ""}, "relative imports"),
        ({"top": "from toybox.a import f\n\n\ndef h():\n    return f()\n", "a": ""}, "does not define f"),
        (
            {"top": "from toybox.z import f\n\n\ndef h():\n    return f() + e()\n\n\ndef e(): pass\n",
             "z": "def f(e=1):\n    return e()\n\n\ndef e(): pass\n"},
            "arguments of",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_bundled_is_an_assertion(toy, modules, message):
    with pytest.raises(AssertionError, match=message):
        toy([("toybox.top", "h")], **modules)


@pytest.mark.parametrize(("architecture", "installed"), each_value_once(["encoder", "language_model"], [True, False]))
def test_every_mixer_can_be_bundled(architecture, installed, monkeypatch):
    """All in one bundle."""
    config = {"encoder": encoder_of_all, "language_model": language_model_of_all}[architecture]()
    source, name = {
        "encoder": ("matmix.model.architectures.encoder", "Encoder"),
        "language_model": ("matmix.model.architectures.language_model", "LanguageModel"),
    }[architecture]
    registries = {"MIXERS": used_mixers(config)}
    roots = [(source, name), ("matmix.model.config", "ModelConfig"), ("matmix.model.config", "MixerOptions")]
    text = bundle(roots, header='"""All."""', version="0.1.0" if installed else "0.0.0", registries=registries)
    assert "torch.library" not in text  # else a copy would take the place of the installed operations
    module = types.ModuleType("bundled")
    monkeypatch.setitem(sys.modules, "bundled", module)
    exec(compile(text, "bundled", "exec"), module.__dict__)
    assert (module._KERNELS is not None) is installed
    options = {
        mixer: module.MIXERS[mixer].Config(**dataclasses.asdict(getattr(config.mixers, mixer)))
        for mixer in used_mixers(config)
    }
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    own = {"head": module.HeadConfig(), "image": module.ImageConfig(), "mixers": module.MixerOptions(**options)}
    copy = getattr(module, name)(module.ModelConfig(**fields | own)).eval()
    model = build_model(config).eval()
    initialize(model, seed=0)
    copy.load_state_dict(model.state_dict())
    copy, model = copy.double(), model.double()  # in float32 rounding through every mixer comes near the bounds
    ids = torch.randint(29, (2, SEQLEN))
    with torch.no_grad():
        torch.testing.assert_close(copy(ids), model(ids), rtol=1e-4, atol=1e-5)
        if architecture == "language_model":  # token by token
            logits, state = model(ids), copy.initial_state(len(ids))
            for t in range(4):
                step, state = copy.step(ids[:, t], state)
                torch.testing.assert_close(step, logits[:, t], rtol=1e-4, atol=1e-5)
