"""Tasks on labelled examples, which models are fine-tuned and judged on."""
