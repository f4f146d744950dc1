"""What can be done with a trained model, from Python and by the command line: open it, then generate, score, embed,
classify, fine-tune or export. `open_model` in `opening.py` is where all of it begins."""
