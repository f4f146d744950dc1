"""The study of the MRU: its constructions, input forms and training rule beside other mixers and none, at equal
parameters, on characters and on sub-words; `python -P -m matmix.studies.mru --help`."""
