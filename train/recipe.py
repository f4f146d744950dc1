"""Reads run configurations (defaults < recipe TOML < command line) and writes them back so that they can run again."""

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from matmix.data.artifacts import errors_in_one_line, shell_line
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url
from matmix.model.architecture import ARCHITECTURES
from matmix.model.config import MixerOptions, used_mixers
from matmix.model.mixers import MIXERS
from matmix.train.arguments import find_part, key_types, parse_arguments, read_table
from matmix.train.checkpoint.steps import step_of
from matmix.train.config import InitConfig, RampConfig, RunConfig
from matmix.train.recipe_files import find_recipe, read_remote_toml, read_toml

_PHASES, _RAMP = "phase", "ramp"
_FILLED_IN = (
    *("data.examples.labels", *(f"data.images.{name}" for name in ("classes", "mean", "std", "background"))),
    "model.head.outputs",
)
"""Fields that a run takes from its data where a recipe leaves them empty."""


@errors_in_one_line()
def config_from_dict(values: dict[str, Any], where: str) -> RunConfig:
    """Builds a config from nested dicts. Raises ValueError (one line, starting with `where`)."""
    return read_table(RunConfig, values, where)


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` with those of `overrides` in their places, tables key by key."""
    result = copy.deepcopy(dict(values))
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config with `changes` in their places; `steps` among them stand in place of `epochs`."""
    if "steps" in changes and "epochs" not in changes:
        values = {key: value for key, value in values.items() if key != "epochs"}
    return merged(values, changes)


def load_config(recipe: str, overrides: Mapping[str, Any] | Sequence[str] = ()) -> RunConfig:
    """Reads the config of a recipe (path or bundled name) or of a run (folder or URL). overrides: fields that differ,
    as words of a command line such as ["--optimizer.lr", "3e-4"], or as a mapping such as {"optimizer.lr": 3e-4}.
    Raises FileNotFoundError for a missing recipe and ValueError (one line) for a bad key, type or value."""
    path, values, run_dir = _read_recipe(recipe)
    if _PHASES in values or _RAMP in values:
        table = f"[[{_PHASES}]]" if _PHASES in values else f"[{_RAMP}]"
        takes = f"{shell_line('matmix', 'train', recipe)}, matmix plan and matmix launch take"
        raise ValueError(f"{path} has several phases ({table}), which {takes}; other commands take the folder of one")
    where = str(path)
    if isinstance(overrides, Mapping):
        values, run_dir = changed(values, nested(overrides)), overrides.get("run_dir") or run_dir
        where, overrides = f"{path} with overrides", ()
    return resolved_config(values, where, overrides, run_dir)


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"optimizer.lr": 3e-4} as {"optimizer": {"lr": 3e-4}}."""
    values: dict[str, Any] = {}
    for key, value in overrides.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merged(values, value)
    return values


def load_phases(recipe: str, overrides: Sequence[str] = ()) -> list[RunConfig]:
    """Returns the configs of a recipe's phases, in order; for a recipe without phases its own. A phase is the recipe
    with the changes in its table [[phase]]. It is a run of its own, RUN/phase-1 and so on, and begins with the weights
    that the one before it ends with, or goes on from there where its `init.resume` says so. A table [ramp] is such
    phases. Raises as `load_config`; overrides are for all phases."""
    path, values, run_dir = _read_recipe(recipe)
    if _RAMP in values:
        return _load_ramp(values, str(path), overrides, run_dir)
    if _PHASES not in values:
        return [resolved_config(values, str(path), overrides, run_dir)]
    tables = values.pop(_PHASES)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path}: [[{_PHASES}]] is a list of tables, one for each phase")
    configs: list[RunConfig] = []
    for number, table in enumerate(tables, start=1):
        where = f"{path}: phase {number}"
        if "run_dir" in table:
            raise ValueError(f"{where}: run_dir is that of the recipe, which has a folder for each phase")
        begins = {}
        if number > 1:
            own = table.get("init", {})
            if not isinstance(own, dict) or "from" in own:
                raise ValueError(f"{where}: it begins with the weights of phase {number - 1}: leave init.from out")
            begins = {"init": {**own, "from": configs[-1].run_dir}}
            before = configs[-1]
            ends = 0 if before.epochs or before.evaluation.patience else before.steps
            if own.get("decay") and not (ends or own.get("step")):
                raise ValueError(
                    f"{where}: init.decay begins with a known step, but phase {number - 1} ends by epochs or by "
                    "evaluation.patience: give it steps alone"
                )
            if own.get("resume") or own.get("decay"):
                begins["init"] = {"step": ends, **begins["init"]}
            values = {**values, "init": {}}
        config = resolved_config(changed(values, {**table, **begins}), where, overrides, run_dir)
        if number > 1:  # options of [init] on the command line are for the first phase
            config = _with_decay(dataclasses.replace(config, init=config_from_dict(begins, where).init))
        configs.append(dataclasses.replace(config, run_dir=f"{config.run_dir.rstrip('/')}/phase-{number}"))
    return configs


def _load_ramp(values: dict[str, Any], where: str, overrides: Sequence[str], run_dir: str) -> list[RunConfig]:
    """Returns the phases of a recipe with a table [ramp], each of which goes on where the one before it ended."""
    if _PHASES in values:
        raise ValueError(f"{where} has both [{_RAMP}] and [[{_PHASES}]]: keep one of them")
    ramp = read_table(RampConfig, values.pop(_RAMP), f"{where}: [{_RAMP}]")
    whole = resolved_config(values, where, overrides, run_dir)
    if whole.epochs or whole.init.goes_on:
        raise ValueError(f"{where}: a ramp needs a run of its own with its number of steps, not epochs or init.resume")
    configs: list[RunConfig] = []
    for number, config in enumerate(ramp.stages(whole), start=1):
        init = InitConfig(from_=configs[-1].run_dir, step=configs[-1].steps, resume=True) if configs else whole.init
        stop = whole.stop_step if whole.stop_step < config.steps else 0
        changes = {"init": init, "stop_step": stop, "run_dir": f"{whole.run_dir.rstrip('/')}/phase-{number}"}
        configs.append(dataclasses.replace(config, **changes))
    return configs


def _read_recipe(recipe: str) -> tuple[Path, dict[str, Any], str]:
    """Returns the path of a recipe, its values, and the place of its run unless the command line names another one."""
    path = Path(recipe) if is_url(recipe) else find_recipe(recipe)
    values = read_remote_toml(recipe) if is_url(recipe) else read_toml(path)
    if "comparison" in values:
        raise ValueError(f"{path} is a comparison of several models: {shell_line('matmix', 'compare', recipe)}")
    is_run = is_url(recipe) or Path(recipe).is_dir()  # it goes on where it lies, wherever it began
    return path, values, recipe if is_run else values.get("run_dir") or f"runs/{path.stem}"


def resolved_config(values: dict[str, Any], where: str, overrides: Sequence[str], run_dir: str) -> RunConfig:
    """Returns the config that `values` and the command line give. Raises ValueError (one line)."""
    _import_architecture(values, overrides)
    config = dataclasses.replace(config_from_dict(values, where), run_dir=run_dir)
    # Of all mixers, `--help` shows those that the layers hold; to look at fewer fields is also several times faster.
    words = [word.replace("-", "_") for word in overrides]
    mixers = {name for name in MIXERS if name in config.model.layers or any(name in word for word in words)}
    only = (MixerOptions, mixers)
    config = parse_arguments(RunConfig, list(overrides), default=config, prog="matmix train RECIPE", only=only)
    typed = {word.partition("=")[0] for word in overrides}
    if "--steps" in typed and config.epochs:  # in place of the recipe's epochs
        if "--epochs" in typed:
            raise ValueError("--steps and --epochs are both given: keep one of them")
        config = dataclasses.replace(config, epochs=0.0)
    config = _with_decay(dataclasses.replace(config, init=with_step(config.init)))
    return config if config.run_dir else dataclasses.replace(config, run_dir=run_dir)


def with_step(init: InitConfig) -> InitConfig:
    """Returns `init` with the run and the step of a checkpoint that it names by its path. Raises ValueError (one line)
    for an `init.step` that is another one."""
    run, _, name = init.from_.rstrip("/").rpartition("/checkpoints/")
    step = step_of(name) if run else None
    if step is not None and init.step not in (0, step):
        raise ValueError(f"init.step = {init.step}, but init.from names {name}: leave init.step out")
    return init if step is None else dataclasses.replace(init, from_=run, step=step)


def _with_decay(config: RunConfig) -> RunConfig:
    """Returns `config` with the steps and the schedule that its `init.decay` means."""
    init = config.init
    if not init.decay:
        return config
    if not init.step:
        where = "init.from = RUN/checkpoints/step-..., or init.step"
        raise ValueError(f"init.decay = {init.decay} needs the checkpoint that the decay begins with: {where}")
    schedule = dataclasses.replace(config.schedule, name="wsd", decay=float(init.decay), steps=0)
    if schedule.parts(init.step + init.decay)[0] > init.step:  # a share of more steps than the source's has
        schedule = dataclasses.replace(schedule, warmup=0.0)
    return dataclasses.replace(config, steps=init.step + init.decay, epochs=0.0, schedule=schedule)


def _import_architecture(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Imports the architectures from outside that a recipe or its command line names, which registers them: a
    config can name registered ones only, so that reading somebody else's imports nothing."""
    model = values.get("model")
    names = [model.get("architecture")] if isinstance(model, dict) else []
    for word, following in itertools.pairwise([*overrides, ""]):
        key, equals, value = word.partition("=")
        names += [value if equals else following] if key == "--model.architecture" else []
    for name in names:
        if isinstance(name, str) and ":" in name and name not in ARCHITECTURES:
            find_part(name, ARCHITECTURES, "model.architecture")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns nested plain dicts, ready for TOML and JSON, without the options of mixers that no layer is and nobody
    set."""
    values = plain(config)
    unset, tables = MixerOptions(), values["model"]["mixers"]
    for name in MIXERS:
        if name not in config.model.layers and getattr(config.model.mixers, name) == getattr(unset, name):
            del tables[name]
    return values


def plain(value: Any) -> Any:
    """Returns `value` as TOML and JSON have it: tuples are lists, configs are tables by the keys that recipes have (a
    field of Python cannot be called "from"), and tables have no keys that are None."""
    if dataclasses.is_dataclass(value):
        value = {field.name.removesuffix("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def write_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved config; the file is itself a recipe."""
    write_atomic(path, tomli_w.dumps(config_to_dict(config)))


def write_phases(phases: Sequence[RunConfig], path: Path) -> None:
    """Writes what `load_phases` returned, such that it returns the same from the file, wherever `path` is."""
    if len(phases) == 1:
        write_config(phases[0], path)
        return
    tables = [config_to_dict(config) for config in phases]
    for number, table in enumerate(tables):
        del table["run_dir"]
        if number:
            del table["init"]["from"]
    write_atomic(path, tomli_w.dumps({"run_dir": run_dir_of(phases), _PHASES: tables}))


def run_dir_of(phases: Sequence[RunConfig]) -> str:
    """Returns the run directory of a recipe, which holds those of its phases where it has several."""
    return phases[0].run_dir.rpartition("/")[0] if len(phases) > 1 else phases[0].run_dir


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Completes the plain values of a config that another version may have written: options that it did not know get
    their defaults, those that are no more are left out."""

    def filled(own: dict[str, Any], standard: dict[str, Any], cls: type) -> dict[str, Any]:
        # `config_to_dict` has the tables of those mixers only that it needs.
        hints, known = key_types(cls), {} if cls is MixerOptions else dict(standard)
        for key, value in own.items():
            if key in hints:
                deeper = dataclasses.is_dataclass(hints[key]) and isinstance(value, dict)
                known[key] = filled(value, standard.get(key, {}), hints[key]) if deeper else value
        return known

    return filled(values, plain(RunConfig()), RunConfig)


def differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Lists (dotted key, old value, new value) where nested dicts differ, in the order of `new`; None: missing."""
    rows = []
    for key in {**new, **old}:
        x, y = old.get(key), new.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            rows += differing(x, y, f"{prefix}{key}.")
        elif x != y:
            rows.append((prefix + key, x, y))
    return rows


def differences(old: dict[str, Any], new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Lists every field that differs, sorted; old: as `config_to_dict` gives it. One that the data fill in where it is
    empty differs only from another value, and options of mixers that no layer holds do not count."""
    values = config_to_dict(new)
    same = {"init.from"} if _phase_before(old) == _phase_before(values) != "" else set()
    used = used_mixers(new.model)
    rows = [row for row in differing(old, values) if row[0] not in same and (all(row[1:]) or row[0] not in _FILLED_IN)]
    rows = [row for row in rows if not row[0].startswith("model.mixers.") or row[0].split(".")[2] in used]
    return sorted(rows, key=lambda row: row[0].split("."))


def _phase_before(values: Mapping[str, Any]) -> str:
    """Returns the name of the phase that a run begins with, which lies beside it wherever both are; "" for other
    runs."""
    home, _, name = values["init"]["from"].rpartition("/")
    return name if name.startswith(f"{_PHASES}-") and home == values["run_dir"].rpartition("/")[0] else ""
