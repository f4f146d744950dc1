"""`matmix train RECIPE [--key value ...]`, also `torchrun -m matmix.train RECIPE ...`."""

from __future__ import annotations

import os
import signal
import sys

from matmix.train.config import RunConfig
from matmix.train.console import guarded
from matmix.train.recipe import bundled_recipes, load_config

USAGE = """usage: matmix train RECIPE [--dry-run] [--key value ...]

RECIPE is a path to a TOML file, a run directory, or the name of a bundled recipe: {recipes}.
Any field of the recipe can be given on the command line, as in --optimizer.lr 3e-4; `matmix train RECIPE --help`
lists them all. --dry-run prints parameters, FLOPs, memory, steps and tokens and trains nothing.
The same command again resumes the run from its newest checkpoint."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0 done, 2 the user's mistake, 128 + n stopped and saved by signal n)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(recipes=", ".join(bundled_recipes())))
        return 0 if arguments else 2
    dry_run = "--dry-run" in arguments
    arguments = [argument for argument in arguments if argument != "--dry-run"]
    loaded: list[RunConfig] = []

    def read() -> int:
        loaded.append(load_config(arguments[0], arguments[1:]))
        return 0

    code = guarded(read)
    if code:
        return code
    if dry_run:
        from matmix.train.plan import print_plan

        return guarded(lambda: print_plan(loaded[0]))
    return guarded(lambda: _train(loaded[0]), every_rank=True)


def _train(config: RunConfig) -> int:
    from matmix.train.loop import train

    result = train(config)
    if int(os.environ.get("RANK", "0")) == 0:
        print(_closing_words(config, result))
    if not result.saved:
        return 1
    return 128 + result.signal if result.signal and not result.finished else 0


def _closing_words(config: RunConfig, result) -> str:
    if not result.saved:
        return (
            f"Step {result.step} of {config.steps} is not saved: its checkpoint could not be written (see above). "
            f"Make room and start the same command again; it goes on from the newest checkpoint."
        )
    if not result.finished:
        if result.signal:
            how = f"by {signal.Signals(result.signal).name} at step {result.step} of {config.steps}, saved"
            return f"Stopped {how}. The same command goes on from there."
        how = f"at step {result.step} of {config.steps} as stop_step says, saved"
        return f"Stopped {how}. Without stop_step it goes on from there."
    metrics = result.metrics
    done = "Finished" if result.steps_done else "Nothing to do, the run finished"
    lines = [f"{done} at step {result.step}: {config.run_dir}"]
    line = f"Validation loss {metrics['loss']:.4f} nats per token"
    if "masked_accuracy" in metrics:
        lines.append(f"{line} (masked), accuracy of masked tokens {metrics['masked_accuracy']:.1%}.")
    else:
        lines.append(f"{line}, {metrics['bits_per_byte']:.3f} bits per byte.")
    lines.append(f"Unigram entropy of the corpus {result.unigram_entropy:.4f} nats per token.")
    lines.append(f"Next: matmix generate {config.run_dir} --prompt TEXT, or matmix export {config.run_dir} --out DIR")
    return "\n".join(lines)
