"""The kinds of data, by name. To add one: write its file, and add its line here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from matmix.data.config import DataConfig
from matmix.data.loading.rows import Facts
from matmix.data.modalities.base import Modality, Opened, Reading
from matmix.data.modalities.examples import LabelledExamples
from matmix.data.modalities.pictures import Pictures
from matmix.data.modalities.samples import Samples
from matmix.data.modalities.text import Text

if TYPE_CHECKING:
    from matmix.data.loading.loader import Loader

__all__ = ["MODALITIES", "Facts", "Modality", "Opened", "Reading", "build_loader", "modality_of"]

MODALITIES: dict[str, Modality] = {
    "text": Text(),
    "samples": Samples(),
    "examples": LabelledExamples(),
    "pictures": Pictures(),
}


def modality_of(data: DataConfig, names: Iterable[str] = MODALITIES) -> Modality:
    """Returns the first of the modalities in `names` that a recipe names data of, or else the first of all."""
    among = [MODALITIES[name] for name in names]
    return next((modality for modality in among if modality.given(data)), among[0])


def build_loader(data: DataConfig, **options: Any) -> Loader:
    """Returns the loader of one rank for the data that a recipe names. options: those of `Modality.loader`."""
    return modality_of(data).loader(data, **options)
