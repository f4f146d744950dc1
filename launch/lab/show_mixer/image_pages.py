"""The pages of `matmix show-mixer --image`: what one position of a picture takes from it, in every head of a layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from matmix.launch.lab.show_mixer.image_pictures import PatchHead, PatchPage, ReadingOrder, draw_patch_page
from matmix.launch.lab.show_mixer.image_subject import ImageSubject
from matmix.launch.lab.show_mixer.matrices import choose_heads, is_per_channel
from matmix.model.backbone import Backbone
from matmix.model.images.scans import scan_orders
from matmix.model.mixers.base import Mixer

_WORDS = {
    "row": ("row by row",),
    "column": ("column by column",),
    "both": ("row by row", "column by column"),
    "snake": ("rows, in a snake", "columns, in a snake"),
    "hilbert": ("along a Hilbert curve",),
}
"""`model.image.scan` -> what its orders are called."""


def chosen_place(patch: str, subject: ImageSubject) -> tuple[int, int] | None:
    """Row and column of the patch that "ROW,COLUMN" names, of "" the one in the middle; None for "class", the class
    token. Raises ValueError (one line) for what the picture has not."""
    side = subject.side
    if patch == "":
        return side // 2, side // 2
    if patch == "class":
        if subject.image.class_token == "none":
            raise ValueError(f"--patch class: {subject.name} has no class token; name a patch, ROW,COLUMN")
        return None
    found = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", patch)
    if not found:
        raise ValueError(f'--patch {patch}: give ROW,COLUMN, such as 0,3, or "class" for the class token')
    row, column = int(found[1]), int(found[2])
    if max(row, column) >= side:
        raise ValueError(
            f"--patch {patch}: the picture has {side} x {side} patches; rows and columns are 0 to {side - 1}"
        )
    return row, column


@torch.no_grad()
def image_matrices(model: Backbone, images: torch.Tensor, layers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """For each layer its number and M (H, L, L) in float64, rows and columns as positions stand in the picture; of
    several orders the mean. For the MRU the norms of its blocks. images: (1, channels, height, width).

    Raises ValueError where M is not finite.
    """
    streams: list[torch.Tensor] = []
    model.stream(images, streams)
    patch = model.config.image.patch
    orders = scan_orders(model.config.image, images.shape[2] // patch, images.shape[3] // patch, images.device)
    for layer in layers:
        block = model.blocks[layer]
        x = block.norm_mixer(streams[layer]) if block.pre else streams[layer]
        mixer = copy.deepcopy(block.mixer).double()
        found = mixer.matrix(x.double()) if orders is None else mixer.matrix_in_orders(x.double(), orders)
        if not found.isfinite().all():
            raise ValueError(f"M of layer {layer} ({mixer.name}) is not finite: the weights have diverged")
        yield layer, torch.linalg.matrix_norm(found[0]) if found.dim() == 6 else found[0]


def reading_orders(subject: ImageSubject) -> list[ReadingOrder]:
    """The orders in which the model reads the patches, without the class token."""
    image, side = subject.image, subject.side
    orders = scan_orders(image, side, side)
    if orders is None:
        return [ReadingOrder(_WORDS["row"][0], torch.arange(side * side).numpy())]
    found = []
    for name, places in zip(_WORDS[image.scan], orders.places, strict=True):
        if image.class_token != "none":
            place = image.class_place(side * side)
            places = places[places != place]
            places = places - (places > place).long()
        found.append(ReadingOrder(name, places.numpy()))
    return found


def patch_head(row: torch.Tensor, name: str, place: tuple[int, int] | None, subject: ImageSubject) -> PatchHead:
    """A row (L,) of M as weights of the patches and of the class token."""
    side, token = subject.side, subject.image.class_tokens
    class_weight = None
    if token:
        at = subject.image.class_place(side * side)
        class_weight, row = float(row[at]), torch.cat((row[:at], row[at + 1 :]))
    return PatchHead(name, row.view(side, side).numpy(), class_weight, place)


def draw_image_pages(
    subject: ImageSubject, layers: Sequence[int], place: tuple[int, int] | None, folder: Path, max_heads: int
) -> Iterator[tuple[Path, str]]:
    """Draws a page for each of the layers; gives its path and what is said about it in a line. place: of
    `chosen_place`."""
    side, orders = subject.side, reading_orders(subject)
    position = subject.image.class_place(side * side)
    if place is not None:
        number = place[0] * side + place[1]
        position = number + (subject.image.class_token != "none" and number >= position)
    named = "class" if place is None else f"patch-{place[0]}-{place[1]}"
    what = "the class token" if place is None else f"the patch in row {place[0]}, column {place[1]} (from 0)"
    for layer, matrices in image_matrices(subject.model, subject.images, layers):
        mixer, count = subject.model.blocks[layer].mixer, len(matrices)
        chosen = choose_heads(matrices, max_heads, "channel" if is_per_channel(mixer, matrices) else "head")
        heads = [patch_head(matrices[index, position], name, place, subject) for index, name in chosen]
        drawn = f"{count} {'matrix' if count == 1 else 'matrices'}"
        if len(heads) < count:
            drawn = f"{len(heads)} of {drawn}"
        title = f"layer {layer}: {mixer.name}"
        subtitle = f"{subject.where}, {subject.state}, {drawn}"
        notes = [f"What {what} takes from {subject.file}", *subject.notes, *mixer_notes(subject, mixer)]
        description = "\n".join((title, subtitle, *subject.overrides, subject.file, named))
        page = PatchPage(title, subtitle, notes, subject.picture, orders, heads, description)
        path = draw_patch_page(page, folder / f"layer-{layer:02}-{mixer.name}-{subject.label}-{named}.png")
        yield path, f"{drawn}, {_distances(heads)}"


def mixer_notes(subject: ImageSubject, mixer: Mixer) -> list[str]:
    """What has to be known to read the page of a layer with this mixer."""
    image, found = subject.image, []
    if len(_WORDS[image.scan]) > 1:
        found.append("M is the mean over both orders.")
    if mixer.causal:
        found.append("The mixer sees no later patches of the order.")
    if image.class_outside:
        found.append("The class token stands outside of the order, next to every patch.")
    elif image.class_token != "none":
        place = image.class_place(subject.side**2)
        found.append(f"The class token is read as number {place} of the sequence, from 0.")
    if getattr(mixer, "skip", False):
        found.append("M holds an identity: the mixer adds its own input.")
    if mixer.name == "mru":
        found.append("Weights are the norms of the products of the states between two patches.")
    if not mixer.data_dependent:
        found.append("M is the same for every picture.")
    return found


def _distances(heads: Sequence[PatchHead]) -> str:
    """In a line: the range of the heads' mean distances, or of what the class token takes of itself."""
    found = [head.distance for head in heads if head.distance is not None]
    if found:
        return f"mean distance {min(found):.1f} to {max(found):.1f} patches"
    own = [head.class_weight for head in heads if head.class_weight is not None]
    return f"of itself {min(own):.2g} to {max(own):.2g}" if own else "takes nothing"
