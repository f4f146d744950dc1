"""The sequence mixers by name. To add one: write its file, and add its line here."""

from matmix.model.mixers.attention import Attention
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.hydra import Hydra
from matmix.model.mixers.lion import LionD, LionLit, LionS
from matmix.model.mixers.masked_attention import SmaCausal, SmaDecay, SmaFourier, SmaSemiseparable, SmaToeplitz
from matmix.model.mixers.mru import MRU

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "hydra": Hydra,
    "lion_d": LionD,
    "lion_lit": LionLit,
    "lion_s": LionS,
    "mru": MRU,
    "sma_causal": SmaCausal,
    "sma_decay": SmaDecay,
    "sma_fourier": SmaFourier,
    "sma_semiseparable": SmaSemiseparable,
    "sma_toeplitz": SmaToeplitz,
}
"""Name in a configuration -> mixer class."""

for _name, _mixer in MIXERS.items():
    _mixer.name = _name
