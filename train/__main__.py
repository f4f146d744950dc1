"""`python -m matmix.train RECIPE` and `torchrun --nproc-per-node=8 -m matmix.train RECIPE`."""

import sys

from matmix.train.command import main

if __name__ == "__main__":
    sys.exit(main())
