"""Plans what goes to Slurm before anything is written: a run, a sweep, or the parts and the merge of a preparation, as
batch scripts (jinja2) whose values all reach the shell through a filter that quotes them."""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from matmix.data.artifacts import shell_line
from matmix.data.prepare.parts import missing_parts
from matmix.launch.jobs import launches
from matmix.launch.jobs.launches import Job, launch_home
from matmix.launch.jobs.slurm import scheduler
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.sweep import Point
from matmix.launch.prepare import Prepare
from matmix.train.arguments import read_verb
from matmix.train.config import RunConfig
from matmix.train.errors import require
from matmix.train.recipe import load_phases, run_dir_of, write_phases
from matmix.train.run.directory import RunDirectory

PREPARE_USAGE = "matmix launch slurm --prepare --parts N INPUT ... --out DIR"
SCRIPT, _PARTS, _MERGE = "job.sbatch", "parts.sbatch", "merge.sbatch"
# What templates may use of the options.
_OPTIONS = ("setup", "env", "runtime", "container", "gpus", "master_addr", "max_requeues")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submission:
    """Holds all that goes to Slurm, before anything is written."""

    home: Path  # folder with launch/ and logs/
    job: Job  # without its number
    scripts: Mapping[str, str]  # file name -> text; each begins when the one before has succeeded
    write_inputs: Callable[[Path], object]  # writes what the scripts read into HOME/launch/<id>

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.job.launch

    def write(self) -> None:
        """Writes HOME/launch/<id>/, the scripts last, and makes the folder of the logs."""
        launches.take_snapshot(self.folder)
        self.write_inputs(self.folder)
        (self.home / "logs").mkdir(exist_ok=True)
        for name, text in self.scripts.items():
            (self.folder / name).write_text(text, encoding="utf-8")

    def submit(self) -> Job:
        """Writes and submits as `submit_scripts`."""
        self.write()
        return submit_scripts(self.home, self.job, dict.fromkeys(self.scripts, ()))


def submit_scripts(home: Path, job: Job, scripts: Mapping[str, Sequence[str]]) -> Job:
    """Submits scripts of a job's launch, each with options, to begin when the one before has succeeded. Returns the
    last one's job, as recorded. Raises SlurmError or ValueError if Slurm refuses."""
    job = dataclasses.replace(job, job="", after="")
    for script, options in scripts.items():
        waits = [f"--dependency=afterok:{job.job}"] if job.job else []
        number, cluster = scheduler.submit(str(home / "launch" / job.launch / script), *options, *waits)
        job = dataclasses.replace(job, job=number, cluster=cluster, after=job.job, time=time.time())
        launches.add_job(home, job)
    return job


# -- runs and sweeps ---------------------------------------------------------------------------------------------------


def plan_launch(
    recipe: str, overrides: Sequence[str], points: Sequence[Point], options: SlurmOptions, command: Sequence[str]
) -> Submission:
    """Checks everything that can be checked before the job runs; writes nothing. Raises FileNotFoundError for a missing
    recipe and ValueError (one line) for settings that cannot work."""
    base = load_phases(recipe, overrides)
    home = launch_home(run_dir_of(base))
    if points and (home / "config.toml").is_file():
        raise ValueError(f"{home} is a run; give the sweep a --run-dir of its own, which will hold its runs")
    within = run_dir_of(base).rstrip("/")
    swept = [
        load_phases(recipe, [*overrides, *point.overrides, "--run-dir", f"{within}/{point.name}"]) for point in points
    ]
    return plan_runs(home, swept or [base], options, command, is_sweep=bool(points))


def plan_runs(
    home: Path, runs: Sequence[Sequence[RunConfig]], options: SlurmOptions, command: Sequence[str], *, is_sweep: bool
) -> Submission:
    """Plans one run, or the tasks of an array, whose run directories lie below `home`; runs: the complete configs of
    the phases of each."""
    runs = [checked(phases, options.nodes * options.ranks_per_node) for phases in runs]
    folders = [launches.run_folder(home, run_dir_of(phases)) for phases in runs] if is_sweep else []
    job = Job(kind="slurm", launch=launches.new_launch_id(home), command=list(command), tasks=len(folders))
    datasets = [part for phases in runs for config in phases for part in (config.data, config.data.images)]
    needed = [home, *(path for part in datasets for path in (part.path, part.validation_path))]
    array = f"0-{len(folders) - 1}" if folders else ""
    own = {"run": home, "runs": folders, "tasks_per_node": options.ranks_per_node}

    def write_configs(folder: Path) -> None:
        write_phases(runs[0], folder / "config.toml")
        for number, (run, phases) in enumerate(zip(folders or [home], runs, strict=True)):
            note_run(run, phases)
            if folders:
                (task := folder / "tasks" / str(number)).mkdir(parents=True)
                write_phases(phases, task / "config.toml")

    script = render_job("train.sbatch", home, job, options, needed, array, **own)
    return Submission(home=home, job=job, scripts={SCRIPT: script}, write_inputs=write_configs)


def checked(phases: Sequence[RunConfig], ranks: int) -> list[RunConfig]:
    """Returns a recipe's phases with absolute run directories. Raises ValueError for a global batch that does not
    divide over the ranks, and for a run directory that belongs to another config."""
    said = dict.fromkeys(config.micro_batch_words(config.data_size(ranks)) for config in phases)
    for words in filter(None, said):
        print(words, file=sys.stderr, flush=True)
    if "://" in phases[0].run_dir:
        return list(phases)
    placed: list[RunConfig] = []
    for config in phases:
        init = dataclasses.replace(config.init, from_=placed[-1].run_dir) if placed else config.init
        config = dataclasses.replace(config, run_dir=str(launch_home(config.run_dir)), init=init)
        placed.append(config)
        run = RunDirectory(config.run_dir)
        if run.config_path.is_file():
            # Where it is 0, the run has taken it from its data.
            vocab_size = config.model.vocab_size or run.read_config().model.vocab_size
            run.check(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size)))
    return placed


def note_run(home: Path, phases: Sequence[RunConfig]) -> None:
    """Notes where a run is, and makes the folders of its phases, so that each holds how its starts ended."""
    launches.note_url(home, run_dir_of(phases))
    for config in phases if len(phases) > 1 else ():
        own = home / config.run_dir.rpartition("/")[2]
        (own / "launch").mkdir(parents=True, exist_ok=True)
        launches.note_url(own, config.run_dir)


# -- preparations ------------------------------------------------------------------------------------------------------


def plan_preparation(arguments: Sequence[str], parts: int, options: SlurmOptions, command: Sequence[str]) -> Submission:
    """Plans the parts of a preparation as an array, and their merge. arguments: of `matmix prepare`, which are checked.
    Raises ValueError (one line) for mistakes."""
    verb, unknown = read_verb(Prepare, [*arguments, "--part", f"1/{parts}"], prog="matmix prepare INPUT ... --out DIR")
    assert not unknown
    config = verb.config(PREPARE_USAGE)
    if "://" in config.out:
        raise ValueError(f"parts are made in a folder that all nodes share, not at a URL such as {config.out}")
    home, out = launches.preparation_home(config.out), Path(config.out)
    job = Job(kind="prepare", launch=launches.new_launch_id(home), command=list(command), tasks=parts)
    needed = [out.parent, *map(_folder_of, config.inputs)]
    name = options.job_name or f"prepare-{out.name}"
    # A task is one process; the user's template is that of runs.
    own = dataclasses.replace(options, nodes=1, gpus_per_node="0", tasks_per_node=1, template="", job_name=name)
    # With the dependency of the parts the merge would wait for its own kind; one whose parts have failed is not left in
    # the queue.
    sbatch = (*own.sbatch, "kill-on-invalid-dep=yes")
    last = dataclasses.replace(own, job_name=f"{name}-merge", dependency="", sbatch=sbatch)
    words, merge = ["prepare", *arguments], ["prepare", "--merge", "--out", config.out]
    scripts = {
        _PARTS: render_job("prepare.sbatch", home, job, own, needed, f"1-{parts}", words=words, parts=parts),
        _MERGE: render_job("prepare.sbatch", home, job, last, needed, "", words=merge, parts=0),
    }

    def note_out(folder: Path) -> None:
        (folder / "out.txt").write_text(str(out.absolute()), encoding="utf-8")

    return Submission(home=home, job=job, scripts=scripts, write_inputs=note_out)


def _folder_of(path: str) -> Path | str:
    """Returns the folder that an input lies in; inputs may be patterns and bundled corpora."""
    if ":" in path:
        return ""
    parents = (Path(path), *Path(path).parents)
    return next((at for at in parents if at.is_dir() and not any(letter in at.name for letter in "*?[")), parents[-1])


def resubmit_preparation(home: Path, job: Job) -> Job | None:
    """Submits the parts that are missing and the merge; the merge's job, None if the dataset is complete."""
    folder = home / "launch" / job.launch
    out = Path((folder / "out.txt").read_text(encoding="utf-8"))
    if (out / "manifest.json").is_file():
        return None
    missing = missing_parts(out, job.tasks)
    parts = {_PARTS: [array_option(folder / _PARTS, missing)]} if missing else {}
    return submit_scripts(home, job, {**parts, _MERGE: []})


# -- scripts -----------------------------------------------------------------------------------------------------------


def render_job(
    template: str, home: Path, job: Job, options: SlurmOptions, needed: Iterable[str | Path], array: str, **own: Any
) -> str:
    """Returns the text of a batch script. needed: folders and files, seen in a container under their own names; array:
    as in 0-7, "" = no array; own: values of this template, beside those that every template may use."""
    folders: list[Path] = []
    for folder in (Path.cwd(), *(Path.cwd() / path for path in needed if path and "://" not in str(path))):
        if not any(folder.is_relative_to(other) for other in folders):
            folders.append(folder)
    values = {
        "title": " ".join(shell_line("matmix", *job.command).split()),
        "directives": _directives(options, home, array),
        "launch": home / "launch" / job.launch,
        "python": options.container_python if options.container else sys.executable,
        "mounts": [*(f"{folder}:{folder}" for folder in folders), *options.container_mounts],
        **{name: getattr(options, name) for name in _OPTIONS},
    }
    return render(template, values | own, options.template)


def render(template: str, values: Mapping[str, Any], replacement: str = "") -> str:
    """Returns a bundled template, or the user's file `replacement`, with `values` filled in; the filters `sh` and
    `sbatch` quote for the shell and for #SBATCH. Raises ValueError for a name that does not exist and the like."""
    source = Path(replacement or str(resources.files("matmix.launch.jobs.slurm.templates") / template))
    if not source.is_file():
        raise FileNotFoundError(f"template not found: {source}")
    blanks = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **blanks)
    environment.filters |= {"sh": shell_line, "sbatch": sbatch_value}
    try:
        return environment.from_string(source.read_text(encoding="utf-8")).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{source}, line {error.lineno}: {error.message}") from None
    except jinja2.UndefinedError as error:
        raise ValueError(f"{source}: {error.message}; it may use {', '.join(sorted(values))}") from None


def sbatch_value(value: Any) -> str:
    """Returns a value in an #SBATCH line, quoted where it must be. Raises ValueError for line breaks."""
    text = str(value)
    require(not {"\n", "\r"} & set(text), f"an option of sbatch cannot hold a line break: {text!r}")
    if re.fullmatch(r"[A-Za-z0-9@%+=:,./_-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def array_option(script: Path, tasks: list[int]) -> str:
    """Returns --array for some of the tasks, with the limit that the script's own line has."""
    own = next(line for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("#SBATCH --array="))
    _, percent, limit = own.partition("%")
    return f"--array={','.join(map(str, tasks))}{percent}{limit}"


def _directives(options: SlurmOptions, home: Path, array: str) -> list[str]:
    """Returns the #SBATCH lines, without #SBATCH. home: holds logs/, and names the job where the options do not."""
    require("\\" not in str(home), f"Slurm cannot write below a folder with a backslash in its name: {home / 'logs'}")
    output = "slurm-%A_%a.out" if array else "slurm-%j.out"
    lines = {
        "job-name": options.job_name or home.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.ranks_per_node,
        "gres": f"gpu:{options.gpus_per_node}" if options.gpus else "",
        "cpus-per-task": options.cpus_per_task or "",
        **{key: getattr(options, key) for key in ("mem", "partition", "account", "qos", "time", "dependency")},
        "array": f"{array}%{options.array_limit}" if array and options.array_limit else array,
        "signal": f"B:USR2@{options.save_seconds}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": f"{str(home / 'logs').replace('%', '%%')}/{output}",
    }
    written = [f"--{key}={sbatch_value(value)}" for key, value in lines.items() if value != ""] + ["--requeue"]
    for text in options.sbatch:
        key, equals, value = text.strip().lstrip("-").partition("=")
        if not key.replace("-", "").isalnum():
            examples = "exclusive or constraint=h100"
            raise ValueError(f"--sbatch-option takes an option of sbatch such as {examples}, got {text!r}")
        written.append(f"--{key}={sbatch_value(value)}" if equals else f"--{key}")
    return written
