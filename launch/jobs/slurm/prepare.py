"""`matmix launch slurm --prepare --parts 64 INPUT ... --out DIR`: a preparation as a job array, and a job that joins.

Each task of the array makes one part; the merge waits until all of them have succeeded. A failed part is made again
alone by `matmix launch resubmit DIR`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matmix.data.prepare.parts import missing_parts
from matmix.launch.jobs.launches import Job, new_launch_id, preparation_home
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import array_option
from matmix.launch.jobs.slurm.submit import Submission, render_job, submit_scripts
from matmix.launch.prepare import Prepare
from matmix.train.arguments import read_verb

USAGE = "matmix launch slurm --prepare --parts N INPUT ... --out DIR"
_PARTS, _MERGE = "parts.sbatch", "merge.sbatch"


def plan_preparation(arguments: Sequence[str], parts: int, options: SlurmOptions, command: Sequence[str]) -> Submission:
    """The parts of a preparation as an array, and their merge; `home` lies beside the dataset's folder.

    arguments: of `matmix prepare`, which are checked; nothing is written. Raises ValueError (one line) for mistakes.
    """
    verb, unknown = read_verb(Prepare, [*arguments, "--part", f"1/{parts}"], prog="matmix prepare INPUT ... --out DIR")
    assert not unknown
    config = verb.config(USAGE)
    if "://" in config.out:
        raise ValueError(f"parts are made in a folder that all nodes share, not at a URL such as {config.out}")
    home, out = preparation_home(config.out), Path(config.out)
    job = Job(kind="prepare", launch=new_launch_id(home), command=list(command), tasks=parts)
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
    """The folder that an input lies in; inputs may be patterns and bundled corpora."""
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
