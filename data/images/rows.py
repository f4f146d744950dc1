"""From prepared pictures to micro-batches: the same sequence of global batches on any ranks and workers.

Sample n of the training split is picture p[(n mod N) div r] of epoch n div N, where N is the number of pictures, r the
number of repeats and p the order of that epoch (`matmix.data.loading.order`). Of several datasets, `Mixture` gives each
group of r samples to one of them. A sample is augmented with what is drawn from (seed, epoch, n), and mixed as
`matmix.data.images.transforms` says. Evaluation reads the pictures in order, and fills the last global batch with empty
ones.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from matmix.data.config import DataConfig, datasets_of
from matmix.data.formats.base import DamagedShard, unpack
from matmix.data.images import transforms
from matmix.data.images.decode import UnreadablePicture, decode
from matmix.data.images.transforms import Transform
from matmix.data.loading.batch import Batch, image_batch
from matmix.data.loading.masking import IGNORED
from matmix.data.loading.order import Mixture, Order, Streams
from matmix.data.loading.rows import Failure, Reading, errors_as_failures
from matmix.data.rng import AUGMENTATION, generator
from matmix.data.splits.reader import TokenShards

_Read = tuple[torch.Tensor, int]
"""A picture as the model reads it, float32 (C, H, W), and its class."""


class ImageRows:
    """`Rows` of pictures; numbers at or above `limit` give empty ones. shards: of each dataset. make: makes the
    transform, once in each process. The pictures of a global batch are mixed with each other."""

    def __init__(
        self, shards: Sequence[TokenShards], data: DataConfig, reading: Reading, make: Callable[[], Transform]
    ) -> None:
        self.shards, self.config, self._make_transform = shards, data.images, make
        self.seed, self.global_batch, self.training = reading.seed, reading.global_batch_size, not reading.one_pass
        self.orders = [Order(one, data, reading) for one in shards]
        self.sizes = [order.total_documents for order in self.orders]
        weights = list(datasets_of(data.images, reading.split).values())
        streaming = data.streams(one_pass=reading.one_pass)
        self.mixture = (
            Streams(self.sizes, reading) if streaming else Mixture(self.sizes, weights if self.training else None)
        )
        self.limit = None if self.training else self.mixture.samples_per_epoch
        self.classes = len(shards[0].manifest.images.classes)
        # Of all shards of all datasets: the number of the first picture.
        counts = np.concatenate([[0], *(one.shard_documents for one in shards)])
        self._starts = np.split(np.cumsum(counts), np.cumsum([one.n_shards for one in shards])[:-1])

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_transform"}

    @cached_property
    def _transform(self) -> Transform:
        return self._make_transform()

    @property
    def samples_per_epoch(self) -> int:
        return self.mixture.samples_per_epoch

    @errors_as_failures
    def __getitems__(self, samples: list[int]) -> Batch | Failure:
        with transforms.borrowed_generators():
            return self._batch(samples)

    def _batch(self, samples: list[int]) -> Batch:
        size = (len(samples), self.config.channels, self.config.size, self.config.size)
        inputs, owners = torch.zeros(size), torch.full((len(samples),), -1)
        soft = self.training and self.config.soft
        shape = (len(samples), self.classes) if soft else (len(samples),)
        labels = torch.full(shape, torch.nan) if soft else torch.full(shape, IGNORED)
        read: dict[int, _Read | DamagedShard] = {}
        n_damaged, damaged, n_images = 0, {}, 0
        for row, sample in enumerate(samples):
            if self.limit is not None and sample >= self.limit:
                continue
            loaded = self._read(sample, read)
            if isinstance(loaded, DamagedShard):
                n_damaged += 1
                damaged.setdefault(loaded.where, str(loaded))
                continue
            inputs[row], labels[row] = self._mixed(sample, loaded, read) if soft else (loaded[0], loaded[1])
            owners[row] = self._number(sample)
            n_images += 1
        return image_batch(inputs, labels, n_images, n_damaged=n_damaged, damaged=damaged, examples=owners)

    def _mixed(
        self, sample: int, loaded: _Read, read: dict[int, _Read | DamagedShard]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the picture and the target of a sample that is to be learned."""
        image, label = loaded
        config = self.config
        target = transforms.soft_target(label, self.classes, config.smoothing)
        partner = transforms.partner_of(sample, self.global_batch, config.repeats) if config.mixes else None
        if partner is None or (mix := transforms.draw_mix(config, self.seed, sample, self.global_batch)).share == 1.0:
            return image, target
        other = self._read(partner, read)
        if isinstance(other, DamagedShard):
            return image, target
        other_target = transforms.soft_target(other[1], self.classes, config.smoothing)
        return mix.apply(image, other[0]), target * mix.share + other_target * (1.0 - mix.share)

    def _read(self, sample: int, read: dict[int, _Read | DamagedShard]) -> _Read | DamagedShard:
        """Returns the picture of a sample, before it is mixed. read: those of this micro-batch."""
        if sample not in read:
            try:
                read[sample] = self._load(sample)
            except DamagedShard as error:
                if not self.shards[0].skip_damaged:
                    raise
                read[sample] = error
        return read[sample]

    def _load(self, sample: int) -> _Read:
        data, label, where, background = self._encoded(sample)
        try:
            image = decode(data, channels=self.config.channels, background=background)
        except UnreadablePicture as error:
            raise ValueError(f"{where} cannot be decoded: {error}") from None
        if self.training:
            epoch = sample // self.samples_per_epoch if self.samples_per_epoch else 0
            transforms.seed_generators(generator(self.seed, epoch, AUGMENTATION, sample))
        return self._transform(image), label

    def _encoded(self, sample: int) -> tuple[bytes | memoryview, int, str, int]:
        """Returns the encoded picture of a sample, its class, words for where it is, and its background."""
        dataset, shard, index, _ = self._place(sample)
        shards = self.shards[dataset]
        data, label = unpack(shards.read(shard, index))
        where = f"{shards.storage.path}: picture {index} of shard {shards.info.shards[shard].file}"
        if not 0 <= label < self.classes:
            raise ValueError(f"{where} has the label {label}, but there are {self.classes} classes; prepare it again")
        return data, label, where, shards.manifest.images.background

    def _number(self, sample: int) -> int:
        """Returns the number of a sample's picture in the splits of all datasets."""
        return self._place(sample)[3]

    def _place(self, sample: int) -> tuple[int, int, int, int]:
        """Returns the dataset of a sample, shard, its number there, and its number in the splits of all datasets."""
        repeats = self.config.repeats if self.training else 1
        group, copy = divmod(sample, repeats)
        dataset, turn, rest = (int(part[0]) for part in self.mixture.locate(np.array([group])))
        epoch, slot = divmod((turn * self.sizes[dataset] + rest) * repeats + copy, self.sizes[dataset])
        block, place = self.orders[dataset].place(epoch, slot // repeats)
        shard, index = int(block.shard[place]), int(block.index[place])
        return dataset, shard, index, int(self._starts[dataset][shard]) + index
