"""`matmix glue`: fine-tunes an encoder on the tasks of GLUE, as published, and tabulates the scores."""

from typing import Literal

Column = Literal["hydra", "bert", "lion"]
"""Published settings: of Hydra, beside it for BERT, and of LION (`launch/glue/tasks.py`)."""
