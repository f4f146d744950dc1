"""`matmix generate RUN --prompt ...`: continue texts, or fill in their <mask>, with a run or an export."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import textwrap
from collections.abc import Callable, Sequence
from json import dumps
from pathlib import Path

import tyro

from matmix.data.artifacts import check_utf8
from matmix.launch.continuation import Continuation, continue_texts
from matmix.launch.filling import fill_masks
from matmix.launch.loading import Source, load_source
from matmix.launch.sampling import Sampling
from matmix.launch.texts import read_lines, read_texts
from matmix.train.arguments import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample text from a run or an export."""

    source: RunFolder
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; for an encoder, text with <mask> in it. Given several times, all are continued as one batch."""
    prompt_file: str | None = None
    """File with one prompt a line (.txt), or in the field text of each object (.jsonl); - reads lines from standard
    input. They follow those of --prompt."""
    num_samples: int = 1
    """Texts for each prompt; the second is the one that --seed 1 more gives, and so on."""
    batch_size: int = 64
    """Texts that are drawn at once."""
    max_new_tokens: int = 128
    """Tokens to add."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text ends before this string; may be given several times."""
    temperature: float = 0.8
    """0 = always the likeliest."""
    top_k: int = 0
    """Draw from the k likeliest only; 0 = all."""
    top_p: float = 0.95
    """Draw from this share of probability."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print one JSON object a line for each text: prompt, sample, text, tokens, finish_reason, stop, logprob; for an
    encoder prompt, text and masks."""
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
    """The lines of a .txt file or of standard input ("-"), or the texts of a .jsonl file, that are not blank.

    Raises ValueError and FileNotFoundError (one line) for a file that cannot be read or has none.
    """
    if file == "-":
        texts = read_lines(sys.stdin.buffer, "standard input")
    else:
        texts = read_texts([file], text_field="text", text_documents="line", doing="reading")
    prompts = [text for text in texts if text.strip()]
    if not prompts:
        raise ValueError(f"--prompt-file {file} holds no prompt; write one on each line")
    return prompts


def generate(
    source: str | Path,
    *,
    prompt: str | Sequence[str] = "",
    num_samples: int = 1,
    batch_size: int = 64,
    max_new_tokens: int = 128,
    stop: Sequence[str] = (),
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 0,
    json: bool = False,
    step: int | None = None,
    device: str | None = None,
    write: Callable[[str], object] | None = None,
) -> int:
    """Print the prompt and its continuation as it comes; for an encoder, the likeliest words for each <mask>.

    Several texts are drawn as a batch. Each is then printed below a line that names its prompt, and is what it would be
    alone. Standard error says where a text ended at the end token or at a stop string.

    Args:
        source: run directory or export directory.
        prompt: text to continue, or several; empty = start as a document starts.
        num_samples: of each prompt; batch_size: texts that are drawn at once.
        max_new_tokens, stop, temperature, top_k, top_p, seed: how much is drawn, and how (see `Sampling`).
        json: one object a line instead, with the fields of `Continuation`.
        step: the checkpoint of a run; default: the newest.
        device: "cpu", "cuda", ...; default: the GPU where there is one.
        write: takes the pieces of output; default: standard output.
    Returns: 0. Raises FileNotFoundError or ValueError (one line).
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    for name, least, value in (
        ("max_new_tokens", 0, max_new_tokens),
        ("num_samples", 1, num_samples),
        ("batch_size", 1, batch_size),
    ):
        if value < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    if num_samples > 1 and temperature == 0:
        raise ValueError("at temperature 0 all samples of a prompt are the same: leave --num-samples out")
    if not all(stop):
        raise ValueError("--stop is empty; give the string that ends a text")
    for text in prompts:
        check_utf8(text, "--prompt", "convert it, or give it as a file by --prompt-file")
    for text in stop:
        check_utf8(text, "--stop", "convert it")
    write = write or _write_now
    loaded = load_source(source, step=step, device=device)
    if loaded.model.takes_head:
        raise ValueError(f"{loaded.path} is a {loaded.model.config.architecture}, which writes no text")
    if not loaded.model.config.causal:
        if num_samples > 1 or stop:
            raise ValueError(f"{loaded.path} is an encoder, which fills in words: leave --num-samples and --stop out")
        _print_filled(loaded, prompts, json, write)
        return 0
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
    wanted = [(text, sample) for text in prompts for sample in range(num_samples)]
    if len(wanted) == 1 and not json:
        write(prompts[0])
        (one,) = continue_texts(loaded, prompts, seeds=[seed], show=write, **options)
        write("\n")
        _tell_end(one, "")
        return 0
    for begin in range(0, len(wanted), batch_size):
        batch = wanted[begin : begin + batch_size]
        seeds = [seed + sample for _, sample in batch]
        found = continue_texts(loaded, [text for text, _ in batch], seeds=seeds, **options)
        for number, (text, sample), one in zip(itertools.count(begin + 1), batch, found, strict=False):
            if json:
                write(dumps({"prompt": text, "sample": sample, **dataclasses.asdict(one)}, ensure_ascii=False) + "\n")
                continue
            write(f"{_title(number, len(wanted), text)}{text}{one.text}\n")
            _tell_end(one, f"{number} of {len(wanted)} ")
    return 0


def _print_filled(source: Source, prompts: Sequence[str], json: bool, write: Callable[[str], object]) -> None:
    for number, text in enumerate(prompts, 1):
        filled = fill_masks(source, text)
        if json:
            masks = [[{"token": token, "probability": share} for token, share in row] for row in filled.masks]
            write(dumps({"prompt": text, "text": filled.text, "masks": masks}, ensure_ascii=False) + "\n")
        else:
            write(f"{_title(number, len(prompts), text) if len(prompts) > 1 else ''}{filled}")


def _title(number: int, count: int, prompt: str) -> str:
    shown = textwrap.shorten(prompt, 60, placeholder=" ...") or "(no prompt)"
    return f"--- {number} of {count}: {shown}\n"


def _tell_end(one: Continuation, which: str) -> None:
    """Says why a text is shorter than asked for, where the reader of the text alone does not see it."""
    where = {"eos_token": "ended at the end token", "stop_sequence": f"stopped at {one.stop!r}"}.get(one.finish_reason)
    if where is not None:
        print(f"({which}{where}, after {len(one.tokens)} tokens)", file=sys.stderr, flush=True)


def _write_now(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
