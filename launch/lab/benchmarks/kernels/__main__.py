"""Measures the operations: `python -m matmix.launch.lab.benchmarks.kernels COMMAND`, each with its own --help.

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

Anywhere:
  cpu        all operations against their peers, with peak memory
  memory     peak bytes of one candidate of one case of `cpu`, in this process
  resources  registers, spills and shared memory of every kernel, compiled for GPUs that need not be there
"""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "scan": ("matmix.launch.lab.benchmarks.kernels.scan", "main"),
    "conv": ("matmix.launch.lab.benchmarks.kernels.conv", "main"),
    "norm": ("matmix.launch.lab.benchmarks.kernels.norm", "main"),
    "mru": ("matmix.launch.lab.benchmarks.kernels.mru", "main"),
    # These three measure models and recipes, which operations know nothing of: the programs stand in the room where
    # such things may be imported, use what this package offers for measuring, and are only named here.
    "layer": ("matmix.launch.lab.benchmarks.training.layer", "main"),
    "encoder": ("matmix.launch.lab.benchmarks.training.encoder", "main"),
    "language_model": ("matmix.launch.lab.benchmarks.training.language_model", "main"),
    "cpu": ("matmix.launch.lab.benchmarks.kernels.cpu", "main"),
    "memory": ("matmix.launch.lab.benchmarks.kernels.cpu", "memory_main"),
    "resources": ("matmix.launch.lab.benchmarks.kernels.resources", "main"),
}
"""Command -> module and function, imported when asked for."""


def main(arguments: list[str]) -> int:
    """Run a command; returns the exit status, 2 with one line on stderr for what cannot be run."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        print(f'matmix: error: unknown command "{command}"; one of {", ".join(COMMANDS)}', file=sys.stderr)
        return 2
    module, function = COMMANDS[command]
    if os.environ.get("MATMIX_TRACEBACK"):
        return getattr(importlib.import_module(module), function)(rest) or 0
    try:
        return getattr(importlib.import_module(module), function)(rest) or 0
    except ValueError as error:
        print(f"matmix: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
