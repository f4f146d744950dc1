"""The `matmix` command: a tree of verbs, each a dataclass of its options in the module that does the work."""

import sys
from importlib.metadata import version

from matmix.data.artifacts import check_utf8
from matmix.data.modalities import MODALITIES
from matmix.data.storage.remote import refuse_secrets
from matmix.launch.tree import Branch, CommandTree
from matmix.train.entry import show_fields
from matmix.train.process.console import begin_process, guarded
from matmix.train.process.exits import EXIT_OK, EXIT_USER
from matmix.train.recipe_files import bundled_comparisons, bundled_recipes

_TEXTS = ("--prompt", "--text", "--stop")
_EPILOG = """\
matmix VERB --help explains each verb, and matmix --version says which matmix this is.

from text to a model elsewhere:
  matmix prepare bundled:shakespeare --out datasets/shakespeare --vocab-size 2048 --max-document-chars 4000
  matmix train mru_shakespeare
  matmix generate runs/mru_shakespeare --prompt "ROMEO:"
  matmix export runs/mru_shakespeare --out exports/mru_shakespeare
"""

_LAUNCH = {
    "local": Branch("on this host; starts again after failures", "matmix.launch.jobs.hosts:Local"),
    "torchrun": Branch(
        "this node's part; the same command on every node: RECIPE --nnodes 2 --nproc 8 --rdzv HOST:PORT",
        "matmix.launch.jobs.hosts:Torchrun",
    ),
    "slurm": Branch("as a Slurm job (--dry-run prints its script)", "matmix.launch.jobs.slurm.command:Slurm"),
    "status": Branch("what the run is doing", "matmix.launch.jobs.control:Status"),
    "cancel": Branch("saves the run, then ends its jobs", "matmix.launch.jobs.control:Cancel"),
    "resubmit": Branch("the last launch again: same code, same config", "matmix.launch.jobs.control:Resubmit"),
}
VERBS = {
    "prepare": Branch("tokenise text into shards", "matmix.launch.prepare:Prepare"),
    "index": Branch("use tokens that were made elsewhere, where they lie", "matmix.launch.prepare:Index"),
    "prepare-images": Branch("pictures with labels into shards", "matmix.launch.prepare:PrepareImages"),
    "recipes": Branch("list the recipes that come with matmix, or print one", "matmix.launch.listings:Recipes"),
    "train": Branch("train a recipe, or resume it (--dry-run: show its size and cost)", "matmix.train.entry:Train"),
    "finetune": Branch("train a pretrained encoder on labelled examples", "matmix.launch.finetune:Finetune"),
    "glue": Branch(
        "fine-tune an encoder on the tasks of GLUE, as published, and tabulate the scores",
        "matmix.launch.glue.command:Glue",
    ),
    "compare": Branch(
        "train several mixers at equal parameters and tabulate them", "matmix.launch.lab.compare.command:Compare"
    ),
    "ladder": Branch(
        "train the entries of a comparison at several sizes, and fit the law of their losses",
        "matmix.launch.lab.ladder.command:Ladder",
    ),
    "launch": Branch("start runs on many processes: local, torchrun, Slurm; status, cancel, resubmit", _LAUNCH),
    "plan": Branch("memory, traffic, time and risk of a run on a cluster", "matmix.launch.lab.plan.command:PlanRun"),
    "generate": Branch("sample from a run or an export", "matmix.launch.generate:Generate"),
    "evaluate": Branch("scores of any text, or of labelled examples", "matmix.launch.evaluate:Evaluate"),
    "classify": Branch("the likeliest classes of pictures, by an image classifier", "matmix.launch.evaluate:Classify"),
    "embed": Branch("one vector for every text, by an encoder", "matmix.launch.evaluate:Embed"),
    "show-mixer": Branch(
        "draw the mixer matrices of a run or a recipe, with their ranks",
        "matmix.launch.lab.show_mixer.command:ShowMixer",
    ),
    "average": Branch("the mean of the weights of a run's last checkpoints, as a run", "matmix.launch.export:Average"),
    "export": Branch("write a run as a directory that transformers loads", "matmix.launch.export:Export"),
    "checkpoints": Branch(
        "list and verify the checkpoints of a run; convert one for other engines and numbers of ranks",
        "matmix.launch.listings:Checkpoints",
    ),
    "import": Branch(
        "read a published Hydra or mru-lm checkpoint into such a directory", "matmix.launch.export:Import"
    ),
}
for _name, _modality in MODALITIES.items():
    _options = _modality.prepared_by
    if _options is not None:
        _summary = (_options.__doc__ or "").partition("\n")[0]
        VERBS.setdefault(_options.verb.removeprefix("matmix "), Branch(_summary, f"matmix.launch.prepare:{_name}"))
TREE = CommandTree("matmix", "Structured-matrix sequence mixers: data, training, models elsewhere.", VERBS)


def _run(words: list[str], *, own: bool) -> int:
    if words == ["--version"]:
        print(f"matmix {version('matmix')}")
        return EXIT_OK
    # All but what a model is to read: that goes nowhere.
    pairs = zip(["", *words], words, strict=False)
    shown = [word for before, word in pairs if before not in _TEXTS and word.partition("=")[0] not in _TEXTS]
    refuse_secrets(shown, "matmix")
    for word in shown:
        check_utf8(word, "{}", "rename the file or folder")
    try:
        verb, rest = TREE.read(words)
    except SystemExit:
        if TREE.takes_recipe and tuple(words[: len(TREE.path)]) == TREE.path:  # not where a completion was written
            compares = TREE.path in (("compare",), ("ladder",))
            show_fields(TREE.read, words, bundled_comparisons if compares else bundled_recipes)
        elif not TREE.path:
            print(_EPILOG, end="")
        return EXIT_OK
    if verb is None:
        _run([*words, "--help"], own=own)
        return EXIT_USER
    if own and hasattr(verb, "begin") and (code := verb.begin()):
        return code
    return verb.run(rest, words)


def main(arguments: list[str] | None = None) -> int:
    """Runs the `matmix` command and returns the exit code. arguments: None = those of this process."""
    begin_process()
    words = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(list(words), own=arguments is None), every_rank=True)


if __name__ == "__main__":
    sys.exit(main())
