"""Uses trained models, from Python and for the command line: opens one, then generate, score, embed,
classify, fine-tune or export. `open_model` in `opening.py` is where all of it begins."""
