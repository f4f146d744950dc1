"""Writes a model of texts as an ONNX file for batches of any size and texts of any length."""

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from matmix.model.architectures.encoder import EncoderTrunk
from matmix.model.backbone import Backbone
from matmix.model.interop.export.onnx import forms

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-3
"""Largest difference to the model's own outputs, as a share of the largest of these."""


def check_packages() -> None:
    """Raises ValueError (one line) where the packages are not installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"an ONNX file needs {', '.join(missing)}: install the extra with pip install -e '.[onnx]'")


def write_onnx(model: Backbone, path: Path, *, longest: int = 0) -> float:
    """Writes a model in float32, and compares what onnxruntime makes of the file with the model itself at two lengths.
    Returns the largest difference, as a share of the largest output.

    Its inputs are input_ids (batch, length) int64 and, of encoders with token types, token_type_ids; all texts of a
    batch have the same length, as there is no attention mask. Its output is `outputs`, (batch, length, n), or
    (batch, n) of models with one output for each text. Weights of 1.5 GB and more are put into a file beside it.

    longest: text that the file of an MRU takes, which decides its size and time; 0 = model.max_seqlen. Raises
    ValueError (one line) where the packages are missing, or the model reads no tokens or cannot be expressed.
    """
    check_packages()
    config = model.config
    form = forms.OnnxForm(model, longest or config.max_seqlen)
    names = ["input_ids"]
    if isinstance(model, EncoderTrunk) and config.type_vocab_size > 1:
        names.append("token_type_ids")
    fixed = bool(config.fixed_length_mixers())
    dynamic = {0: torch.export.Dim.DYNAMIC} | ({} if fixed else {1: torch.export.Dim.DYNAMIC})
    most = min(longest or config.max_seqlen, config.max_seqlen)
    lengths = (most, most) if fixed else (12, 29) if most >= 29 else (most, max(1, most // 2))
    with _quiet(), torch.no_grad():
        try:
            given = _example(model, names, 2, lengths[0])
            program = torch.export.export(form, given, dynamic_shapes=(dynamic,) * len(names))
            # torch's own table, without in-place writing to diagonals, and with ops of this project.
            program = program.run_decompositions({**torch.export.default_decompositions(), **forms.of_ops()})
            named = {"input_names": names, "output_names": ["outputs"]}
            onnx = torch.onnx.export(program, (), dynamo=True, verbose=False, **named)
            size = sum(parameter.numel() * 4 for parameter in form.parameters())
            onnx.save(path, external_data=size >= 1.5e9)
            examples = (_example(model, names, batch, n) for batch, n in zip((1, 3), lengths, strict=True))
            difference = max(_difference(model, path, example) for example in examples)
        except OSError:
            raise
        except Exception as error:  # of many kinds, and of many lines
            logging.getLogger(__name__).debug("no ONNX file", exc_info=True)
            mixers = ", ".join(config.mixer_names()) or "no mixer"
            raise ValueError(
                f"torch {torch.__version__} cannot write this model ({mixers}) as ONNX: {type(error).__name__}; "
                "docs/export.md lists the mixers that it can"
            ) from None
    if not difference <= TOLERANCE:
        raise ValueError(f"{path} does not compute the model: outputs differ by {difference:.1e} of the largest")
    return difference


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the packages say of their own steps."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("onnx_ir", "onnxscript", "torch.onnx"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _example(model: Backbone, names: list[str], batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Token ids, and token types where they are inputs, of random texts."""
    generator = torch.Generator().manual_seed(length)
    limits = {"input_ids": model.config.vocab_size, "token_type_ids": model.config.type_vocab_size}
    return tuple(torch.randint(limits[name], (batch, length), generator=generator) for name in names)


def _difference(model: Backbone, path: Path, inputs: tuple[torch.Tensor, ...]) -> float:
    """Returns how far onnxruntime and the model differ on the same inputs, as a share of the largest output."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (outputs,) = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    with torch.no_grad():
        expected = model.eval()(inputs[0], **dict(zip(("token_type_ids",), inputs[1:], strict=False)))
    return ((torch.from_numpy(outputs) - expected).abs().max() / expected.abs().max()).item()
