"""`matmix show-mixer RUN_OR_RECIPE --text ...`: pictures of the matrices M that mix a text's tokens, and their ranks;
with `--image FILE` what a patch takes from a picture.

One page a layer. What each mixer gets in the model's forward pass is recorded, and M is computed from it in float64,
which numerical ranks need.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro

from matmix.data.artifacts import shell_line
from matmix.data.storage.remote import is_url
from matmix.launch.lab.show_mixer.heads import choose_heads, is_per_channel
from matmix.launch.lab.show_mixer.image_pages import chosen_place, draw_image_pages
from matmix.launch.lab.show_mixer.image_subject import ImageSubject, fresh_on_images, trained_on_images
from matmix.launch.lab.show_mixer.pictures import Head, Page, draw_page
from matmix.launch.lab.show_mixer.subject import Subject, check_no_comparison, fresh, trained
from matmix.model.backbone import Backbone
from matmix.train.state import Weights

_MOST_LETTERS = 20  # that one line names


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowMixer:
    """Draw the matrix M of every head as a heat map, one page a layer, with its rank.

    For a model of images each head's map lies on the picture, and shows what one patch takes from it.
    Fields of a recipe can be changed as in `matmix train`, such as --model.layers attention.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")] = ""
    """Run or export directory, or a recipe (initial weights)."""
    text: str | None = None
    """What the model reads."""
    image: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Of an image classifier: the picture that it reads."""
    patch: str = ""
    """With --image: ROW,COLUMN of the patch, from 0, or "class" for the class token; default: the one in the middle."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for the pages; default: pictures/<name>, of a comparison's run pictures/<entry>-<seed>."""
    step: int | None = None
    """Checkpoint of a run; default: the newest."""
    weights: Weights = "raw"
    """Of a run: the weights that were trained, or with ema their average."""
    layers: tuple[int, ...] | None = None
    """Which, from 0; default: all."""
    max_tokens: int | None = None
    """Cut the text after these; default: 128."""
    max_heads: int = 16
    """Heads drawn of each layer."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Draws the pages and returns the exit code."""
        self.draw(rest)
        return 0

    def draw(self, overrides: Sequence[str] = ()) -> list[Path]:
        """Draws M of every head, one PNG a layer, and tells the ranks.

        A page that was made from another text, or otherwise, stays: the new one gets -2 to its name. Mixers of a fixed
        length get exactly that many tokens: the text is cut, or repeated until it fills them.

        Args:
            overrides: changes of a recipe, such as ("--model.layers", "hydra").
        Returns: the pictures. Raises FileNotFoundError or ValueError (one line).
        """
        is_model = is_url(self.recipe) or Path(self.recipe).is_dir()
        self._check(is_model, overrides)
        if self.image is not None:
            return self._draw_image(is_model, overrides)
        if is_model:
            subject = trained(self.recipe, self.text, self.step, self.max_tokens, self.weights)
        else:
            subject = fresh(self.recipe, self.text, self.max_tokens, overrides)
        chosen = _check_layers(subject, self.layers)
        folder = Path("pictures", subject.name) if self.out is None else Path(self.out)
        fixed, length = subject.model.config.fixed_length_mixers(), subject.model.config.max_seqlen
        if self.max_tokens not in (None, length) and fixed:
            print(f"--max-tokens {self.max_tokens} does not apply: {' and '.join(fixed)} takes exactly {length} tokens")
        paths, lacking = [], set()
        for layer, matrices in mixer_matrices(subject.model, subject.ids, chosen):
            page, words = _page(subject, layer, matrices, self.max_heads)
            name = f"layer-{layer:02}-{subject.model.blocks[layer].mixer.name}-{subject.label}.png"
            paths.append(draw_page(page, folder / name))
            print(f"{paths[-1]}: {words}")
            lacking |= page.fonts().lacking
        if lacking:
            shown = "".join(sorted(lacking)[:_MOST_LETTERS]) + (" ..." if len(lacking) > _MOST_LETTERS else "")
            print(f"No font here has {shown}; install one that does, such as Noto Sans (CJK), to see them")
        self._say_next("the same with another text", overrides, is_model, subject.label)
        return paths

    def _draw_image(self, is_model: bool, overrides: Sequence[str]) -> list[Path]:
        """Draws what a patch takes from the picture, one PNG a layer."""
        if is_model:
            subject = trained_on_images(self.recipe, self.image, self.step, self.weights)
        else:
            subject = fresh_on_images(self.recipe, self.image, overrides)
        chosen, place = _check_layers(subject, self.layers), chosen_place(self.patch, subject)
        folder = Path("pictures", subject.name) if self.out is None else Path(self.out)
        paths = []
        for path, words in draw_image_pages(subject, chosen, place, folder, self.max_heads):
            paths.append(path)
            print(f"{path}: {words}")
        self._say_next("the same with another --image or --patch", overrides, is_model, subject.label)
        return paths

    def _say_next(self, again: str, overrides: Sequence[str], is_model: bool, label: str) -> None:
        if not is_model:
            train = shell_line("matmix", "train", self.recipe, *overrides)
            again = f"{train}, then matmix show-mixer RUN for what it learns"
        elif label != "export":  # which has no steps
            earlier = shell_line("matmix", "show-mixer", self.recipe, "--step", "N")
            again = f"{earlier} for how it came about, or {again}"
        print(f"Next: {again}")

    def _check(self, is_model: bool, overrides: Sequence[str]) -> None:
        """Raises ValueError (one line) for options that cannot be. is_model: the source is no recipe."""
        given = () if self.out is None else (Path(self.out), *Path(self.out).parents)
        file = next(filter(Path.is_file, given), None)
        empty, few = (
            self.text is not None and not self.text.strip(),
            self.max_tokens is not None and self.max_tokens < 3,
        )
        changed, stepped = is_model and overrides, not is_model and self.step is not None
        fresh_ema = not is_model and self.weights != "raw"
        neither, both = self.text is None and self.image is None, self.text is not None and self.image is not None
        aside = self.max_tokens is not None and self.image is not None
        problems = {
            "give what the model reads: --text TEXT, or of an image classifier --image FILE": neither,
            "--text and --image: give one of them": both,
            "--max-tokens is for texts: leave it out with --image": aside,
            "--patch belongs to --image": bool(self.patch) and self.image is None,
            "the text is empty; give the words to show the mixers with, as in --text 'to be or not to be'": empty,
            f"max_tokens must be 3 or more, got {self.max_tokens}": few,
            f"max_heads must be 1 or more, got {self.max_heads}": self.max_heads < 1,
            f"{self.recipe} is a trained model, of which nothing can be changed: {' '.join(overrides)}": changed,
            f"{self.recipe} is a recipe, which has no steps to choose from; leave step out": stepped,
            f"{self.recipe} is a recipe, whose weights are not averaged yet; leave --weights out": fresh_ema,
            f"--out {self.out}: {file} is a file; name a folder for the pages": file is not None,
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(problem)
        if not is_url(self.recipe):
            check_no_comparison(self.recipe)


def _check_layers(subject: Subject | ImageSubject, layers: Sequence[int] | None) -> list[int]:
    """The layers to draw, ascending. Raises ValueError for those that are not there or hold no mixer."""
    blocks = subject.model.blocks
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
def mixer_matrices(model: Backbone, ids: Sequence[int], layers: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """For each layer its number and M (H, L, L) in float64, for the MRU (H, L, L, order, order).

    Raises ValueError where M is not finite.
    """
    inputs: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            mixer = model.blocks[layer].mixer
            hook = mixer.register_forward_pre_hook(lambda _, x, layer=layer: inputs.update({layer: x[0]}))
            hooks.callback(hook.remove)
        model(torch.tensor([ids]), readout=lambda *_: None)
    for layer in layers:
        mixer = copy.deepcopy(model.blocks[layer].mixer).double()
        matrix = mixer.matrix(inputs.pop(layer).double())[0]
        if not matrix.isfinite().all():
            raise ValueError(f"M of layer {layer} ({mixer.name}) is not finite: the weights have diverged")
        yield layer, matrix


def numerical_rank(matrix: torch.Tensor, largest: float | None = None) -> int:
    """Singular values of a float64 matrix above eps * max(rows, columns) * the largest one, eps that of float64.

    largest: what to take for the largest one, where rounding errors are those of a larger matrix.
    """
    least = None if largest is None else torch.finfo(matrix.dtype).eps * max(matrix.shape) * largest
    return int(torch.linalg.matrix_rank(matrix, atol=least))


def as_head(matrix: torch.Tensor, name: str, skip: bool = False) -> Head:
    """M (L, L) of a head with its ranks; of an MRU's (L, L, order, order) the matrix of all L * order rows.

    skip: M is I and another matrix, whose rank is what one wants to know.
    """
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


def _page(subject: Subject, layer: int, matrices: torch.Tensor, max_heads: int) -> tuple[Page, str]:
    """The page of a layer, and its number of matrices and their ranks in a line."""
    mixer, count = subject.model.blocks[layer].mixer, len(matrices)
    chosen = choose_heads(matrices, max_heads, "channel" if is_per_channel(mixer, matrices) else "head")
    skip = getattr(mixer, "skip", False)
    heads = [as_head(matrices[index], name, skip) for index, name in chosen]
    what = f"{count} {'matrix' if count == 1 else 'matrices'}"
    if len(heads) < count:
        what = f"{len(heads)} of {what}"
    notes = list(subject.notes)
    if matrices.dim() == 5:
        order = matrices.shape[-1]
        notes.append(f"For two tokens M holds a block of {order} x {order}, the product of the states between them.")
    if not mixer.data_dependent:
        notes.append("M is the same for every text.")
    title = f"layer {layer}: {mixer.name}"
    subtitle = f"{subject.where}, {subject.state}, {len(subject.ids)} tokens, {what}"
    description = "\n".join((title, subtitle, *subject.overrides, subject.text))
    page = Page(title, subtitle, subject.text, notes, heads, subject.pieces, subject.ids, description)
    ranks = [head.rank for head in heads]
    span = " to ".join(map(str, sorted({min(ranks), max(ranks)}))) + (" + I" if skip else "")
    below, above = max(head.below for head in heads), max(head.above for head in heads)
    return page, f"{what}, rank {span} of {len(heads[0].matrix)}, blocks at most {below} / {above}"
