"""Trackers of experiments at other services: Weights & Biases, MLflow. A recipe names one as a callback."""

from matmix.train.callbacks.trackers.mlflow import MLflow
from matmix.train.callbacks.trackers.wandb import WandB

TRACKERS = {"wandb": WandB, "mlflow": MLflow}
"""By the names that a table [[callback]] gives them."""
