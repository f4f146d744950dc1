"""Trackers of experiments: TensorBoard, Weights & Biases (the extra `wandb`) and MLflow (the extra `mlflow`)."""

import dataclasses
import importlib.util
import json
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from matmix.data.artifacts import read_json
from matmix.data.storage.files import set_aside, write_atomic
from matmix.data.storage.remote import refuse_secrets
from matmix.train.callbacks.base import Rewind, RunView
from matmix.train.callbacks.records import Recorder
from matmix.train.recipe import config_to_dict
from matmix.train.run.directory import TRACKED

logger = logging.getLogger(__name__)

_START_SECONDS = 30  # until Weights & Biases answers
_END_SECONDS, _STOP_SECONDS = 60, 5  # for what is left, at the end, and where a signal asked the run to end


def _check_installed(package: str) -> None:
    """Raises ValueError (one line) where the package that the extra of its name brings is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f'callback "{package}" needs {package}, which is not installed: in the clone of matmix, pip install -c '
            f"constraints.txt -e '.[{package}]'"
        )


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a record as "<kind>/<name>", without the step; others leave a gap in the curve."""
    named = {f"{record['kind']}/{name}": value for name, value in record.items() if name not in ("kind", "step")}
    return {name: value for name, value in named.items() if isinstance(value, int | float) and math.isfinite(value)}


def _ids(folder: Path) -> dict[str, str]:
    """Returns the ids that the run in `folder` has, by service and project."""
    path = folder / TRACKED
    try:
        ids = read_json(path)
        if not isinstance(ids, dict) or not all(isinstance(name, str) for name in ids.values()):
            raise ValueError
        return ids
    except FileNotFoundError:
        return {}
    except ValueError:
        logger.warning(f"{path} is damaged and moved to {set_aside(path).name}; trackers begin new runs")
        return {}


def _keep_id(folder: Path, where: str, name: str) -> None:
    """Keeps the id for the next start. Raises OSError."""
    write_atomic(folder / TRACKED, json.dumps({**_ids(folder), where: name}, indent=1) + "\n")


def _has_ended(run: RunView) -> bool:
    return run.state.step == run.config.last_step


# -- TensorBoard -------------------------------------------------------------------------------------------------------


_TAGS = {
    "train/skipped": "train/skipped_steps",
    "train/damaged": "train/damaged_sequences",
    "train/tokens_per_second": "speed/tokens_per_second",
    "train/images_per_second": "speed/images_per_second",
    "train/seconds_per_step": "speed/seconds_per_step",
    "train/mfu": "speed/model_flops_utilisation",
    "train/data_wait": "speed/data_wait_share",
    "train/memory": "memory/peak_gib",
}
"""Tags of numbers that are not called by the kind and the name in their record."""


class TensorBoard(Recorder):
    """Writes scalars; a resumed run hides the events of the steps that it does again."""

    def on_start(self, run: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter  # two seconds of import that only this callback needs

        folder = run.steady_path / "tensorboard"  # its writer opens the file anew each time
        _put_into_the_past(folder)
        self.writer = SummaryWriter(str(folder), purge_step=run.state.step + 1)

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        for name, value in _numbers(record).items():
            # Numbers of layers, ranks and causes stand in groups of their own: monitor/..., ranks/..., goodput/...
            tag = name.removeprefix("train/") if name.startswith("train/") and name.count("/") > 1 else name
            self.writer.add_scalar(_TAGS.get(tag, tag), value, record["step"])
        if record["kind"] == "validation":
            self.writer.flush()

    def on_rewind(self, run: RunView, rewind: Rewind) -> None:
        self.writer.close()
        self.on_start(run)

    def on_end(self, run: RunView) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


def _put_into_the_past(folder: Path) -> None:
    """Renames event files whose name is later than now: TensorBoard would read what a node with a slow clock goes on
    with before what it resumed, and hide none of the steps that it does again."""
    now = int(time.time())
    files = [(int(path.name.split(".")[3]), path) for path in folder.glob("events.out.tfevents.*")]
    later = sorted(entry for entry in files if entry[0] >= now)
    for place, (_, path) in enumerate(later):
        *front, _, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*front, f"{now - len(later) + place:010d}", rest])))


# -- Weights & Biases --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WandBOptions:
    """The key is read as wandb does: WANDB_API_KEY, or what `wandb login` keeps."""

    project: str = "matmix"
    entity: str = ""
    """Team or user; "" = your own default."""
    name: str = ""
    """The name of the run; "" = that of its directory."""
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Literal["", "online", "offline"] = ""
    """offline: keeps everything in RUN/wandb; "" = WANDB_MODE, or online."""

    def __post_init__(self) -> None:
        _check_installed("wandb")


class WandB(Recorder):
    """Sends the numbers as train/loss, validation/loss and so on, over "step"."""

    Options = WandBOptions

    def __init__(self, **options: Any) -> None:
        self._options = WandBOptions(**options)
        self._run: Any = None

    def on_start(self, run: RunView) -> None:
        import wandb  # seconds of import

        options, path = self._options, run.path
        where = f"wandb {options.entity}/{options.project}"
        if (own := _ids(path).get(where)) is None:
            _keep_id(path, where, own := secrets.token_hex(4))
        given = {name: value or None for name, value in dataclasses.asdict(options).items()}
        given |= {"name": options.name or path.name, "id": own, "resume": "allow", "dir": str(path)}
        given |= {"config": config_to_dict(run.config), "allow_val_change": True}
        waits = {"login_timeout": _START_SECONDS, "init_timeout": _START_SECONDS, "finish_timeout": _END_SECONDS}
        given["settings"] = wandb.Settings(silent=True, console="off", reinit="create_new", **waits)
        try:
            self._run = wandb.init(**given)
        except Exception as error:  # of many kinds: no key, no network, no such project
            reason = " ".join(str(error).split())[:300]
            logger.warning(f"Weights & Biases cannot be used now ({reason}); the records are kept in {path}/wandb")
            wandb.teardown()  # its process takes the run for one that is at work
            self._run = wandb.init(**{**given, "mode": "offline"})
        # Over our steps: wandb's own count goes up with every call, also where steps are done again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            logger.info(f"to send the records to Weights & Biases: wandb sync {path}/wandb/offline-run-*-{own}")
        else:
            logger.info(f"Weights & Biases: {self._run.url}")

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        self._run.log({"step": record["step"], **_numbers(record)})

    def on_end(self, run: RunView) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if _has_ended(run) or run.stop_agreed else 1)


# -- MLflow ------------------------------------------------------------------------------------------------------------

_PAUSE_SECONDS = 30.0  # between two tries of a server that is away
_MOST_WAITING = 1_000_000  # numbers; some 200 MB
# What a server takes at once, and the longest value of a parameter.
_METRICS, _PARAMETERS, _LONGEST = 1000, 100, 6000
_NOT_IN_NAMES = re.compile(r"[^\w\-. :]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLflowOptions:
    """Credentials are read as MLflow does: MLFLOW_TRACKING_USERNAME and so on."""

    uri: str = ""
    """The tracking server, or another store that the installed mlflow can use; "" = MLFLOW_TRACKING_URI."""
    experiment: str = "matmix"
    name: str = ""
    """The name of the run; "" = that of its directory."""

    def __post_init__(self) -> None:
        _check_installed("mlflow")
        refuse_secrets(self.uri, 'callback "mlflow": uri')
        if not (self.uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ValueError('callback "mlflow": give a tracking server as uri, or in MLFLOW_TRACKING_URI')


class MLflow(Recorder):
    """Sends the numbers as train/loss and so on, and the config as parameters, by a thread of its own: training never
    waits for the server, and what one that is away does not take is kept in memory and sent once it answers."""

    Options = MLflowOptions

    def __init__(self, **options: Any) -> None:
        self._options = MLflowOptions(**options)
        self._uri = self._options.uri or os.environ["MLFLOW_TRACKING_URI"]
        self._waiting: list[tuple[str, float, int, int]] = []  # name, value, ms, step
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._client: Any = None
        self._id = self._state = ""  # of the run there; how it ended
        self._away = False

    def on_start(self, run: RunView) -> None:
        # Its own seven tries take minutes each time; the thread has tries enough.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._path, self._config = run.path, config_to_dict(run.config)
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        if len(self._waiting) < _MOST_WAITING:  # what is more is in metrics.jsonl alone
            named = _numbers(record).items()
            self._waiting += [(_name(name), float(value), now, record["step"]) for name, value in named]
        self._wake.set()

    def on_end(self, run: RunView) -> None:
        if self._thread is None:
            return
        self._state = "FINISHED" if _has_ended(run) else "KILLED" if run.stop_agreed else "FAILED"
        self._ending.set()
        self._wake.set()
        self._thread.join(_STOP_SECONDS if run.stop_agreed else _END_SECONDS)
        if left := len(self._waiting):
            logger.warning(f"{left:,} numbers were not sent to MLflow; they are in {run.path / 'metrics.jsonl'}")

    def _work(self) -> None:
        """Sends the numbers that wait, in order, and tries again where that fails; in the end, how the run ended."""
        while True:
            ending = bool(self._state)
            try:
                self._send()
                if ending:
                    self._client.set_terminated(self._id, self._state)
                self._tell(None)
            except Exception as error:  # of many kinds, by server and store
                self._tell(error)
            if ending:
                return
            if self._away:
                self._ending.wait(_PAUSE_SECONDS)
            else:
                self._wake.wait()
            self._wake.clear()

    def _tell(self, error: Exception | None) -> None:
        """Logs when the server begins to take no records, and when it takes them again."""
        if error is not None and not self._away:
            reason = " ".join(str(error).split())[:300]
            logger.warning(f"MLflow at {self._uri} takes no records now ({reason}); they wait, and training goes on")
        if error is None and self._away:
            logger.info(f"MLflow at {self._uri} has the records that waited")
        self._away = error is not None

    def _send(self) -> None:
        from mlflow.entities import Metric

        self._client = self._client or self._begin()
        while self._waiting:
            batch = self._waiting[:_METRICS]
            self._client.log_batch(self._id, metrics=[Metric(*one) for one in batch])
            del self._waiting[: len(batch)]

    def _begin(self) -> Any:
        """Finds the run at the server, or makes it, with the config as its parameters; returns the client."""
        from mlflow import MlflowClient  # seconds of import
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self._uri)
        where = f"mlflow {self._uri} {self._options.experiment}"
        if known := _ids(self._path).get(where):
            client.update_run(known, status="RUNNING")
            self._id = known
            return client
        experiment = client.get_experiment_by_name(self._options.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._options.experiment)
        self._id = client.create_run(number, run_name=self._options.name or self._path.name).info.run_id
        _keep_id(self._path, where, self._id)
        parameters = [Param(name, value[:_LONGEST]) for name, value in _flat(self._config)]
        for first in range(0, len(parameters), _PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])
        return client


def _name(name: str) -> str:
    """Returns a name as stores take it: one on files makes folders of slashes, and `grad_norm` cannot be both."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{_NOT_IN_NAMES.sub('_', rest.replace('/', '.'))}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the value of every field of a config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)
