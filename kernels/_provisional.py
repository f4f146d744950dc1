"""Stand-in until the ops are in place (never committed)."""
import torch, torch.nn.functional as F
from matmix.kernels.semiseparable.chunked import semiseparable_chunked, quasiseparable_chunked
from matmix.kernels.matrix_product.chunked import matrix_product_chunked
def _drop(f):
    def g(*a, backend="auto", **k): return f(*a, **k)
    return g
semiseparable_scan=_drop(semiseparable_chunked); quasiseparable_scan=_drop(quasiseparable_chunked); matrix_product_scan=_drop(matrix_product_chunked)
def short_conv(x, weight, bias=None, *, causal=False, activation=None, cu_seqlens=None, backend="auto"):
    B,L,D=x.shape; W=weight.shape[1]; left=W-1 if causal else W//2
    xp=F.pad(x,(0,0,left,W-1-left))
    if cu_seqlens is not None:
        doc=torch.searchsorted(cu_seqlens.long(), torch.arange(L), right=True); dp=F.pad(doc,(left,W-1-left),value=-1)
    y=0
    for w in range(W):
        t=xp[:,w:w+L]*weight[:,w]
        if cu_seqlens is not None: t=t*(dp[w:w+L]==doc)[None,:,None]
        y=y+t
    if bias is not None: y=y+bias
    return F.silu(y) if activation=="silu" else y
def gated_norm(x, weight, gate, *, eps=1e-5, group_size=None, backend="auto"):
    y=x.float(); y=y*torch.rsqrt(y.square().mean(-1,keepdim=True)+eps)
    return (y*weight*F.silu(gate.float())).to(x.dtype)
