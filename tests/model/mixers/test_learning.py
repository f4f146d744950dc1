"""What a layer has to learn at the least: which token stood before, in rows of 128 tokens.

An entry of M that hardly differs from its neighbour's at the start, as that of a function of the offset in parts of a
long row, makes all equations hold and learns nothing.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from mixer_cases import small_config

from matmix.model import MixerOptions, ModelConfig, build_model, initialize
from matmix.model.mixers import MIXERS

VOCAB_SIZE, SEQLEN, BATCH, RATE = 8, 128, 8, 0.01
STEPS = {"hyena": 400}
"""Of others 150."""
WITHOUT_DISTANCES = {
    # Their matrices know positions from embeddings, or have weights of its own for each: both need many more steps.
    *("fnet", "lara", "linear_attention", "linformer", "lion_lit", "lsh_attention", "nystroem", "m2", "mlp_mixer"),
    *("sma_causal", "sma_decay", "sma_fourier", "sma_graph"),
    "lion_d",  # its decay is the same to both sides
    "retnet",  # its decays are slow, and four frequencies, of heads as small as these, blur what they add up
}
FORMS = [
    pytest.param(name, causal, id=f"{name}-{'causal' if causal else 'bidirectional'}")
    for name, kind in MIXERS.items()
    for causal in [True] * kind.causal_form + [False] * kind.bidirectional_form
    if name not in WITHOUT_DISTANCES
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "causal"), FORMS)
def test_one_layer_learns_which_token_stood_before(name, causal):
    config = ModelConfig(
        architecture="language_model" if causal else "encoder",
        layers=(name,),
        n_layers=1,
        mixers=MixerOptions(**{name: small_config(name)}),
        d_model=32,
        vocab_size=VOCAB_SIZE,
        mlp_ratio=0,
        max_seqlen=SEQLEN,
    )
    model = build_model(config)
    initialize(model, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    losses = []
    for _ in range(STEPS.get(name, 150)):
        tokens = torch.randint(VOCAB_SIZE, (BATCH, SEQLEN))
        loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.25 * math.log(VOCAB_SIZE)
