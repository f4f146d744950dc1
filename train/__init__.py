"""Training: recipes, tasks, optimizers, engines, checkpoints and the loop. The package itself can be called:
`matmix.train(recipe)` trains a recipe in this process."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matmix.train.config import RunConfig
    from matmix.train.state import Result


class _Train(types.ModuleType):
    """A module that is a function, too: a function of this name beside it would hide the package."""

    def __call__(self, recipe: str | RunConfig, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Result:
        """Trains a recipe to its last step, or goes on with the run where it stands; returns the last step, whether the
        run has finished, and the metrics of its last evaluation.

        recipe: the name of a bundled recipe, a .toml file, a run, or a config. overrides: fields of the recipe, as in
        {"optimizer.lr": 3e-4} or ["--optimizer.lr", "3e-4"].

        Raises FileNotFoundError or ValueError (one line) for a config, data or a checkpoint that cannot be used, and
        RunFailure where training diverged or memory ran out.
        """
        from matmix.train.loop import train
        from matmix.train.recipe import load_config

        if not isinstance(recipe, str):
            if overrides:
                raise ValueError("overrides are for recipes: change a config by dataclasses.replace")
            return train(recipe)
        return train(load_config(recipe, overrides))


sys.modules[__name__].__class__ = _Train
