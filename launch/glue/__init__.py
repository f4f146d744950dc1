"""`matmix glue`: fine-tunes an encoder on the tasks of GLUE, as published, and tabulates the scores."""
