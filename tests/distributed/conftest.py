import sys
from pathlib import Path

# For `import harness` and `import scenarios`, here and in the processes that the harness starts.
sys.path.insert(0, str(Path(__file__).resolve().parent))
