"""`matmix launch slurm`: what it takes, and what it says; the work is in `submit`."""

import dataclasses

import tyro

from matmix.data.artifacts import shell_line
from matmix.launch.jobs.processes import check_counts
from matmix.launch.jobs.slurm.options import Profile, SlurmWords, slurm_options
from matmix.launch.jobs.sweep import parse_sweep
from matmix.train.arguments import Recipe, check_overrides
from matmix.train.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """Submit a recipe as a Slurm job, a sweep of it as a job array, or with --prepare a preparation of data."""

    recipe: Recipe = ""
    """Path, run directory, or name of a bundled recipe; with --prepare the inputs of `matmix prepare`."""
    sweep: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """KEY=V,V: a job array over these values."""
    sweep_file: str | None = None
    """A job array over the [[run]] tables of a TOML file."""
    prepare: bool = False
    """Prepare data: --parts N and the inputs and options of `matmix prepare`, whose parts become a job array."""
    parts: int | None = None
    """Tasks of the array of a preparation, one part each."""
    dry_run: bool = False
    """Print the scripts; write and submit nothing."""
    profile: Profile = None
    slurm: tyro.conf.OmitArgPrefixes[SlurmWords]

    @property
    def first(self) -> tuple[str, str]:
        """Names the first argument, and tells how the verb is used."""
        if self.prepare:
            return "input", "--prepare --parts N INPUT ... --out DIR"
        return "recipe", "RECIPE [--key value ...]"

    def run(self, rest: list[str], typed: list[str]) -> int:
        from matmix.launch.jobs.slurm import submit  # imports torch, and --help should not
        from matmix.train.config import RunConfig

        options = slurm_options(self.profile, self.slurm)
        if self.prepare:
            require(self.parts is not None, f"how many parts? {submit.PREPARE_USAGE}")
            check_counts(self, "parts")
            plan = submit.plan_preparation([self.recipe, *rest], self.parts, options, typed)
        else:
            require(self.parts is None, "--parts belongs to --prepare, which prepares data; a recipe has no parts")
            check_overrides(self, rest, RunConfig)
            plan = submit.plan_launch(self.recipe, rest, parse_sweep(self.sweep, self.sweep_file), options, typed)
        if self.dry_run:
            print(*plan.scripts.values(), sep="\n", end="")
            return 0
        job, home = plan.submit(), plan.home
        output = home / "logs" / f"slurm-{job.after or job.job}"
        log = shell_line("tail", "-F", output) + "_*" * bool(job.tasks) + ".out"
        if self.prepare:
            home = home.with_suffix("")  # they find the launches beside the dataset by its own path
            end = f"Failed parts are made again by: {shell_line('matmix', 'launch', 'resubmit', home)}"
            print(f"Submitted {job.tasks} parts as job {job.after}, and job {job.job} that joins them")
        else:
            end = f"End it:     {shell_line('matmix', 'launch', 'cancel', home)}   (saves first)"
            what = f"job {job.job}" + (f" ({job.tasks} tasks)" if job.tasks else "")
            print(f"Submitted {what}: {plan.folder / 'job.sbatch'}")
        print(f"Follow it:  {shell_line('matmix', 'launch', 'status', home)}   or   {log}\n{end}")
        return 0
