"""`matmix launch slurm --prepare --parts 64 INPUT ... --out DIR`: a preparation as a job array, and a job that joins.

Each task of the array makes one part; the merge waits until all of them have succeeded. A failed part is made again
alone by `matmix launch resubmit DIR`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from matmix.data.prepare.config import PrepareConfig
from matmix.data.prepare.parts import missing_parts
from matmix.launch.jobs.records import Job, preparation_home
from matmix.launch.jobs.slurm.options import SlurmOptions
from matmix.launch.jobs.slurm.script import array_option, directives
from matmix.launch.jobs.slurm.submit import Submission, submit_script
from matmix.launch.prepare import Prepare
from matmix.train.arguments import read_verb

_PARTS, _MERGE = "parts.sbatch", "merge.sbatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation(Submission):
    """The parts of a preparation as an array, and their merge; `home` lies beside the dataset's folder."""

    parts: int
    arguments: tuple[str, ...]  # of `matmix prepare`
    config: PrepareConfig

    def scripts(self) -> dict[str, str]:
        """File name -> text, of the parts and of the merge."""
        out = self.config.out
        needed = [Path(out).parent, *map(_folder_of, self.config.inputs)]
        name = self.options.job_name or f"prepare-{Path(out).name}"
        # A task is one process; the user's template is that of runs.
        one = {"nodes": 1, "gpus_per_node": "0", "tasks_per_node": 1, "template": ""}
        own = dataclasses.replace(self.options, **one, job_name=name)
        # With the dependency of the parts the merge would wait for its own kind.
        last = dataclasses.replace(own, job_name=f"{name}-merge", dependency="")
        lines = directives(own, self.home, f"1-{self.parts}")
        # A merge whose parts have failed is not left in the queue.
        merge_lines = [*directives(last, self.home), "--kill-on-invalid-dep=yes"]
        parts, merge = ["prepare", *self.arguments], ["prepare", "--merge", "--out", out]
        return {
            _PARTS: self.render("prepare.sbatch", own, needed, lines, words=parts, parts=self.parts),
            _MERGE: self.render("prepare.sbatch", last, needed, merge_lines, words=merge, parts=0),
        }

    def write_inputs(self) -> None:
        """Notes where the dataset is to lie."""
        (self.folder / "out.txt").write_text(str(Path(self.config.out).absolute()), encoding="utf-8")

    def submit(self, scripts: Mapping[str, str]) -> Job:
        """Writes and submits parts and merge; the merge, which names the parts. Raises SlurmError or ValueError if
        Slurm refuses."""
        self.write(scripts)
        job = Job(kind="prepare", launch=self.launch_id, command=list(self.command), tasks=self.parts)
        return _submit_merge(self.home, submit_script(self.home, job, _PARTS))


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
    home, words = preparation_home(config.out), tuple(arguments)
    return Preparation(home=home, options=options, command=tuple(command), parts=parts, arguments=words, config=config)


def _folder_of(path: str) -> Path | str:
    """The folder that an input lies in; inputs may be patterns and bundled corpora."""
    if ":" in path:
        return ""
    parents = (Path(path), *Path(path).parents)
    return next((at for at in parents if at.is_dir() and not any(letter in at.name for letter in "*?[")), parents[-1])


def _submit_merge(home: Path, parts: Job) -> Job:
    """Submits the merge, which waits for the job of the parts where that has one."""
    dependency = [f"--dependency=afterok:{parts.job}"] if parts.job else []
    return submit_script(home, dataclasses.replace(parts, after=parts.job), _MERGE, *dependency)


def resubmit_preparation(home: Path, job: Job) -> Job | None:
    """Submits the parts that are missing and the merge; the merge's job, None if the dataset is complete."""
    folder, parts = home / "launch" / job.launch, dataclasses.replace(job, job="", after="")
    out = Path((folder / "out.txt").read_text(encoding="utf-8"))
    if (out / "manifest.json").is_file():
        return None
    if missing := missing_parts(out, job.tasks):
        parts = submit_script(home, parts, _PARTS, array_option(folder / _PARTS, missing))
    return _submit_merge(home, parts)
