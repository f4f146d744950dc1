"""`matmix show-mixer RUN_OR_RECIPE --text ...`: pictures of the matrices M that mix a text's tokens, and their ranks;
with `--image FILE` what a patch takes from a picture. One page a layer."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from matmix.data.artifacts import shell_line
from matmix.data.storage.remote import is_url
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
    """Text for the model to read."""
    image: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Picture for an image classifier to read."""
    patch: str = ""
    """With --image: ROW,COLUMN of the patch, from 0, or "class" for the class token; default: the one in the middle."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for the pages; default: pictures/<name>, of a comparison's run pictures/<entry>-<seed>."""
    step: int | None = None
    """Checkpoint of a run; default: the newest."""
    weights: Weights = "raw"
    """Weights of a run: those that were trained, or with ema their average."""
    layers: tuple[int, ...] | None = None
    """Which, from 0; default: all."""
    max_tokens: int | None = None
    """Cut the text after these; default: 128."""
    max_heads: int = 16
    """Heads drawn of each layer."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        self.draw(rest)
        return 0

    def draw(self, overrides: Sequence[str] = ()) -> list[Path]:
        """Draws a PNG for each layer, tells the ranks and returns the paths; overrides: changes of a recipe, such as
        ("--model.layers", "hydra"). A page that was made from something else stays: the new one gets -2 to its name.
        Raises FileNotFoundError or ValueError (one line)."""
        from matmix.launch.lab.show_mixer.image_pages import chosen_place, patch_page, place_label
        from matmix.launch.lab.show_mixer.matrices import check_layers, mixer_matrices, page_of
        from matmix.launch.lab.show_mixer.subject import check_no_comparison, fresh, trained

        is_model = is_url(self.recipe) or Path(self.recipe).is_dir()
        self._check(is_model, overrides)
        if not is_url(self.recipe):
            check_no_comparison(self.recipe)
        if is_model:
            subject = trained(self.recipe, self.text, self.step, self.max_tokens, self.weights, self.image)
        else:
            subject = fresh(self.recipe, self.text, self.max_tokens, overrides, self.image)
        chosen, which, make = check_layers(subject, self.layers), subject.label, page_of
        if self.image is not None:
            place = chosen_place(self.patch, subject)
            which, make = f"{which}-{place_label(place)}", functools.partial(patch_page, place=place)
        folder = Path("pictures", subject.name) if self.out is None else Path(self.out)
        fixed, length = subject.model.config.fixed_length_mixers(), subject.model.config.max_seqlen
        if self.max_tokens not in (None, length) and fixed:
            print(f"--max-tokens {self.max_tokens} does not apply: {' and '.join(fixed)} takes exactly {length} tokens")
        paths, lacking = [], set()
        for layer, matrices in mixer_matrices(subject.model, subject.inputs, chosen):
            page, words = make(subject, layer, matrices, self.max_heads)
            paths.append(page.save(folder / f"layer-{layer:02}-{subject.model.blocks[layer].mixer.name}-{which}.png"))
            print(f"{paths[-1]}: {words}")
            lacking |= page.fonts().lacking
        if lacking:
            shown = "".join(sorted(lacking)[:_MOST_LETTERS]) + (" ..." if len(lacking) > _MOST_LETTERS else "")
            print(f"No font here has {shown}; install one that does, such as Noto Sans (CJK), to see them")
        again = "the same with another text" if self.image is None else "the same with another --image or --patch"
        if not is_model:
            train = shell_line("matmix", "train", self.recipe, *overrides)
            again = f"{train}, then matmix show-mixer RUN for what it learns"
        elif subject.label != "export":  # which has no steps
            earlier = shell_line("matmix", "show-mixer", self.recipe, "--step", "N")
            again = f"{earlier} for how it came about, or {again}"
        print(f"Next: {again}")
        return paths

    def _check(self, is_model: bool, overrides: Sequence[str]) -> None:
        """Raises ValueError (one line) for options that cannot be. is_model: the source is no recipe."""
        given = () if self.out is None else (Path(self.out), *Path(self.out).parents)
        file = next(filter(Path.is_file, given), None)
        read = [thing for thing in (self.text, self.image) if thing is not None]
        most, pictured = self.max_tokens, self.image is not None
        blank, changed = self.text is not None and not self.text.strip(), bool(is_model and overrides)
        stepped, averaged = not is_model and self.step is not None, not is_model and self.weights != "raw"
        problems = {
            "give what the model reads: --text TEXT, or of an image classifier --image FILE": not read,
            "--text and --image: give one of them": len(read) > 1,
            "--max-tokens is for texts: leave it out with --image": most is not None and pictured,
            "--patch belongs to --image": bool(self.patch) and not pictured,
            "the text is empty; give the words to show the mixers with, as in --text 'to be or not to be'": blank,
            f"max_tokens must be 3 or more, got {most}": most is not None and most < 3,
            f"max_heads must be 1 or more, got {self.max_heads}": self.max_heads < 1,
            f"{self.recipe} is a trained model, of which nothing can be changed: {' '.join(overrides)}": changed,
            f"{self.recipe} is a recipe, which has no steps to choose from; leave step out": stepped,
            f"{self.recipe} is a recipe, whose weights are not averaged yet; leave --weights out": averaged,
            f"--out {self.out}: {file} is a file; name a folder for the pages": file is not None,
        }
        for problem, holds in problems.items():
            if holds:
                raise ValueError(problem)
