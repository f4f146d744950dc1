"""The argument parser of all verbs."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Its errors are ours: one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help explains)")
