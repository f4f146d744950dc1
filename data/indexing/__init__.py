"""Layouts of files with tokens that others have made, by name: to add one, write its `Layout` and add its line here."""

from matmix.data.indexing.base import Layout
from matmix.data.indexing.flat import Flat
from matmix.data.indexing.litdata import LitData
from matmix.data.indexing.mds import TokenMds
from matmix.data.indexing.megatron import Megatron

LAYOUTS: dict[str, type[Layout]] = {"megatron": Megatron, "flat": Flat, "mds": TokenMds, "litdata": LitData}
