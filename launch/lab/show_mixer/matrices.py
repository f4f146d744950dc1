"""Computes the matrices M of a model's mixers for a text, and their ranks.

What each mixer gets in the model's forward pass is recorded, and M is computed from it in float64, which numerical
ranks need.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch

from matmix.launch.lab.show_mixer.pictures import Head, MatrixPage
from matmix.launch.lab.show_mixer.subject import Subject
from matmix.model.backbone import Backbone
from matmix.model.mixers.base import Mixer, ScanOrders


def check_layers(subject: Subject, layers: Sequence[int] | None) -> list[int]:
    """Returns the layers to draw, ascending. Raises ValueError for those that are not there or hold no mixer."""
    blocks = subject.model.blocks
    if subject.model.separated:
        raise ValueError(f"{subject.name} is an encoder_decoder, whose layers read parts of a text: none can be drawn")
    if not (mixing := [index for index, block in enumerate(blocks) if block.mixer is not None]):
        raise ValueError(f"{subject.name} has no mixer in any layer")
    for layer in mixing if layers is None else layers:
        if not 0 <= layer < len(blocks):
            raise ValueError(f"{subject.name} has no layer {layer}; its layers are 0 to {len(blocks) - 1}")
        if blocks[layer].mixer is None:
            listed = ", ".join(map(str, mixing))
            raise ValueError(f"layer {layer} of {subject.name} has no mixer; layers with one: {listed}")
    return mixing if layers is None else sorted(set(layers))


@torch.no_grad()
def mixer_matrices(model: Backbone, inputs: torch.Tensor, layers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields for each layer its number and M (H, L, L) in float64, for the MRU (H, L, L, order, order). Of pictures
    rows and columns are as positions stand in them, and M is the mean of several orders. Raises ValueError where M is
    not finite."""
    read: dict[int, tuple] = {}
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            mixer = model.blocks[layer].mixer
            hook = mixer.register_forward_pre_hook(lambda _, x, layer=layer: read.update({layer: x}))
            hooks.callback(hook.remove)
        model(inputs, readout=lambda *_, **capped: None)
    for layer in layers:
        mixer = copy.deepcopy(model.blocks[layer].mixer).double()
        x, orders, *_ = read.pop(layer)
        scanned = isinstance(orders, ScanOrders)
        matrix = (mixer.matrix_in_orders(x.double(), orders) if scanned else mixer.matrix(x.double()))[0]
        if not matrix.isfinite().all():
            raise ValueError(f"M of layer {layer} ({mixer.name}) is not finite: the weights have diverged")
        yield layer, matrix


def numerical_rank(matrix: torch.Tensor, largest: float | None = None) -> int:
    """Counts singular values of a float64 matrix above eps * max(rows, columns) * the largest one, eps that of float64.
    largest: what to take for the largest one, where rounding errors are those of a larger matrix."""
    least = None if largest is None else torch.finfo(matrix.dtype).eps * max(matrix.shape) * largest
    return int(torch.linalg.matrix_rank(matrix, atol=least))


def as_head(matrix: torch.Tensor, name: str, skip: bool = False) -> Head:
    """Returns M (L, L) of a head with its ranks; of an MRU's (L, L, order, order) the matrix of all L * order rows.
    skip: M is I and another matrix, whose rank is what one wants to know."""
    length = matrix.shape[0]
    order = matrix.shape[2] if matrix.dim() == 4 else 1
    if matrix.dim() == 4:  # M[t, s] multiplies row vectors from the right
        matrix = matrix.permute(0, 3, 1, 2).reshape(length * order, length * order)
    middle = length // 2 * order
    rank = numerical_rank(matrix)
    if skip:
        largest = float(torch.linalg.matrix_norm(matrix, 2))
        rank = numerical_rank(matrix - torch.eye(len(matrix), dtype=matrix.dtype), largest)
    below, above = numerical_rank(matrix[middle:, :middle]), numerical_rank(matrix[:middle, middle:])
    return Head(name, matrix.numpy(), length, rank, skip, below, above)


def page_of(subject: Subject, layer: int, matrices: torch.Tensor, max_heads: int) -> tuple[MatrixPage, str]:
    """Returns the page of a layer, and a line with its number of matrices and their ranks."""
    mixer = subject.model.blocks[layer].mixer
    chosen, what = choose_matrices(mixer, matrices, max_heads)
    skip = mixer.holds_identity
    heads = [as_head(matrices[index], name, skip) for index, name in chosen]
    notes = list(subject.notes)
    if matrices.dim() == 5:
        order = matrices.shape[-1]
        notes.append(f"For two tokens M holds a block of {order} x {order}, the product of the states between them.")
    if not mixer.data_dependent:
        notes.append("M is the same for every text.")
    about = title_of(subject, layer, f"{len(subject.ids)} tokens, {what}", subject.given)
    page = MatrixPage(**about, notes=notes, heads=heads, text=subject.given, pieces=subject.pieces, ids=subject.ids)
    ranks = [head.rank for head in heads]
    span = " to ".join(map(str, sorted({min(ranks), max(ranks)}))) + (" + I" if skip else "")
    below, above = max(head.below for head in heads), max(head.above for head in heads)
    return page, f"{what}, rank {span} of {len(heads[0].weights)}, blocks at most {below} / {above}"


def title_of(subject: Subject, layer: int, what: str, *more: str) -> dict[str, str]:
    """Returns title, subtitle and description of a layer's page. more: what else it was made from."""
    title, subtitle = f"layer {layer}: {subject.model.blocks[layer].mixer.name}", f"{subject.where}, {subject.state}"
    subtitle = f"{subtitle}, {what}"
    description = "\n".join((title, subtitle, *subject.overrides, *more))
    return {"title": title, "subtitle": subtitle, "description": description}


def choose_matrices(mixer: Mixer, matrices: torch.Tensor, most: int) -> tuple[list[tuple[int, str]], str]:
    """Returns numbers and names of the matrices to draw, and words about how many there are."""
    chosen = choose_heads(matrices, most, "channel" if is_per_channel(mixer, matrices) else "head")
    count = len(matrices)
    what = f"{count} {'matrix' if count == 1 else 'matrices'}"
    return chosen, what if len(chosen) == count else f"{len(chosen)} of {what}"


def choose_heads(matrices: torch.Tensor, most: int, word: str = "head") -> list[tuple[int, str]]:
    """Chooses the matrices (H, L, L) to draw, at most `most` of them and evenly spaced, and names them. word: what has
    a matrix of its own. Where the first half of them looks back and the second one ahead, each has two."""
    count, half = len(matrices), len(matrices) // 2
    past, future = matrices[:half], matrices[half:]
    paired = count % 2 == 0 and matrices.dim() == 3 and not past.triu(1).any() and not future.tril(-1).any()
    if not paired or not past.tril(-1).any() or not future.triu(1).any():
        return [(index, f"{word} {index}") for index in _evenly(count, most)]
    return [
        (index + back * half, f"{word} {index}, {'backward' if back else 'forward'}")
        for index in _evenly(half, max(most // 2, 1))
        for back in (0, 1)
    ]


def _evenly(count: int, most: int) -> list[int]:
    number = min(count, most)
    return [index * count // number for index in range(number)]


def is_per_channel(mixer: Mixer, matrices: torch.Tensor) -> bool:
    """Says whether every channel of the values has a matrix of its own, of the matrices (H, L, L)."""
    if len(matrices) != mixer.d_model:
        return False
    values = mixer.values(next(mixer.parameters()).new_zeros(1, matrices.shape[1], mixer.d_model))
    return values.shape[2:] == (mixer.d_model, 1)
