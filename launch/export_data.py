"""What the model card of an export says of the data: names, documents, tokens, and the losses of trivial models."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from matmix.data.config import DataConfig
from matmix.data.manifest import Manifest
from matmix.data.storage.remote import is_url
from matmix.data.storage.storage import Storage
from matmix.train.plugins import find_part
from matmix.train.run.trained import Trained
from matmix.train.tasks import TASKS, Task
from matmix.train.tasks.image_classification import ImageClassification
from matmix.train.tasks.token_prediction import TokenPrediction


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownData:
    """The prepared datasets of a run."""

    names: tuple[str, ...]
    """URLs as they are, local ones by their last folder or file: a card is for others."""
    manifests: tuple[Manifest | None, ...] = ()
    """Of the datasets in `names`; None where one is not at hand, or was made again with another tokenizer since."""

    def rows(self) -> dict[str, str]:
        """Names and values for the card's table."""
        found = {"data": ", ".join(self.names)}
        for name, manifest in zip(self.names, self.manifests, strict=False):
            if manifest is not None:
                which = f" of {name}" if len(self.names) > 1 else ""
                found[f"documents{which}"] = _counts(manifest)
        return found

    def trivial_losses(self, trained: Trained) -> list[tuple[str, float]]:
        """What models lose that know nothing, or frequencies only, in nats: of predicted tokens and of images."""
        config = trained.config
        task = find_part(config.objective.name, TASKS, "objective.name", Task)
        if config.model.model_class.takes_images and issubclass(task, ImageClassification):
            return [(f"every class alike: ln {config.model.head.outputs:,}", math.log(config.model.head.outputs))]
        if not issubclass(task, TokenPrediction) or config.data.synthetic.task:
            return []
        found = [(f"every token alike: ln {config.model.vocab_size:,}", math.log(config.model.vocab_size))]
        if len(self.manifests) == 1 and self.manifests[0] is not None and self.manifests[0].unigram_entropy:
            found.append(("frequencies of single tokens: their entropy", self.manifests[0].unigram_entropy))
        return found


def known_data(trained: Trained) -> KnownData:
    """The datasets of a run, as far as they are at hand."""
    data = trained.config.data
    if data.synthetic.task or data.examples.train:
        return KnownData(names=tuple(data_names(data)))
    paths = list(data.images.datasets) or list(data.mixture) or [data.path]
    return KnownData(names=tuple(data_names(data)), manifests=tuple(_manifest(path, trained) for path in paths))


def data_names(data: DataConfig) -> list[str]:
    """The datasets of a run: URLs as they are, local ones by their last folder, shares of a mixture in percent; the
    file of the examples that it was fine-tuned on."""
    if data.synthetic.task:
        return [f"{data.synthetic.task} (generated)"]
    if data.examples.train:
        return [f"{Path(data.examples.train).name} (labelled examples)"]
    mixture = data.images.mixture or data.mixture
    total = sum(mixture.values())
    shares = {path: f" ({weight / total:.0%})" for path, weight in mixture.items()}
    shares = shares or {data.images.path or data.path: ""}
    return [(path if is_url(path) else Path(path).name) + share for path, share in shares.items()]


def _manifest(path: str, trained: Trained) -> Manifest | None:
    try:
        manifest = Storage(path, trained.config.data.cache_dir).manifest
    except (OSError, ValueError):  # a card says what is known, and needs no dataset
        return None
    wanted = trained.manifest["extra"].get("tokenizer_sha256")
    same = manifest.tokenizer is None or wanted in (None, manifest.tokenizer.sha256)
    return manifest if same else None


def _counts(manifest: Manifest) -> str:
    """Documents and tokens, or pictures, of the splits."""
    words = []
    for name, split in manifest.splits.items():
        if manifest.tokenizer is None:
            words.append(f"{name} {split.documents:,} pictures")
        else:
            words.append(f"{name} {split.documents:,} with {split.tokens:,} tokens")
    return "; ".join(words)
