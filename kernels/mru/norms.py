"""The norms of MRU states, which a training run records because not every construction bounds them."""

from __future__ import annotations

import torch
from torch import Tensor

EVERY = 64
"""Tokens between the states that are looked at. A state that has left the range of float32 stays out of it until its
document ends, so the states at the documents' ends show every overflow, and a sample shows the growth on the way."""

NOTHING = float("-inf")
"""Stands where there is no state; the log-norm of a state of zeros is a finite number."""


def log_norms(states: Tensor) -> Tensor:
    """Natural log of the Frobenius norm: (..., o, o) -> (...), float32 or float64.

    Exact also where squares would overflow or vanish; infinite or NaN where an element is.
    """
    states = states.detach().to(torch.promote_types(states.dtype, torch.float32)).flatten(-2)
    largest = states.abs().amax(-1).clamp_min(torch.finfo(states.dtype).tiny)
    # Infinity over infinity is NaN; the sum below must still say infinity.
    relative = (states / largest.unsqueeze(-1)).square().sum(-1)
    return largest.log() + torch.where(largest.isinf(), torch.ones_like(relative), relative.clamp_min(1)).log() / 2


def summary(norms: Tensor) -> Tensor:
    """Largest and mean of log-norms, (2,); entries of `NOTHING` are left out, a NaN shows in both."""
    norms = norms.flatten()
    there = norms != NOTHING
    return torch.stack([norms.amax(), norms.where(there, 0).sum() / there.sum()])


def sampled_log_norms(h: Tensor, final: Tensor) -> Tensor:
    """Log-norms (n, nheads) of every 64th state of `h` (batch, seqlen, nheads, o, o) and of the documents' last states
    (rows, nheads, o, o)."""
    return log_norms(torch.cat([h[:, EVERY - 1 :: EVERY].flatten(0, 1), final]))


def scan_log_norms(h: Tensor, final: Tensor) -> Tensor:
    """Largest and mean, (2,), of `sampled_log_norms`."""
    return summary(sampled_log_norms(h, final))
