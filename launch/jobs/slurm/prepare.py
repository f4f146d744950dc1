"""`matmix launch slurm --prepare --parts 64 INPUT ... --out DIR`: a preparation as a job array, and a job that joins.

Each task of the array makes one part; the merge waits until all of them have succeeded. A failed part is made again
alone by `matmix launch resubmit DIR`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.parts import missing_parts
from matmix.launch.jobs import snapshot
from matmix.launch.jobs.records import Job, preparation_home
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import array_option, directives, job_values, render
from matmix.launch.jobs.slurm.submit import submit_script
from matmix.launch.prepare import Prepare
from matmix.train.arguments import read_verb

_PARTS, _MERGE = "parts.sbatch", "merge.sbatch"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """A preparation before anything is written."""

    home: Path  # beside the dataset's folder
    launch_id: str
    parts: int
    arguments: tuple[str, ...]  # of `matmix prepare`
    config: PrepareConfig
    options: SlurmOptions
    command: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.home / "launch" / self.launch_id


def plan_preparation(
    arguments: Sequence[str], parts: int, options: SlurmOptions, command: Sequence[str]
) -> Preparation:
    """Checks the arguments of `matmix prepare`; writes nothing. Raises ValueError (one line) for mistakes."""
    if parts < 1:
        raise ValueError(f"--parts must be at least 1, got {parts}")
    verb, unknown = read_verb(Prepare, [*arguments, "--part", f"1/{parts}"], prog="matmix prepare INPUT ... --out DIR")
    assert not unknown
    if not verb.inputs or not verb.out:
        what = "output folder" if verb.inputs else "input"
        raise ValueError(f"no {what} given: matmix launch slurm --prepare --parts N INPUT ... --out DIR")
    config = verb.config()
    if "://" in config.out:
        raise ValueError(f"parts are made in a folder that all nodes share, not at a URL such as {config.out}")
    home = preparation_home(config.out)
    return Preparation(
        home=home,
        launch_id=snapshot.new_launch_id(home),
        parts=parts,
        arguments=tuple(arguments),
        config=config,
        options=options,
        command=tuple(command),
    )


def render_preparation(plan: Preparation) -> dict[str, str]:
    """Script name -> text, of the parts and of the merge."""
    options = plan.options
    needed = [Path(plan.config.out).parent, *map(_folder_of, plan.config.inputs)]
    scripts = {}
    for script, array, words in (
        (_PARTS, f"1-{plan.parts}", ["prepare", *plan.arguments]),
        (_MERGE, "", ["prepare", "--merge", "--out", plan.config.out]),
    ):
        name = f"{options.job_name or 'prepare-' + Path(plan.config.out).name}{'' if array else '-merge'}"
        own = dataclasses.replace(options, nodes=1, gpus_per_node="0", job_name=name)
        if not array:  # else it would wait for its own kind
            own = dataclasses.replace(own, dependency="")
        lines = directives(own, name=name, ranks_per_node=1, array=array, logs=plan.home / "logs")
        if not array:
            lines.append("--kill-on-invalid-dep=yes")  # a merge whose parts have failed is not left in the queue
        values = job_values(options, plan.command, plan.folder, lines, needed)
        scripts[script] = render("prepare.sbatch", values | {"words": words, "parts": plan.parts if array else 0})
    return scripts


def _folder_of(path: str) -> Path | str:
    """The folder that an input lies in; inputs may be patterns and bundled corpora."""
    if ":" in path:
        return ""
    folder = Path(path)
    while any(letter in folder.name for letter in "*?[") or not folder.is_dir():
        if folder == folder.parent:
            break
        folder = folder.parent
    return folder


def submit_preparation(plan: Preparation, scripts: dict[str, str]) -> tuple[Job, Job]:
    """Writes the launch and submits parts and merge; both jobs. Raises SlurmError or ValueError if Slurm refuses."""
    snapshot.take_snapshot(plan.folder)
    for name, text in scripts.items():
        (plan.folder / name).write_text(text, encoding="utf-8")
    (plan.home / "logs").mkdir(exist_ok=True)
    (plan.folder / "out.txt").write_text(str(Path(plan.config.out).absolute()), encoding="utf-8")
    job = Job(kind="prepare", launch=plan.launch_id, command=list(plan.command), tasks=plan.parts)
    return _submit(plan.home, job, [])


def _submit(home: Path, job: Job, options: list[str], *, merge_only: bool = False) -> tuple[Job, Job]:
    parts = dataclasses.replace(job, job="", after="")
    dependency: list[str] = []
    if not merge_only:
        parts = submit_script(home, parts, _PARTS, *options)
        dependency = [f"--dependency=afterok:{parts.job}"]
    return parts, submit_script(home, dataclasses.replace(parts, after=parts.job), _MERGE, *dependency)


def resubmit_preparation(home: Path, job: Job) -> Job | None:
    """Submits the parts that are missing and the merge; the merge's job, None if the dataset is complete."""
    out = Path((home / "launch" / job.launch / "out.txt").read_text(encoding="utf-8"))
    if (out / "manifest.json").is_file():
        return None
    missing = missing_parts(out, job.tasks)
    options = [array_option(home / "launch" / job.launch / _PARTS, missing)] if missing else []
    return _submit(home, job, options, merge_only=not missing)[1]
