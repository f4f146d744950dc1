"""Imports models from the checkpoints of other projects, and exports models to transformers."""

from matmix.model.interop.importing.checkpoints import read_checkpoint
from matmix.model.interop.importing.exported import read_export
from matmix.model.interop.importing.reference import from_reference

__all__ = ["from_reference", "read_checkpoint", "read_export"]
