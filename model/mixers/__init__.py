"""The sequence mixers by name. To add one: write its file, and add its line here."""

from matmix.model.mixers.attention import Attention
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.hydra import Hydra
from matmix.model.mixers.mru import MRU

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "hydra": Hydra,
    "mru": MRU,
}
"""Name in a configuration -> mixer class."""

for _name, _mixer in MIXERS.items():
    _mixer.name = _name
