"""Mamba-1, Mamba-2, pairs of it in both directions, linear attention and retention as plain recurrences: one token
after the other, from a mixer's parameters, x (B, L, d_model) -> (B, L, d_model)."""

import torch
import torch.nn.functional as F


def convolved(x, conv, left):
    """Token by token and tap by tap, then silu."""
    length, width = x.shape[1], conv.kernel_size[0]
    rows = []
    for t in range(length):
        row = torch.zeros_like(x[:, 0]) if conv.bias is None else conv.bias.expand_as(x[:, 0])
        for tap in range(width):
            if 0 <= t + tap - left < length:
                row = row + conv.weight[:, 0, tap] * x[:, t + tap - left]
        rows.append(F.silu(row))
    return torch.stack(rows, 1)


def scanned(v, b, c, dt, A, order):
    """h = exp(dt A) h + dt b v^T, y = c^T h in the given order of tokens; v (B, L, H, P), b and c (B, L, G, N)."""
    heads = v.shape[2]
    b, c = (part.repeat_interleave(heads // part.shape[2], 2) for part in (b, c))
    h, rows = 0.0, {}
    for t in order:
        h = (dt[:, t] * A).exp()[..., None, None] * h + dt[:, t, :, None, None] * b[:, t, :, :, None] * v[:, t, :, None]
        rows[t] = (c[:, t, :, None] @ h).squeeze(-2)
    return torch.stack([rows[t] for t in range(v.shape[1])], 1)


def normed(y, eps):
    return y / (y.square().mean(-1, keepdim=True) + eps).sqrt()


def mamba2(m, x):
    config, groups = m.config, (m.config.ngroups, m.config.d_state)
    inner, group_width = m.form.inner, m.form.group_width
    z, vbc, dt = m.in_proj(x).split([inner, inner + 2 * group_width, m.nheads], -1)
    v, b, c = convolved(vbc, m.conv1d, config.d_conv - 1).split([inner, group_width, group_width], -1)
    v, b, c = v.unflatten(-1, (m.nheads, -1)), b.unflatten(-1, groups), c.unflatten(-1, groups)
    dt = torch.log1p((dt + m.dt_bias).exp())
    y = (scanned(v, b, c, dt, -m.A_log.exp(), range(x.shape[1])) + m.D[:, None] * v).flatten(-2)
    by_group = (config.ngroups, -1)
    if config.norm_before_gate:
        y = normed(y.unflatten(-1, by_group), 1e-5).flatten(-2) * F.silu(z)
    else:
        y = normed((y * F.silu(z)).unflatten(-1, by_group), 1e-5).flatten(-2)
    return m.out_proj(y * m.norm.weight)


def mamba1(m, x):
    """h_dn = exp(dt_d A_dn) h_dn + dt_d B_n x_d, y_d = sum_n C_n h_dn + D_d x_d."""
    (u, z), tokens = m.in_proj(x).chunk(2, -1), range(x.shape[1])
    u = convolved(u, m.conv1d, m.config.d_conv - 1)
    rank = m.dt_proj.in_features
    low, b, c = u @ m.x_proj.weight[:rank].mT, *(u @ part.mT for part in m.x_proj.weight[rank:].chunk(2))
    dt, h, rows = torch.log1p((low @ m.dt_proj.weight.mT + m.dt_proj.bias).exp()), 0.0, []
    for t in tokens:
        h = (dt[:, t, :, None] * -m.A_log.exp()).exp() * h + (dt[:, t] * u[:, t])[:, :, None] * b[:, t, None]
        rows.append((h * c[:, t, None]).sum(-1) + m.D * u[:, t])
    return m.out_proj(torch.stack(rows, 1) * F.silu(z))


def two_layers(m, x):
    layer = mamba1 if hasattr(m.ssms[0], "dt_proj") else mamba2
    forward, backward = layer(m.ssms[0], x), layer(m.ssms[1], x.flip(1)).flip(1)
    if m.config.joined == "concat":
        return m.out_proj(torch.cat([forward, backward], -1))
    return m.out_proj(forward + backward if m.config.joined == "add" else forward * backward)


def two_directions(m, x):
    groups, tokens = (m.config.ngroups, m.config.d_state), range(x.shape[1])
    z, vbc, dt = m.in_proj(x).split([m.form.inner, m.form.inner + 4 * m.form.group_width, 2 * m.nheads], -1)
    vbc = convolved(vbc, m.conv1d, m.config.d_conv // 2)
    v, *vectors = vbc.split([m.form.inner, *4 * [m.form.group_width]], -1)
    bf, cf, bb, cb = (part.unflatten(-1, groups) for part in vectors)
    u, dt = v.unflatten(-1, (m.nheads, -1)), dt.unflatten(-1, (2, -1))
    dt = torch.log1p((dt + m.dt_bias).exp())
    forward = scanned(u, bf, cf, dt[:, :, 0], -m.A_log[0].exp(), tokens)
    backward = scanned(u, bb, cb, dt[:, :, 1], -m.A_log[1].exp(), reversed(tokens))
    if m.name == "bidirectional_mult":
        y = forward * backward
    elif m.name == "bidirectional_concat":
        y = torch.cat([forward, backward], -1)
        z = torch.cat(2 * [z.unflatten(-1, (m.nheads, -1))], -1).flatten(-2)
    elif m.name == "bidirectional_add_shift":
        none = torch.zeros_like(forward[:, :1])
        y = torch.cat([none, forward[:, :-1]], 1) + torch.cat([backward[:, 1:], none], 1)
    else:
        y = forward + backward
    if m.name == "bidirectional_add_diagonal":
        y = y + (v @ m.fc_D.weight.T + m.D)[..., None] * u
    return m.out_proj(normed(y.flatten(-2), 1e-5) * m.norm.weight * F.silu(z))


def linear_attention(m, x):
    q, k, v = (layer(x).unflatten(-1, (m.nheads, -1)) for layer in (m.q_proj, m.k_proj, m.v_proj))
    phi = {"elu": lambda part: F.elu(part) + 1, "silu": F.silu, "none": lambda part: part}[m.config.feature_map]
    q, k, S, z, rows = phi(q), phi(k), 0.0, 0.0, []
    for t in range(x.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        z = z + k[:, t]
        y = (q[:, t, :, None] @ S).squeeze(-2)
        scale = 1 / ((q[:, t] * z).sum(-1, keepdim=True) + m.config.eps)
        rows.append(y * (scale if m.config.normalize else m.config.headdim**-0.5))
    return m.out_proj(torch.stack(rows, 1).flatten(-2))


def retention(m, x):
    """With complex numbers, as the paper has it: S = gamma S + conj(e^{in theta} k)^T v, y = Re(e^{in theta} q S)."""
    q, k, v = (layer(x).unflatten(-1, (m.nheads, -1)) for layer in (m.q_proj, m.k_proj, m.v_proj))
    pairs = torch.arange(m.config.headdim // 2, dtype=x.dtype)
    theta = m.config.rope_base ** (-2 * pairs / m.config.headdim)
    turns = torch.polar(torch.ones(()).to(x), torch.arange(x.shape[1])[:, None] * theta)[:, None]
    q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turns for part in (q, k))
    gamma = 1 - 2.0 ** (-5 - torch.arange(m.nheads, dtype=x.dtype))

    def one_direction(order):
        S, rows = 0.0, {}
        for t in order:
            S = gamma[:, None, None] * S + k[:, t].conj()[..., None] * v[:, t, :, None]
            rows[t] = (q[:, t, :, None] @ S).real.squeeze(-2)
        return torch.stack([rows[t] for t in range(x.shape[1])], 1)

    y = one_direction(range(x.shape[1]))
    if not m.causal:
        y = y + one_direction(reversed(range(x.shape[1]))) - (q * k.conj()).sum(-1, keepdim=True).real * v
    y = normed(y * m.config.headdim**-0.5, m.config.norm_eps)
    return m.out_proj(F.silu(m.g_proj(x)) * y.flatten(-2))
