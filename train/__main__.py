"""`python -m matmix.train RECIPE` and `torchrun --nproc-per-node=8 -m matmix.train RECIPE`."""

import sys

from matmix.train import stop
from matmix.train.console import begin_process

if __name__ == "__main__":
    stop.listen_for(sys.argv[1:])
    begin_process()
    from matmix.train.command import main

    sys.exit(main())
