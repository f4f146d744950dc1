"""Measures speed and memory: `python -P -m matmix.benchmarks NAME`, each with its own --help.

On a GPU (or, to try them out, with --device cpu and small sizes), against the published ways:
  scan       the bidirectional scan at sequence lengths 128 to 131,072, against mamba-ssm, flash-linear-attention,
             flash attention and torch.compile
  conv       the short convolution
  norm       the gated norm
  mru        the matrix recurrent unit: its scan, and its mixer from elements to outputs, against the public scans
  layer      a whole Hydra layer
  encoder    a training step of Hydra and BERT encoders
  language_model
             a training step of an MRU language model and of a GPT of its size
  gpu-session
             half an hour on a GPU: whether the kernels are right, their fastest tiles, what each takes, and the peers

Anywhere:
  cpu        all operations against their peers, with peak memory
  counts     warp-instructions and bytes per token of the main calls' kernels, in code compiled for sm_90
  resources  registers, spills and shared memory of every kernel, compiled for GPUs that need not be there
  costs      what the loop, evaluations, comparisons of replicas and data cost beside the training steps of a recipe
  lengths    whole models of several mixers, and of several forms of them, against the length of rows: time and memory
  inference  the memory of encoders without gradients, against the length of a row, and what LION's recurrence keeps
  memory     the memory that training takes, against what a dry run estimates
  saving     what a checkpoint costs against the size of the model; also under torchrun
  reading    tokens per second that a prepared dataset is read with
  images     pictures per second that a prepared dataset is read, augmented and mixed with, against decoding alone
  packing    what fine-tuning saves by unpadded batches, against padded ones
"""

from __future__ import annotations

import importlib
import sys

from matmix.train.arguments import read_verb
from matmix.train.process.console import begin_process, guarded

COMMANDS = {
    **{name: f"operations:{name.capitalize()}" for name in ("scan", "conv", "norm", "mru")},
    "layer": "models:Layer",
    "encoder": "models:Encoder",
    "language_model": "models:LanguageModel",
    "gpu-session": "gpu_session.command:GpuSession",
    "cpu": "cpu:Cpu",
    "counts": "counts:Counts",
    "resources": "resources:ResourcesOfKernels",
    "costs": "costs:Costs",
    "lengths": "lengths:Lengths",
    "inference": "lengths:Inference",
    "memory": "memory:Memory",
    "saving": "saving:Saving",
    "packing": "reading:Packing",
    "reading": "reading:Reading",
    "images": "reading:Images",
}
"""Name -> module in this package and class, imported when asked for; a class is like a verb of matmix."""


def main(arguments: list[str]) -> int:
    """Runs a benchmark; returns the exit status, 2 with one line on stderr for what cannot be run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2

    def run() -> int:
        name, *words = arguments
        if name not in COMMANDS:
            raise ValueError(f'unknown benchmark "{name}"; one of {", ".join(COMMANDS)}')
        module, _, command = COMMANDS[name].partition(":")
        benchmark = getattr(importlib.import_module(f"matmix.benchmarks.{module}"), command)
        verb, rest = read_verb(benchmark, words, prog=f"python -P -m matmix.benchmarks {name}")
        return verb.run(rest, words)

    return guarded(run)


if __name__ == "__main__":
    begin_process()
    sys.exit(main(sys.argv[1:]))
