"""Weights & Biases: the records of a run in a project there.

    matmix train mru_shakespeare --callback '{name = "wandb", options = {project = "shakespeare"}}'

The package wandb comes with the extra `wandb`. Its own process sends what it is given; where the service cannot be
reached at the start, the records stay in RUN/wandb, from where `wandb sync` sends them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
from typing import Any, Literal

from matmix.train.callbacks.base import RunView
from matmix.train.callbacks.records import Recorder
from matmix.train.callbacks.trackers import check_installed, ended, keep_id, numbers, read_id
from matmix.train.recipe import config_to_dict

logger = logging.getLogger(__name__)

_LOGIN_SECONDS, _START_SECONDS, _END_SECONDS = 30, 30, 60


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
        check_installed("wandb", "wandb")


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
        if (own := read_id(path, where)) is None:
            keep_id(path, where, own := secrets.token_hex(4))
        begin = functools.partial(
            wandb.init,
            project=options.project,
            entity=options.entity or None,
            name=options.name or path.name,
            group=options.group or None,
            tags=options.tags or None,
            id=own,
            resume="allow",
            dir=str(path),
            config=config_to_dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",
                reinit="create_new",
                login_timeout=_LOGIN_SECONDS,
                init_timeout=_START_SECONDS,
                finish_timeout=_END_SECONDS,
            ),
        )
        try:
            self._run = begin(mode=options.mode or None)
        except Exception as error:  # of many kinds: no key, no network, no such project
            reason = " ".join(str(error).split())[:300]
            logger.warning(f"Weights & Biases cannot be used now ({reason}); the records are kept in {path}/wandb")
            wandb.teardown()  # its process takes the run for one that is at work
            self._run = begin(mode="offline")
        # Over our steps: wandb's own count goes up with every call, also where steps are done again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            logger.info(f"to send the records to Weights & Biases: wandb sync {path}/wandb/offline-run-*-{own}")
        else:
            logger.info(f"Weights & Biases: {self._run.url}")

    def take(self, run: RunView, record: dict[str, Any]) -> None:
        self._run.log({"step": record["step"], **numbers(record)})

    def on_end(self, run: RunView) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if ended(run) or run.stop_agreed else 1)
