"""`python -m matmix.train RECIPE` and `torchrun --nproc-per-node=8 -m matmix.train RECIPE`."""

import sys

from matmix.train.process import stop

if __name__ == "__main__":
    stop.listen()  # before anything is imported that takes its time
    from matmix.train.entry import main

    sys.exit(main())
