"""`python worker.py RECIPE [--key value ...]`: the train command, with the faults of $FAULTS put into its process;
with `finetune SOURCE TASK` in place of RECIPE that command.

$FAULTS is a JSON list of {"kind": ..., "rank": the rank that suffers it (all, if absent), ...}; the kinds are the
functions in `injections.py`. The product knows nothing of this.
"""

from __future__ import annotations

import json
import os
import sys


def main(arguments: list[str]) -> int:
    from matmix.train.process.console import begin_training

    assert begin_training() == 0
    rank = int(os.environ.get("RANK", "0"))
    wanted = [fault for fault in json.loads(os.environ.get("FAULTS", "[]")) if fault.pop("rank", rank) == rank]
    if wanted:
        import injections

        for fault in wanted:
            getattr(injections, fault.pop("kind"))(**fault)
    if arguments[0] == "finetune":
        from matmix.launch.cli import main as command
    else:
        from matmix.train.entry import main as command
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
