"""MLflow: the records of a run as a run of an experiment there.

    matmix train mru_shakespeare --callback '{name = "mlflow", options = {uri = "http://tracking:5000"}}'

The package mlflow-skinny (or mlflow) comes with the extra `mlflow`. A thread of its own sends, so that training never
waits for the server; what a server that is away does not take is kept in memory and sent once it answers.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matmix.data.storage.remote import refuse_secrets
from matmix.train.callbacks.base import RunView
from matmix.train.callbacks.records import Recorder
from matmix.train.callbacks.trackers import check_installed, ended, keep_id, numbers, read_id
from matmix.train.recipe import config_to_dict

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 30.0  # between two tries of a server that is away
_END_SECONDS, _STOP_SECONDS = 60.0, 5.0  # for what is left, at the end, and where a signal asked the run to end
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
        check_installed("mlflow", "mlflow")
        refuse_secrets(self.uri, 'callback "mlflow": uri')
        if not (self.uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ValueError('callback "mlflow": give a tracking server as uri, or in MLFLOW_TRACKING_URI')


class MLflow(Recorder):
    """Sends the numbers as train/loss, validation/loss and so on, and the config as parameters."""

    Options = MLflowOptions

    def __init__(self, **options: Any) -> None:
        self._options = MLflowOptions(**options)
        self._sender: _Sender | None = None

    def on_start(self, run: RunView) -> None:
        # Its own seven tries take minutes each time; the sender has tries enough.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._sender = _Sender(self._options, run.path, config_to_dict(run.config))
        self._sender.start()

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        self._sender.add(record)

    def on_end(self, run: RunView) -> None:
        if self._sender is None:
            return
        state = "FINISHED" if ended(run) else "KILLED" if run.stop_agreed else "FAILED"
        if left := self._sender.end(state, _STOP_SECONDS if run.stop_agreed else _END_SECONDS):
            logger.warning(f"{left:,} numbers were not sent to MLflow; they are in {run.path / 'metrics.jsonl'}")


class _Sender(threading.Thread):
    """Sends the numbers that wait to the server, in order, and tries again where that fails."""

    def __init__(self, options: MLflowOptions, path: Path, config: dict[str, Any]) -> None:
        super().__init__(name="mlflow", daemon=True)
        self._waiting: list[tuple[str, float, int, int]] = []  # name, value, ms, step
        self._wake = threading.Event()
        self._options, self._path, self._config = options, path, config
        self._uri = options.uri or os.environ["MLFLOW_TRACKING_URI"]
        self._client: Any = None
        self._id = ""
        self._state = ""  # once the run has ended: how
        self._away = False

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record, unless too much waits; it is in metrics.jsonl then."""
        now = int(1000 * time.time())
        if len(self._waiting) < _MOST_WAITING:
            self._waiting += [(_name(key), float(value), now, record["step"]) for key, value in numbers(record).items()]
        self._wake.set()

    def end(self, state: str, seconds: float) -> int:
        """Sends what is left, and how the run ended, within so many seconds. Returns how many numbers were not sent."""
        self._state = state
        self._wake.set()
        self.join(seconds)
        return len(self._waiting)

    def run(self) -> None:
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
            until = time.monotonic() + _PAUSE_SECONDS * self._away
            self._wake.wait(_PAUSE_SECONDS if self._away else None)
            self._wake.clear()
            while not self._state and (left := until - time.monotonic()) > 0:
                self._wake.wait(left)
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
        if known := read_id(self._path, where):
            client.update_run(known, status="RUNNING")
            self._id = known
            return client
        experiment = client.get_experiment_by_name(self._options.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._options.experiment)
        self._id = client.create_run(number, run_name=self._options.name or self._path.name).info.run_id
        keep_id(self._path, where, self._id)
        parameters = [Param(name, value[:_LONGEST]) for name, value in _flat(self._config)]
        for first in range(0, len(parameters), _PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])
        return client


def _name(name: str) -> str:
    """Returns a name as stores take it: one on files makes folders of slashes, and `grad_norm` cannot be a folder and a
    file."""
    kind, _, rest = name.partition("/")
    return f"{kind}/{_NOT_IN_NAMES.sub('_', rest.replace('/', '.'))}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the value of every field of a config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, str) else json.dumps(value)
