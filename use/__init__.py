"""Uses trained models, from Python and for the command line. `open_model` in `opening.py` opens one; the other modules
generate, score, embed, classify, fine-tune and export."""
