"""`matmix generate RUN --prompt ...`: continue texts, or fill in their <mask>, with a run or an export."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from matmix.launch.loading import Source, load_source
from matmix.launch.sampling import Sampling, text_pieces
from matmix.launch.texts import read_texts
from matmix.model.decoding import decode
from matmix.train.arguments import RunFolder

MASK = "<mask>"
CANDIDATES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample text from a run or an export."""

    source: RunFolder
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; for an encoder, text with <mask> in it. Given several times, all are continued as one batch."""
    prompt_file: str | None = None
    """File with one prompt a line (.txt), or in the field text of each object (.jsonl); they follow those of
    --prompt."""
    max_new_tokens: int = 128
    """Tokens to add."""
    temperature: float = 0.8
    """0 = always the likeliest."""
    top_k: int = 0
    """Draw from the k likeliest only; 0 = all."""
    top_p: float = 0.95
    """Draw from this share of probability."""
    seed: int = 0
    """Seed of the draws."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""
    device: str | None = None
    """Where it runs, such as cpu or cuda; default: the GPU where there is one."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints the text; the exit code."""
        options = dataclasses.asdict(self)
        file = options.pop("prompt_file")
        options["prompt"] = [*self.prompt, *(() if file is None else prompts_of(file))] or ""
        return generate(options.pop("source"), **options)


def prompts_of(file: str) -> list[str]:
    """The lines of a .txt file, or the texts of a .jsonl file, that are not blank.

    Raises ValueError and FileNotFoundError (one line) for a file that cannot be read or has none.
    """
    texts = read_texts([file], text_field="text", text_documents="line", doing="reading")
    prompts = [text for text in texts if text.strip()]
    if not prompts:
        raise ValueError(f"--prompt-file {file} holds no prompt; write one on each line")
    return prompts


def generate(
    source: str | Path,
    *,
    prompt: str | Sequence[str] = "",
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    step: int | None = None,
    device: str | None = None,
    write: Callable[[str], object] | None = None,
) -> int:
    """Print the prompt and its continuation as it comes; for an encoder, the likeliest words for each <mask>.

    Several prompts are continued as one batch. What each one alone gives is then printed below a line that names it.

    Args:
        source: run directory or export directory.
        prompt: text to continue, or several; empty = start as a document starts.
        max_new_tokens, temperature, top_k, top_p, seed: how much is drawn, and how (see `Sampling`).
        step: the checkpoint of a run; default: the newest.
        device: "cpu", "cuda", ...; default: the GPU where there is one.
        write: takes the pieces of output; default: standard output.
    Returns: 0. Raises FileNotFoundError or ValueError (one line).
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    for text in prompts:
        _check_text(text)
    write = write or _write_now
    loaded = load_source(source, step=step, device=device)
    if loaded.model.takes_head:
        raise ValueError(f"{loaded.path} is a {loaded.model.config.architecture}, which writes no text")
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed}
    if len(prompts) == 1 and loaded.model.config.causal:
        write(prompts[0])
        for piece in continue_text(loaded, prompts[0], **options):
            write(piece)
        write("\n")
        return 0
    if loaded.model.config.causal:
        found = continue_texts(loaded, prompts, **options)
        results = [f"{text}{more}\n" for text, more in zip(prompts, found, strict=True)]
    else:
        results = [fill_masks(loaded, text) for text in prompts]
    for number, (text, result) in enumerate(zip(prompts, results, strict=True), 1):
        if len(prompts) > 1:
            shown = textwrap.shorten(text, 60, placeholder=" ...") or "(no prompt)"
            write(f"--- {number} of {len(prompts)}: {shown}\n")
        write(result)
    return 0


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@torch.inference_mode()
def continue_text(
    source: Source, prompt: str, *, max_new_tokens: int, sampling: Sampling, seed: int = 0
) -> Iterator[str]:
    """The continuation of a prompt, piece by piece; ends early where the model ends the document.

    The state is carried from token to token, so a token costs the same however long the text is (but for
    attention layers). Raises ValueError if there is neither a prompt nor a token to start from.
    """
    ids = _prompt_ids(source, prompt)
    tokens = (found[0] for found in _draw_tokens(source, [ids], max_new_tokens, sampling, seed))
    yield from text_pieces(tokens, source.tokenizer.decode, ids)


def continue_texts(
    source: Source, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int = 0
) -> list[str]:
    """The continuations of several prompts, drawn as one batch.

    Each is that of `continue_text` with the same seed, up to rounding. Raises ValueError as there.
    """
    ids = [_prompt_ids(source, prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in ids]
    steps = _draw_tokens(source, ids, max_new_tokens, sampling, seed)
    for found in tqdm(steps, desc="generating", total=max_new_tokens, unit="token", leave=False, disable=None):
        for number, token in found.items():
            tokens[number].append(token)
    decoded = source.tokenizer.decode
    return ["".join(text_pieces(new, decoded, before)) for new, before in zip(tokens, ids, strict=True)]


def _check_text(prompt: str) -> None:
    """Raises ValueError (one line) for a prompt whose bytes on the command line were no UTF-8."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt is not UTF-8 (character {error.start + 1}); convert it, or give it as a file by --prompt-file"
        ) from None


def _prompt_ids(source: Source, prompt: str) -> list[int]:
    ids = source.tokenizer.encode(prompt).ids
    if not ids and source.start is None:
        raise ValueError("this tokenizer has no token that starts a text; give a --prompt")
    return ids or [source.start]


def _draw_tokens(
    source: Source, prompts: list[list[int]], count: int, sampling: Sampling, seed: int
) -> Iterator[dict[int, int]]:
    end, banned = source.special.get("eos"), _banned(source).cpu()
    if end is not None:
        banned[end] = False
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]

    def draw(number: int, logits: torch.Tensor) -> int:
        return sampling.draw(logits.masked_fill(banned, float("-inf")), generators[number])

    try:
        yield from decode(source.model, prompts, draw, max_new_tokens=count, end=end)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def _banned(source: Source) -> torch.Tensor:
    """(vocab_size,) bool: special tokens, and rows of the vocabulary that no token of the tokenizer has."""
    known = source.tokenizer.get_vocab_size()
    banned = torch.arange(source.model.config.vocab_size, device=source.device) >= known
    banned[[index for index in source.special.values() if index is not None]] = True
    return banned


@torch.inference_mode()
def fill_masks(source: Source, prompt: str) -> str:
    """Lines with the likeliest tokens for each <mask> of the prompt, and the prompt with the best ones in."""
    mask = source.special.get("mask")
    if mask is None:
        raise ValueError(f"{source.path} is an encoder, and its tokenizer has no mask token to fill in")
    # Whatever the tokenizer calls its mask, <mask> means it.
    ids = source.tokenizer.encode(prompt.replace(MASK, source.tokenizer.id_to_token(mask))).ids
    places = [place for place, index in enumerate(ids) if index == mask]
    if not places:
        raise ValueError(f"{source.path} is an encoder, which fills in words: put {MASK} where the prompt lacks one")
    select = torch.tensor(places, device=source.device)
    logits = source.model(torch.tensor([ids], device=source.device), select=select)
    probabilities = logits.float().softmax(-1).masked_fill(_banned(source), 0.0)
    lines = []
    for number, row in enumerate(probabilities):
        values, tokens = row.topk(min(CANDIDATES, row.numel()))
        lines.append(f"{MASK} {number + 1} of {len(places)}:")
        lines += [
            f"  {value:6.1%}  {source.tokenizer.decode([token])!r}"
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
        ]
        ids[places[number]] = int(tokens[0])
    return "\n".join([*lines, source.tokenizer.decode(ids), ""])
