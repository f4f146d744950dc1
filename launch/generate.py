"""`matmix generate RUN --prompt ...`: continue texts, or fill in their <mask>, with a run or an export."""

from __future__ import annotations

import dataclasses
import functools
import sys
import textwrap
from collections.abc import Callable, Sequence
from json import dumps
from typing import TYPE_CHECKING, Literal

import tyro

from matmix.data.artifacts import check_utf8
from matmix.launch.evaluate import read_lines, read_texts
from matmix.train.arguments import RunFolder

if TYPE_CHECKING:
    from matmix.use.generation import Continuation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Sample text from a run or an export."""

    source: RunFolder
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; for an encoder, text with <mask> or [MASK] in it. Given several times, all are continued as one
    batch."""
    prompt_file: str | None = None
    """File with one prompt a line (.txt), or in the field text of each object (.jsonl); - reads lines from standard
    input. They follow those of --prompt."""
    num_samples: int = 1
    """Texts for each prompt; the second is the one that --seed 1 more gives, and so on."""
    batch_size: int = 64
    """Texts that are drawn at once."""
    max_new_tokens: int = 128
    """Tokens to add."""
    steps: int = 0
    """For an encoder, best one trained by masked_diffusion: write a text, filling in its gaps in so many looks at it.
    <mask> and [MASK] are gaps of one token, <mask:N> of N, ___ of as many as there are underscores, from three on;
    without any, --max-new-tokens follow the prompt. 0 = show the likeliest words for each <mask> instead."""
    order: Literal["random", "confidence"] = "random"
    """Which masks a look of --steps fills in."""
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
    encoder prompt, text and masks, or with --steps prompt, sample, text and tokens."""
    step: int | None = None
    """Checkpoint to use; default: the newest."""
    device: str | None = None
    """Device to run on, such as cpu or cuda; default: the GPU where there is one."""

    def run(self, rest: Sequence[str], typed: Sequence[str]) -> int:
        """Prints each prompt and its continuation as it comes, for an encoder the likeliest words for each <mask>. Of
        several texts, drawn as a batch, each is printed below a line that names its prompt, and is what it would be
        alone. Standard error says where a text ended at the end token or at a stop string."""
        prompts = [*self.prompt, *(() if self.prompt_file is None else prompts_of(self.prompt_file))] or [""]
        self.print(prompts, functools.partial(print, end="", flush=True))
        return 0

    def print(self, prompts: Sequence[str], write: Callable[[str], object]) -> None:
        """Does what `run` does with prompts that have been read. write: takes the pieces of output."""
        from matmix.use.generation import Sampling, check_writes, fill_masks, generate
        from matmix.use.opening import open_model

        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        self._check(prompts)
        opened = open_model(self.source, step=self.step, device=self.device)
        kind = opened.config.model_class
        wanted = [(prompt, sample) for prompt in prompts for sample in range(self.num_samples)]
        if self.steps:
            from matmix.use.unmasking import unmask

            for number, (prompt, sample) in enumerate(wanted, 1):
                new = {"max_new_tokens": self.max_new_tokens, "seed": self.seed + sample, "sampling": sampling}
                text = unmask(opened, prompt, steps=self.steps, order=self.order, **new)
                if self.json:
                    row = {"prompt": prompt, "sample": sample, **dataclasses.asdict(text)}
                    write(dumps(row, ensure_ascii=False) + "\n")
                else:
                    write(f"{_title(number, len(wanted), prompt) if len(wanted) > 1 else ''}{text.text}\n")
            return
        if kind.inputs == "tokens" and not kind.causal and not kind.takes_head:
            if self.num_samples > 1 or self.stop:
                advice = "leave --num-samples and --stop out, or let it write with --steps"
                raise ValueError(f"{opened.path} is an encoder, which fills in words: {advice}")
            for number, prompt in enumerate(prompts, 1):
                filled = fill_masks(opened, prompt)
                if self.json:
                    masks = [[{"token": token, "probability": share} for token, share in row] for row in filled.masks]
                    write(dumps({"prompt": prompt, "text": filled.text, "masks": masks}, ensure_ascii=False) + "\n")
                else:
                    write(f"{_title(number, len(prompts), prompt) if len(prompts) > 1 else ''}{filled}")
            return
        check_writes(opened)
        options = {"max_new_tokens": self.max_new_tokens, "sampling": sampling, "stop": self.stop}
        if len(wanted) == 1 and not self.json:
            write(prompts[0])
            (text,) = generate(opened, prompts, seeds=[self.seed], show=write, **options)
            write("\n")
            _tell_end(text, "")
            return
        for begin in range(0, len(wanted), self.batch_size):
            batch = wanted[begin : begin + self.batch_size]
            seeds = [self.seed + sample for _, sample in batch]
            texts = generate(opened, [prompt for prompt, _ in batch], seeds=seeds, **options)
            for number, ((prompt, sample), text) in enumerate(zip(batch, texts, strict=True), begin + 1):
                if self.json:
                    row = {"prompt": prompt, "sample": sample, **dataclasses.asdict(text)}
                    write(dumps(row, ensure_ascii=False) + "\n")
                else:
                    write(f"{_title(number, len(wanted), prompt)}{prompt}{text.text}\n")
                    _tell_end(text, f"{number} of {len(wanted)} ")

    def _check(self, prompts: Sequence[str]) -> None:
        """Raises ValueError (one line) for options and texts that cannot be."""
        for name, least in (("max_new_tokens", 0), ("num_samples", 1), ("batch_size", 1), ("steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if not -(2**63) <= self.seed <= 2**64 - self.num_samples:  # what torch takes, with the seeds of all samples
            raise ValueError(f"seed must be a number of at most 64 bits, got {self.seed}")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError("at temperature 0 all samples of a prompt are the same: leave --num-samples out")
        if self.steps and self.stop:
            raise ValueError("--steps fills in all of a text at once, which no --stop can end: leave one of them out")
        if not all(self.stop):
            raise ValueError("--stop is empty; give the string that ends a text")
        for text in prompts:
            check_utf8(text, "--prompt", "convert it, or give it as a file by --prompt-file")
        for text in self.stop:
            check_utf8(text, "--stop", "convert it")


def prompts_of(file: str) -> list[str]:
    """Reads the lines of a .txt file or of standard input ("-"), or the texts of a .jsonl file, that are not blank.
    Raises ValueError and FileNotFoundError (one line) for a file that cannot be read or has none."""
    texts = read_lines(sys.stdin.buffer, "standard input") if file == "-" else read_texts([file], "reading")
    prompts = [text for text in texts if text.strip()]
    if not prompts:
        raise ValueError(f"--prompt-file {file} holds no prompt; write one on each line")
    return prompts


def _title(number: int, count: int, prompt: str) -> str:
    shown = textwrap.shorten(prompt, 60, placeholder=" ...") or "(no prompt)"
    return f"--- {number} of {count}: {shown}\n"


def _tell_end(text: Continuation, which: str) -> None:
    """Says why a text is shorter than asked for, where the reader of the text alone does not see it."""
    ends = {"eos_token": "ended at the end token", "stop_sequence": f"stopped at {text.stop!r}"}
    if text.finish_reason in ends:
        words = f"({which}{ends[text.finish_reason]}, after {len(text.tokens)} tokens)"
        print(words, file=sys.stderr, flush=True)
