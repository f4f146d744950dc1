"""The registry of sequence mixers. To add one, write its file and add its line here."""

from matmix.model.mixers.attention.lara import LARA
from matmix.model.mixers.attention.linformer import Linformer
from matmix.model.mixers.attention.lsh import LSHAttention
from matmix.model.mixers.attention.masked import (
    SmaCausal,
    SmaDecay,
    SmaFourier,
    SmaGraph,
    SmaSemiseparable,
    SmaToeplitz,
)
from matmix.model.mixers.attention.nystroem import Nystroem
from matmix.model.mixers.attention.softmax_attention import Attention, LocalAttention
from matmix.model.mixers.base import Mixer
from matmix.model.mixers.convolutions.ckconv import CKConv
from matmix.model.mixers.convolutions.h3 import H3
from matmix.model.mixers.convolutions.hyena import Hyena
from matmix.model.mixers.convolutions.s4 import S4
from matmix.model.mixers.convolutions.s4d import S4D
from matmix.model.mixers.convolutions.short import Convolution
from matmix.model.mixers.convolutions.tnn import TNN
from matmix.model.mixers.matrix_memory import MatrixMemory
from matmix.model.mixers.mru import MRU
from matmix.model.mixers.scans.bidirectional import (
    BidirectionalAdd,
    BidirectionalAddDiagonal,
    BidirectionalAddShift,
    BidirectionalConcat,
    BidirectionalMult,
    TwoS6,
    TwoSSMs,
)
from matmix.model.mixers.scans.gated_delta import GatedDelta
from matmix.model.mixers.scans.hydra import Hydra
from matmix.model.mixers.scans.linear_attention import LinearAttention
from matmix.model.mixers.scans.lion import LionD, LionLit, LionS
from matmix.model.mixers.scans.retnet import RetNet
from matmix.model.mixers.scans.rwkv7 import RWKV7
from matmix.model.mixers.scans.s6 import S6
from matmix.model.mixers.scans.semiseparable import Semiseparable
from matmix.model.mixers.structured.butterfly import Butterfly, Monarch
from matmix.model.mixers.structured.cauchy import CauchyDD, CauchyDI
from matmix.model.mixers.structured.dense import DFT, Dense
from matmix.model.mixers.structured.fnet import FNet
from matmix.model.mixers.structured.low_rank import LowRankDD, LowRankDI, SoftmaxDD, SoftmaxDI
from matmix.model.mixers.structured.m2 import M2
from matmix.model.mixers.structured.mlp_mixer import MLPMixer
from matmix.model.mixers.structured.quasiseparable import QuasiseparableDD, QuasiseparableDI
from matmix.model.mixers.structured.toeplitz import ToeplitzDD, ToeplitzDI
from matmix.model.mixers.structured.vandermonde import VandermondeDD, VandermondeDI

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "attention_dd": SoftmaxDD,
    "attention_di": SoftmaxDI,
    "bidirectional_add": BidirectionalAdd,
    "bidirectional_add_diagonal": BidirectionalAddDiagonal,
    "bidirectional_add_shift": BidirectionalAddShift,
    "bidirectional_concat": BidirectionalConcat,
    "bidirectional_mult": BidirectionalMult,
    "butterfly": Butterfly,
    "cauchy_dd": CauchyDD,
    "cauchy_di": CauchyDI,
    "ckconv": CKConv,
    "convolution": Convolution,
    "dense": Dense,
    "dft": DFT,
    "fnet": FNet,
    "gated_delta": GatedDelta,
    "h3": H3,
    "hydra": Hydra,
    "hyena": Hyena,
    "lara": LARA,
    "linear_attention": LinearAttention,
    "local_attention": LocalAttention,
    "linformer": Linformer,
    "lion_d": LionD,
    "lion_lit": LionLit,
    "lion_s": LionS,
    "low_rank_dd": LowRankDD,
    "low_rank_di": LowRankDI,
    "lsh_attention": LSHAttention,
    "m2": M2,
    "matrix_memory": MatrixMemory,
    "mlp_mixer": MLPMixer,
    "monarch": Monarch,
    "mru": MRU,
    "nystroem": Nystroem,
    "quasiseparable_dd": QuasiseparableDD,
    "quasiseparable_di": QuasiseparableDI,
    "retnet": RetNet,
    "rwkv7": RWKV7,
    "s4": S4,
    "s4d": S4D,
    "s6": S6,
    "semiseparable": Semiseparable,
    "sma_causal": SmaCausal,
    "sma_decay": SmaDecay,
    "sma_fourier": SmaFourier,
    "sma_graph": SmaGraph,
    "sma_semiseparable": SmaSemiseparable,
    "sma_toeplitz": SmaToeplitz,
    "tnn": TNN,
    "toeplitz_dd": ToeplitzDD,
    "toeplitz_di": ToeplitzDI,
    "two_s6": TwoS6,
    "two_ssms": TwoSSMs,
    "vandermonde_dd": VandermondeDD,
    "vandermonde_di": VandermondeDI,
}
"""Name in a configuration -> mixer class."""

for _name, _mixer in MIXERS.items():
    _mixer.name = _name
