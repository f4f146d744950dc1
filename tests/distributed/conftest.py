import sys
from pathlib import Path

# For `import harness` and `import scenarios`, here and in the processes that the harness starts; runs/ is for what the
# runs of one test are for another.
sys.path[:0] = [str(Path(__file__).resolve().parent / name) for name in ("ranks", "runs")]
