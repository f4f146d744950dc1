"""The `matmix` command: thin verbs over the rooms below. Each verb is also a function one can call."""

from __future__ import annotations

import sys
from collections.abc import Callable

from matmix.data.storage.urls import refuse_secrets
from matmix.launch.parser import Parser
from matmix.train.process.begin import begin_training
from matmix.train.process.console import begin_process, guarded

_TEXTS = ("--prompt", "--text")
_EPILOG = """\
from text to a model elsewhere:
  matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000
  matmix train mru_shakespeare
  matmix generate runs/mru_shakespeare --prompt "ROMEO:"
  matmix export runs/mru_shakespeare --out exports/mru_shakespeare
"""


def _prepare(arguments: list[str]) -> int:
    from matmix.launch.prepare import main

    return main(arguments)


def _train(arguments: list[str]) -> int:
    from matmix.train.command import main

    return main(arguments)


def _compare(arguments: list[str]) -> int:
    from matmix.launch.lab.compare.command import main

    return main(arguments)


def _launch(arguments: list[str]) -> int:
    from matmix.launch.launch import main

    return main(arguments)


def _plan(arguments: list[str]) -> int:
    from matmix.launch.lab.plan.command import main

    return main(arguments)


def _generate(arguments: list[str]) -> int:
    from matmix.launch.generate import generate

    parser = Parser(prog="matmix generate", description="Sample text from a run or an export.")
    parser.add_argument("source", metavar="RUN", help="run directory or export directory")
    parser.add_argument("--prompt", default="", help="text to continue; for an encoder, text with <mask> in it")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to add (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest only; 0 = all")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from this share of probability (default: 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to use (default: the newest)")
    options = vars(parser.parse_args(arguments))
    return generate(options.pop("source"), **options)


def _checkpoints(arguments: list[str]) -> int:
    from matmix.launch.checkpoints import main

    return main(arguments)


def _export(arguments: list[str]) -> int:
    from matmix.launch.export import check_export, export_run

    parser = Parser(
        prog="matmix export", description="Write a run's weights as a directory that transformers loads by itself."
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="run directory")
    parser.add_argument("--out", metavar="DIR", help="directory to write (must not hold anything else)")
    parser.add_argument("--check", metavar="DIR", help="compare the files of an export with their hashes")
    parser.add_argument("--step", type=int, default=None, help="checkpoint to export (default: the newest)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--max-shard-bytes", type=int, default=5 * 10**9, help="size of a weight file (default: 5 GB)")
    options = vars(parser.parse_args(arguments))
    run, out, check = (options.pop(name) for name in ("run", "out", "check"))
    if check is not None:
        if run is not None or out is not None:
            raise ValueError("--check DIR looks at an export that is there: leave RUN and --out out")
        check_export(check)
        return 0
    if run is None or out is None:
        raise ValueError("matmix export RUN --out DIR, or matmix export --check DIR")
    export_run(run, out, **options)
    return 0


def _import(arguments: list[str]) -> int:
    from matmix.launch.export import import_reference

    parser = Parser(prog="matmix import", description="Turn a checkpoint of another project into an export directory.")
    parser.add_argument("--from", dest="kind", required=True, choices=["hydra", "mru-lm"], help="whose it is")
    parser.add_argument("file", metavar="FILE", help=".safetensors, .pt, .bin or a directory in transformers' layout")
    parser.add_argument("out", metavar="OUT", help="directory to write")
    options = parser.parse_args(arguments)
    import_reference(options.kind, options.file, options.out)
    return 0


def _show_mixer(arguments: list[str]) -> int:
    from matmix.launch.lab.show_mixer.command import show_mixer

    parser = Parser(
        prog="matmix show-mixer",
        usage="matmix show-mixer SOURCE --text TEXT [options] [--key value ...]",
        description="Draw the matrix M of every head as a heat map, one page a layer, with its rank. Fields of a "
        "recipe can be changed as in `matmix train`, such as --model.layers attention.",
    )
    parser.add_argument("source", metavar="SOURCE", help="run or export directory, or a recipe (initial weights)")
    parser.add_argument("--text", required=True, help="what the model reads")
    parser.add_argument("--out", default=None, metavar="DIR", help="folder for the pages (default: pictures/<name>)")
    parser.add_argument("--step", type=int, default=None, help="checkpoint of a run (default: the newest)")
    parser.add_argument("--layers", type=int, nargs="+", default=None, metavar="N", help="from 0 (default: all)")
    parser.add_argument("--max-tokens", type=int, default=None, help="cut the text after these (default: 128)")
    parser.add_argument("--max-heads", type=int, default=16, help="heads drawn of each layer (default: 16)")
    known, overrides = parser.parse_known_args(arguments)
    options = vars(known)
    show_mixer(options.pop("source"), overrides=overrides, **options)
    return 0


VERBS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "prepare": (_prepare, "tokenise text into shards"),
    "train": (_train, "train a recipe, or resume it (--dry-run: show its size and cost)"),
    "compare": (_compare, "train several mixers at equal parameters and tabulate them"),
    "launch": (_launch, "start runs on many processes: local, torchrun, Slurm; status, cancel, resubmit"),
    "plan": (_plan, "memory, traffic, time and risk of a run on a cluster"),
    "generate": (_generate, "sample from a run or an export"),
    "show-mixer": (_show_mixer, "draw the mixer matrices of a run or a recipe, with their ranks"),
    "export": (_export, "write a run as a directory that transformers loads"),
    "checkpoints": (_checkpoints, "list and verify the checkpoints of a run"),
    "import": (_import, "read a published Hydra or mru-lm checkpoint into such a directory"),
}


def _run(verb: str, arguments: list[str]) -> int:
    # All but what a model is to read: that goes nowhere.
    pairs = zip(["", *arguments], arguments, strict=False)
    words = [word for before, word in pairs if before not in _TEXTS and word.partition("=")[0] not in _TEXTS]
    refuse_secrets(words, f"matmix {verb}")
    return VERBS[verb][0](arguments)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `matmix` command; returns the exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
        if arguments[:1] == ["train"] and (code := begin_training(arguments[1:])):  # here the process is ours
            return code
    begin_process()
    if arguments and arguments[0] in VERBS:
        return guarded(lambda: _run(arguments[0], arguments[1:]))
    verbs = "\n".join(f"  {name:<13}{text}" for name, (_, text) in VERBS.items())
    usage = f"usage: matmix VERB ...   (matmix VERB --help explains each)\n\n{verbs}\n\n{_EPILOG}"
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f'matmix: error: unknown verb "{arguments[0]}"; one of {", ".join(VERBS)}', file=sys.stderr)
        return 2
    print(usage, end="")
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main())
