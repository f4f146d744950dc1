"""Training runs side by side, as processes of their own, and what their results are over seeds."""
