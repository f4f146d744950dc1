"""Dense matrices in the shared block of the matrix mixers (arXiv 2407.09941): one of parameters per head, as in
MLP-Mixer (arXiv 2105.01601), and the real part of the discrete Fourier transform, as in FNet (arXiv 2105.03824)."""

import torch
from torch import Tensor

from matmix.model.calls import weight_of
from matmix.model.initialization import InitRule
from matmix.model.mixers.convolutions.long import cosine_transform, fourier_angles, real_transform_flops
from matmix.model.mixers.structured.matrix_mixer import MatrixMixer, SharedBlockConfig, draw_xavier_normal


class Dense(MatrixMixer):
    """M_ij = N^-1/2 times a parameter, N = max_seqlen."""

    fixed_length = True
    complexity = "O(L^2)"

    def mixing_parameters(self) -> dict[str, tuple[tuple[int, ...], InitRule]]:
        return {"M": ((self.nheads, self.max_seqlen, self.max_seqlen), draw_xavier_normal)}

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: SharedBlockConfig, seqlen: int) -> float:
        return 2.0 * seqlen * d_inner

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        return weight_of(self.matrix_mixer, "M").unsqueeze(0) * self.max_seqlen**-0.5

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return torch.einsum("hts,bshp->bthp", weight_of(self.matrix_mixer, "M"), v) * self.max_seqlen**-0.5


class DFT(MatrixMixer):
    """M_ij = L^-1/2 cos(2 pi i j / L), the real part of the transform, L the document's own length; no parameters."""

    complexity = "O(L log L)"

    @classmethod
    def matrix_flops(cls, d_inner: int, nheads: int, config: SharedBlockConfig, seqlen: int) -> float:
        return d_inner * real_transform_flops(seqlen) / seqlen

    def entries(self, v: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        length = v.shape[1]
        cosines = fourier_angles(length, v.device).cos() * length**-0.5
        dtype = torch.promote_types(v.dtype, torch.float32)
        return cosines.to(dtype).expand(1, self.nheads, length, length)

    def mix_values(self, v, inputs, cu_seqlens=None, max_seqlen=None) -> Tensor:
        return cosine_transform(v) * v.shape[1] ** -0.5
