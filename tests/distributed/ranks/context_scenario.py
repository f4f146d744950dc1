"""What the ranks of a context send each other, run on all of them."""

import torch
import torch.distributed as dist

from matmix.kernels.context import Context, Gathering, exchanged, from_neighbours, gathered


def world() -> Context:
    return Context.of(dist.group.WORLD)


def gathers_and_exchanges() -> dict[str, list]:
    """Returns what each way of sending gave this rank, and gradients."""
    context = world()
    rank, size = context.rank, context.size
    one, two = Gathering(context, torch.full((2, 3), float(rank)), torch.tensor(rank + 0.5)).wait()
    part = (torch.arange(4.0).view(1, 2, 2) + 10 * rank).requires_grad_()
    whole = gathered(part, 1, context)
    (whole * (rank + 1)).sum().backward()
    rows = torch.randn(1, 4, 2 * size, requires_grad=True)
    slices = exchanged(rows, 2, 1, context)
    again = exchanged(slices, 1, 2, context)
    (again * rank).sum().backward()
    left, right = from_neighbours(context, torch.tensor([float(rank)]), torch.tensor([rank + 0.5]))
    none, only = from_neighbours(context, None, torch.tensor([float(rank)]))[::-1]
    return {
        "named": Context.named(context.name) == context,
        "gathered states": [list(one.shape), two.flatten().tolist()],
        "gathered": whole[0, :, 0].tolist(),
        "gradient": part.grad.flatten().tolist(),
        "exchanged": [list(slices.shape), torch.equal(again, rows), rows.grad.unique().tolist()],
        "neighbours": [left.item(), right.item(), none, only.item()],
    }
