"""torchrun, with its ends in one line each: `python -m matmix.launch.agent --nnodes=2 -m matmix.launch.rank RECIPE`.

The arguments are torchrun's own. The exit code is that of the rank that failed first, 128 + n if signal n killed it.
"""

from __future__ import annotations

import logging
import os
import sys

from matmix.train.console import begin_process
from matmix.train.exits import EXIT_FAILED, EXIT_STOPPED


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    begin_process()
    # Its records repeat, with stacks, what is said below and what the ranks themselves have said.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    options = parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        run(options)
    except ChildFailedError as error:
        return _first_failure(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(
            f"matmix: error: the {options.nnodes} nodes did not meet at {options.rdzv_endpoint}: {reason}; is the same "
            f"command running on every node, and can each reach that address?",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_FAILED
    return 0


def _first_failure(error) -> int:
    rank, failure = error.get_first_failure()
    code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    if code != EXIT_STOPPED:
        what = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {code}"
        print(f"matmix: rank {rank} (process {failure.pid}) {what}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
