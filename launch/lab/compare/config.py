"""Recipes of comparisons: an ordinary recipe, and a table `[comparison]` with its entries, `[[comparison.entry]]`, each
the recipe with the keys that stand beside its name; what the command line gives goes to all of them. With variants,
such as several tasks, every entry is trained on each `[[comparison.variant]]`, in COMPARISON/<entry>/<variant>/seed-0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from matmix.data.artifacts import errors_in_one_line, shell_line
from matmix.data.storage.files import write_atomic
from matmix.data.storage.remote import is_url
from matmix.launch.many.planned import PlannedRun, of_seed
from matmix.model.config import NO_MIXER, ModelConfig
from matmix.model.mixers import MIXERS
from matmix.model.mixers.convolutions.short import Convolution
from matmix.train.arguments import field_names, given_keys, parse_arguments, read_table, unknown_key
from matmix.train.config import RunConfig
from matmix.train.errors import require
from matmix.train.recipe import changed, config_from_dict, nested, plain
from matmix.train.recipe_files import find_recipe, read_toml

Control = Literal["no mixer", "convolution only"]
"""What a control is, and the name of the entry that is added."""


def control_of(model: ModelConfig) -> Control | None:
    mixers = model.mixer_names()
    if not mixers:
        return "no mixer"
    return "convolution only" if mixers == [Convolution.name] else None


def missing_controls(models: Sequence[ModelConfig]) -> dict[Control, dict[str, Any]]:
    """Name -> overrides of the controls that a comparison of these models lacks: "convolution only" where any of them
    has a mixer with a convolution in front, whose options it takes."""
    present = {control_of(model) for model in models}
    missing: dict[Control, dict[str, Any]] = {}
    if "no mixer" not in present:
        missing["no mixer"] = {"model": {"layers": [NO_MIXER]}}
    options = _convolution_options(models)
    if "convolution only" not in present and options is not None:
        missing["convolution only"] = {"model": {"layers": [Convolution.name], "mixers": {Convolution.name: options}}}
    return missing


def _convolution_options(models: Sequence[ModelConfig]) -> dict[str, Any] | None:
    """The options of the first convolution in front of a mixer that the control can be: not of a causal one in an
    encoder, nor a wider one than it knows; {} where it can be none of them, None without any."""
    options = None
    for model in models:
        for name in model.mixer_names():
            given = model.mixer_config(name)
            if not MIXERS[name].has_convolution(given):
                continue
            keys = (field.name for field in dataclasses.fields(Convolution.Config))
            options, own = {}, {key: getattr(given, key) for key in keys if hasattr(given, key)}
            own |= MIXERS[name].convolution_alone(given)
            with contextlib.suppress(ValueError):
                Convolution.check(model.d_model, Convolution.Config(**own))
                if model.mixer_is_causal(name) == model.causal:
                    return own
    return options


# -- what the command line gives --------------------------------------------------------------------------------------

Key = tuple[str, ...]
"""The names of nested tables down to a value."""
_SETTINGS: dict[str, Any] = {"seeds": tuple[int, ...], "parameters": int, "tolerance": float, "controls": bool}
_SETTINGS |= {"tune": dict[str, Any], "tune_seed": int}


def given_values(words: Sequence[str]) -> dict[Key, Any]:
    """Path of each key that is given -> its value, of the right type. Raises ValueError (one line)."""
    if not words:
        return {}
    keys = given_keys(words)
    for key in keys:
        table, _, name = key.partition(".")
        if key.startswith("comparison.tune."):
            tuned = f'{{"{name.removeprefix("tune.")}" = [0.001, 0.003]}}'
            raise ValueError(f"--{key}: give the table, as in {shell_line('--comparison.tune', tuned)}")
        if table == "comparison" and name not in _SETTINGS:
            raise ValueError(f"--{key}: of [comparison], {', '.join(_SETTINGS)} can be given; the rest is the recipe's")
        if table != "comparison" and key not in field_names(RunConfig):
            raise unknown_key(key, RunConfig, "command line")
    paths = [tuple(key.split(".")) for key in keys]
    hints = {**typing.get_type_hints(RunConfig), "comparison": _SETTINGS}
    read = dataclasses.asdict(parse_arguments(_only(hints, paths), list(words), prog="matmix compare RECIPE"))
    values = {}
    for path in paths:
        value = read
        for name in path:
            value = value[name if name in value else f"{name}_"]
        values[path] = plain(value)
    return values


def _only(hints: Mapping[str, Any], paths: Sequence[Key]) -> type:
    """A config class that has these keys only, so that their values are read without checks of what they go with."""
    fields = []
    for key in dict.fromkeys(path[0] for path in paths):
        name = key if key in hints else f"{key}_"
        hint, inner = hints[name], [path[1:] for path in paths if path[0] == key]
        if dataclasses.is_dataclass(hint):
            hint = typing.get_type_hints(hint, include_extras=True)
        if isinstance(hint, Mapping):
            if () in inner:
                raise ValueError(f"command line: {key} is a table; give its keys one by one, as in --{key}.KEY VALUE")
            hint = _only(hint, inner)
        fields.append((name, hint))
    return dataclasses.make_dataclass("Given", fields, frozen=True, kw_only=True)


def _remove(table: dict[str, Any], path: Key) -> None:
    for part in path[:-1]:
        table = table.get(part, {})
        if not isinstance(table, dict):
            return
    table.pop(path[-1], None)


# -- the table [comparison] -------------------------------------------------------------------------------------------

_NOT_AN_ENTRYS = {"seed": "comparison.seeds gives the seeds", "run_dir": "every run has a folder of its own"}
FINETUNED = "finetune"
"""The folder of the fine-tunings."""
LADDER = "ladder"
"""The table that `matmix ladder` reads beside this one."""
TUNING = "tune"
"""The folder of an entry's tuning runs."""
_FILES = "comparison.toml", "speed.json", "lock.json", ".speed.json.tmp"
_OWN = "report", "launch", "logs", FINETUNED, TUNING, *_FILES
"""What lies beside the folders of the entries, and of their variants."""

Value = bool | int | float | str
Point = tuple[tuple[str, Value], ...]
"""Each key that is tuned, with a value."""


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(f'"{one}"' for one in known)


def folder_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """One of the models that are compared, or of the variants: settings, such as data, in which all of them are."""

    name: str
    """What the table calls it; also the name of its folder, with - for what is not a letter, digit or one of . _ +"""
    overrides: dict[str, Any]
    """All other keys of the table: what it has in place of the recipe's values, nested as in the recipe."""

    def __post_init__(self) -> None:
        require(bool(self.folder), f"name = {self.name!r} holds no letter or digit for a folder")
        taken = f'the name "{self.name}" is taken by a file of the comparison itself; use another'
        require(self.folder.lower() not in _OWN, taken)
        for key, reason in _NOT_AN_ENTRYS.items():
            require(key not in self.overrides, f'"{self.name}" sets {key}: {reason}')

    @property
    def folder(self) -> str:
        return folder_name(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonConfig:
    """The table `[comparison]`."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Every entry is trained once with each of them."""
    parameters: int = 0
    """Of every entry in all, embeddings included; 0 = those of the first entry at the recipe's own width."""
    tolerance: float = 0.01
    """Share of them by which an entry may be off."""
    controls: bool = True
    """Adds the entries "no mixer" and, where a mixer has a convolution in front, "convolution only"."""
    tune: dict[str, tuple[Value, ...]] = dataclasses.field(default_factory=dict)
    """Keys of the recipe, such as "optimizer.lr", and values: every entry by itself is first trained with each of them,
    and with each combination of several keys, and takes those of its lowest validation loss."""
    tune_seed: int | None = None
    """The seed of these runs; left out, the lowest that is not among `seeds`."""
    published: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scores that a publication gives for entries, by name: the report counts the pairs of entries in their order."""
    published_source: str = ""
    """What these are, such as "arXiv 2407.09941, table 2, loss on C4"."""
    published_metric: str = "loss"
    """The metric of our runs whose order is compared with theirs, such as "masked_accuracy"; of both the lower numbers
    are the better ones, or of both the higher ones."""
    entry: tuple[RowConfig, ...] = ()
    """What is compared."""
    variant: tuple[RowConfig, ...] = ()
    """Every entry is trained on each of them, with a table each; none = the recipe as it is."""

    def __post_init__(self) -> None:
        fine = bool(self.seeds) and min(self.seeds) >= 0 and len(set(self.seeds)) == len(self.seeds)
        require(fine, f"comparison.seeds should be integers >= 0, none of them twice, got {list(self.seeds)}")
        require(self.parameters >= 0, f"comparison.parameters should be >= 0, got {self.parameters}")
        require(0 < self.tolerance < 1, f"comparison.tolerance should lie between 0 and 1, got {self.tolerance}")
        self._check_tuning()
        require(bool(self.entry), "comparison.entry is empty: give a table [[comparison.entry]] for each model")
        for name, score in self.published.items():
            names = [row.name for row in self.entry]
            require(name in names, f'comparison.published: no entry is called "{name}" ({_hint(name, names)})')
            require(math.isfinite(score), f'comparison.published: "{name}" should be a number, got {score}')
        advice = "give them other names (the controls are entries too, unless comparison.controls is false)"
        for rows in (self.entry, self.variant):
            folders = [row.folder.lower() for row in rows]
            for row in rows:
                shared = f'"{row.name}" would share the folder "{row.folder}" with another one; {advice}'
                require(folders.count(row.folder.lower()) == 1, shared)

    @property
    def tuned_with(self) -> int:
        """Returns the seed of the tuning runs."""
        free = next(seed for seed in itertools.count() if seed not in self.seeds)
        return free if self.tune_seed is None else self.tune_seed

    @property
    def grid_size(self) -> int:
        """Returns how many tuning runs an entry has at least."""
        return math.prod(map(len, self.tune.values())) if self.tune else 0

    def _check_tuning(self) -> None:
        seed = f"comparison.tune_seed should be an integer >= 0 that is not among the seeds, got {self.tune_seed}"
        require(self.tuned_with >= 0 and not (self.tune and self.tuned_with in self.seeds), seed)
        for key, values in self.tune.items():
            if key not in field_names(RunConfig):
                raise unknown_key(key, RunConfig, "comparison.tune")
            require(key not in _NOT_AN_ENTRYS, f"comparison.tune has {key}: {_NOT_AN_ENTRYS.get(key)}")
            fine = bool(values) and len(set(values)) == len(values)
            require(fine, f"comparison.tune should have values for {key}, none of them twice, got {list(values)}")
            for row in (*self.entry, *self.variant):
                table: Any = row.overrides
                for name in key.split("."):
                    table = table.get(name) if isinstance(table, dict) else None
                require(table is None, f'"{row.name}" sets {key}, which comparison.tune chooses; leave one of them out')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry with its whole config, in one variant where there are any."""

    name: str
    folder: str
    config: RunConfig
    """Of its runs, but for seed and run directory."""
    variant: str = ""
    parameters: int = 0
    """Of its model; 0 until widths are matched."""
    target: int = 0
    """Parameters that all entries of the variant have, within the tolerance; 0 until widths are matched."""
    own_headdims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Mixer -> headdim as the recipe has it, where widths are matched."""
    tried: Mapping[Point, float | None] = dataclasses.field(default_factory=dict)
    """Values -> validation loss of the tuning run, infinite where it diverged, None where it is not finished."""
    chosen: Point = ()
    """The best of them, which `config` has; () where nothing is tuned, or not yet."""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def control(self) -> Control | None:
        return control_of(self.config.model)

    @property
    def tunes(self) -> list[str]:
        """Returns the keys that are tuned."""
        return [key for key, _ in next(iter(self.tried), ())]

    @property
    def is_ready(self) -> bool:
        """Returns False where the settings of its runs depend on tuning that is not finished."""
        return bool(self.chosen or not self.tried)

    @property
    def label(self) -> str:
        """Returns its name in tables and pictures."""
        return f"{self.name} (control)" if self.control else self.name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Describes what `matmix compare` works on."""

    home: Path
    settings: ComparisonConfig
    entries: tuple[Entry, ...]
    """All of the first variant, then all of the next."""
    recipe: Mapping[str, Any]
    """The recipe with the overrides in it."""

    def by_variant(self) -> list[Comparison]:
        """Returns what is compared in each variant by itself; without variants, this comparison."""
        parts: dict[str, list[Entry]] = {}
        for entry in self.entries:
            parts.setdefault(entry.variant, []).append(entry)
        return [dataclasses.replace(self, entries=tuple(entries)) for entries in parts.values()]


@errors_in_one_line()
def read_comparison(recipe: str, overrides: Sequence[str] = (), *, runs: Path = Path("runs")) -> Comparison:
    """A comparison from a recipe (path or bundled name) or its folder, and overrides for all entries, such as
    ``--steps 100``. Raises FileNotFoundError for a missing recipe and ValueError (one line) for what is wrong in it."""
    path = _find(recipe)
    values, where = read_toml(path), str(path)
    if "comparison" not in values:
        raise ValueError(f"{path} has no table [comparison]: it is a plain recipe, for matmix train")
    require("seed" not in values, f"{path} sets seed: {_NOT_AN_ENTRYS['seed']}")
    rows = [row for kind in ("entry", "variant") for row in _rows(values["comparison"], kind, where)]
    if path.parent == Path(recipe):
        values["run_dir"] = recipe  # it goes on where it lies, wherever it began
    given = given_values(overrides)
    require(("seed",) not in given, f"--seed: {_NOT_AN_ENTRYS['seed']}")
    lengths = {("steps",), ("epochs",)}  # of which either stands in place of both of a row
    replaced = given.keys() | (lengths if any(map(given.get, lengths)) else set())
    for row, key in itertools.product([*rows, {"comparison": values["comparison"]}], replaced):
        _remove(row, key)
    values = changed(values, nested({".".join(key): value for key, value in given.items()}))
    if overrides:
        where = f"{path} with {' '.join(overrides)}"
    own = {key: value for key, value in values.items() if key not in ("comparison", LADDER)}
    try:
        settings = _settings(values["comparison"])
        for key in settings.tune:
            require(tuple(key.split(".")) not in given, f"--{key}: comparison.tune chooses it; leave one of them out")
        advice = "(--comparison.parameters N; 0 = those of the first entry at the d_model that is given)"
        fixed = f"widths follow from comparison.parameters = {settings.parameters:,}; give that {advice}"
        require(not (settings.parameters and ("model", "d_model") in given), f"--model.d-model: {fixed}")
        entries = _entries(own, settings)
        if settings.controls:
            missing = missing_controls([entry.config.model for entry in entries])
            rows = (RowConfig(name=name, overrides=overrides) for name, overrides in missing.items())
            settings = dataclasses.replace(settings, entry=(*settings.entry, *rows))
            entries = _entries(own, settings)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    run_dir = entries[0].config.run_dir or str(runs / path.stem)
    require(not is_url(run_dir), f"--run-dir {run_dir}: a comparison lies in a folder of this machine")
    settings = _tuned_as_before(settings, Path(run_dir))
    return Comparison(home=Path(run_dir), settings=settings, entries=entries, recipe=values)


def _tuned_as_before(settings: ComparisonConfig, home: Path) -> ComparisonConfig:
    """Takes the seed of tuning runs from the comparison that lies there already, where the recipe leaves it out: with
    more seeds it would be another one. Raises ValueError (one line) where it is among the seeds now."""
    kept = home / "comparison.toml"
    if not settings.tune or settings.tune_seed is not None or not kept.is_file():
        return settings
    table = read_toml(kept).get("comparison", {})
    if not table.get("tune") or (seed := table.get("tune_seed")) is None:
        return settings
    advice = "leave it out of the seeds, or name another --run-dir"
    require(seed not in settings.seeds, f"{home} is tuned with seed {seed}, which is among comparison.seeds: {advice}")
    return dataclasses.replace(settings, tune_seed=seed)


def _find(recipe: str) -> Path:
    folder = Path(recipe)
    if (path := folder / "comparison.toml").is_file():
        return path
    try:
        return find_recipe(recipe)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
        raise FileNotFoundError(f"{folder} is not the folder of a comparison: it has no comparison.toml") from None


def _rows(table: Any, kind: str, where: str) -> list[dict[str, Any]]:
    rows = table.get(kind, []) if isinstance(table, dict) else table
    fine = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    require(fine, f"{where}: comparison.{kind} should be tables [[comparison.{kind}]], got {rows!r}")
    return rows


def _settings(table: dict[str, Any]) -> ComparisonConfig:
    """Reads the table; the keys of an entry or a variant but its name are its overrides."""
    named: dict[str, Any] = {"entry": [], "variant": []}
    for kind, rows in named.items():
        for row in table.get(kind, ()):
            overrides = {key: value for key, value in row.items() if key != "name"}
            rows.append({key: row[key] for key in row if key == "name"} | {"overrides": overrides})
    if isinstance(tune := table.get("tune"), dict):
        named["tune"] = {".".join(key): value for key, value in _leaves(tune)}
        for key, value in named["tune"].items():
            require(isinstance(value, list), f"comparison.tune should give {key} a list of values, got {value!r}")
    return read_table(ComparisonConfig, {**table, **named}, "[comparison]")


def _leaves(table: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    for key, value in table.items():
        inner = _leaves(value) if isinstance(value, dict) else [((), value)]
        yield from (((key, *path), leaf) for path, leaf in inner)


def _entries(own: Mapping[str, Any], settings: ComparisonConfig) -> tuple[Entry, ...]:
    """Every entry in every variant; where both set a key, the entry's value counts. own: the recipe's values."""
    entries = []
    for variant in settings.variant or (None,):
        values = changed(own, variant.overrides) if variant else own
        for row in settings.entry:
            folder, words = row.folder, f'entry "{row.name}"'
            if variant:
                folder, words = f"{folder}/{variant.folder}", f'{words}, variant "{variant.name}"'
            config = config_from_dict(changed(values, row.overrides), words)
            entries.append(Entry(name=row.name, folder=folder, config=config, variant=variant.name if variant else ""))
    return tuple(entries)


def keep_recipe(comparison: Comparison) -> None:
    """Writes COMPARISON/comparison.toml: the recipe with the overrides in it, itself a recipe."""
    comparison.home.mkdir(parents=True, exist_ok=True)
    values = {**comparison.recipe, "run_dir": str(comparison.home)}
    if comparison.settings.tune:
        values["comparison"] = {**values["comparison"], "tune_seed": comparison.settings.tuned_with}
    write_atomic(comparison.home / "comparison.toml", tomli_w.dumps(values), alone=False)


def entries_of(comparison: Comparison, only: Sequence[str] = ()) -> list[Entry]:
    """Returns the entries, restricted to these names of entries and of variants; raises ValueError for other names."""
    entries, variants = ({getattr(entry, kind) for entry in comparison.entries} for kind in ("name", "variant"))
    known = sorted(entries | variants - {""})
    for name in only:
        if name not in known:
            raise ValueError(f'--only: no entry and no variant is called "{name}" ({_hint(name, known)})')
    entries, variants = entries & set(only) or entries, variants & set(only) or variants
    return [entry for entry in comparison.entries if entry.name in entries and entry.variant in variants]


def tasks_of(comparison: Comparison, only: Sequence[str] = (), *, ready: bool = False) -> list[PlannedRun]:
    """All runs, seed by seed, so that every entry has a first result early. only: names of entries and of variants to
    which they are restricted; raises ValueError for others. ready: without entries that are yet to be tuned."""
    return [
        PlannedRun(entry=entry.title, seed=seed, config=of_seed(entry.config, seed, comparison.home / entry.folder))
        for seed in comparison.settings.seeds
        for entry in entries_of(comparison, only)
        if entry.is_ready or not ready
    ]
