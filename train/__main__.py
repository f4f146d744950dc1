"""`python -m matmix.train RECIPE` and `torchrun --nproc-per-node=8 -m matmix.train RECIPE`."""

import sys

from matmix.train.process.begin import begin_training

if __name__ == "__main__":
    code = begin_training(sys.argv[1:])
    if code:
        sys.exit(code)
    from matmix.train.command import main

    sys.exit(main())
