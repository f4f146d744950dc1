"""Where tests find the repository and the recorded results of the papers' own code."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
