"""Runs torch's agent as `torchrun` does, with its arguments, and says in one line how it ended."""

import logging
import os
import sys

from matmix.launch.jobs.processes import say_failure
from matmix.train.errors import RunFailure
from matmix.train.process import launched
from matmix.train.process.console import begin_process, guarded, report
from matmix.train.process.exits import EXIT_FAILED, EXIT_OK
from matmix.train.process.node_folders import use_own_folder


def main() -> int:
    """Entry point; returns the exit code of the rank that failed first, 128 + n if signal n killed it."""
    begin_process()
    if code := guarded(lambda: use_own_folder() or EXIT_OK):  # torch makes a folder of reports
        return code
    # Its records repeat, with stacks, what is said below and what the ranks themselves have said.
    logging.disable(logging.ERROR)
    # The same holds for what the C++ side prints; it reads its level once, and the ranks are to have their own.
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = before or "FATAL"
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
    from torch.distributed.run import parse_args, run

    if before is None:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    options = parse_args(sys.argv[1:])
    os.environ[launched.LAUNCHER_VARIABLE] = str(os.getpid())  # of the ranks
    if secret := os.environ.get(launched.SECRET_VARIABLE):  # beside the name of the start, which everybody can see
        options.rdzv_id = f"{options.rdzv_id}.{secret}"
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return say_failure(f"rank {rank}", failure.pid, failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, DistError) as error:
        reason = "not all came in time" if isinstance(error, RendezvousTimeoutError) else " ".join(str(error).split())
        where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        check = "is the same command running on every node, and can each reach that address?"
        report(RunFailure(f"the {options.nnodes} nodes did not meet at {where}: {reason}; {check}"), every_rank=True)
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
