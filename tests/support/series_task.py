"""The task that learns from series: the next value of each step, by `series_model:SeriesModel`."""

import math

import series_model  # noqa: F401  (registers the model, which embeds the values)
from series import Series

from matmix.data.modalities import MODALITIES
from matmix.train.tasks import Loss, Metric, Task

MODALITIES["series"] = Series()


class NextValue(Task):
    """The squared errors of all next values."""

    modalities = ("series",)
    architectures = ("series_model:SeriesModel",)
    loss_metric = Metric(name="loss", title="loss", unit="squared error")
    metrics = (Metric(name="rmse", title="root mean squared error"),)

    def loss(self, model, batch):
        errors = (self.forward(model, batch).float() - batch.labels.nan_to_num()).square()
        total = (errors * ~batch.labels.isnan()).sum()
        return Loss(total, total.detach(), {})

    def measures(self, means, loader):
        return {**means, "rmse": math.sqrt(means["loss"])}
