"""Rules of quality that a document meets or not: those of Gopher and of C4, and its language."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from matmix.data.artifacts import from_extra
from matmix.data.prepare.cleaning.words import hashed_words, runs_up_to

_STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
_BULLETS = ("•", "‣", "◦", "●", "▪", "-", "*", "–")
_ELLIPSES = ("...", "…")
# Number of words in a run -> share of the characters that the most frequent run, or repeated ones, may make up.
_TOP_RUNS = {2: 0.20, 3: 0.18, 4: 0.16}
_REPEATED_RUNS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_NO_SENTENCES = ("javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
                 "use cookies")  # fmt: skip
_SENTENCE_ENDS = (".", "!", "?", '"', "”", ".'")
# Characters by which a language is told: more make a document slower and its language hardly surer.
_FOR_LANGUAGE = 4000


def broken_rule_of_gopher(text: str) -> str:
    """Returns the first rule of Gopher (arXiv 2112.11446, appendix A.1.1) that a text breaks, "" for none."""
    words = text.split()
    if not 50 <= len(words) <= 100_000:
        return "number of words"
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return "length of words"
    if max(text.count("#"), sum(map(text.count, _ELLIPSES))) > 0.1 * len(words):
        return "symbols"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "bullets"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "ellipses"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "words without letters"
    if len(_STOP_WORDS & {word.strip('.,;:!?"()') for word in set(text.lower().split())}) < 2:
        return "stop words"
    return _repetition(text, lines, words)


def _repetition(text: str, lines: Sequence[str], words: Sequence[str]) -> str:
    paragraphs = [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    for name, parts in (("lines", lines), ("paragraphs", paragraphs)):
        again = len(parts) - len(set(parts))
        twice = sum(map(len, parts)) - sum(map(len, set(parts)))
        if again > 0.3 * len(parts) or twice > 0.2 * len(text):
            return f"repeated {name}"
    hashes = hashed_words(text)
    # The hashes are those of words without punctuation: as many characters belong to each, on average.
    size = sum(map(len, words)) / max(1, len(hashes)) / len(text)
    every = dict(enumerate(runs_up_to(hashes, max(_REPEATED_RUNS)), start=1))
    for length, most in _TOP_RUNS.items():
        counts = np.unique(every[length], return_counts=True)[1]
        if len(counts) and counts.max() > 1 and counts.max() * length * size > most:
            return f"one run of {length} words"
    for length, most in _REPEATED_RUNS.items():
        is_first = np.zeros(len(every[length]), bool)
        is_first[np.unique(every[length], return_index=True)[1]] = True
        if is_first.all():
            break  # no longer run is repeated, either
        covered = np.zeros(len(hashes) + 1, np.int64)
        np.add.at(covered, np.flatnonzero(~is_first), 1)
        np.add.at(covered, np.flatnonzero(~is_first) + length, -1)
        if np.count_nonzero(np.cumsum(covered)) * size > most:
            return f"repeated runs of {length} words"
    return ""


def sentences_of_c4(text: str) -> str:
    """Returns the lines of a text that C4 keeps (arXiv 1910.10683, section 2.2): three words or more that end as a
    sentence does, and speak neither of JavaScript nor of policies and cookies. Marks of citations go."""
    kept = []
    for line in re.sub(r"\[\d+\]|\[edit\]|\[citation needed\]", "", text).splitlines():
        line, low = line.strip(), line.lower()
        is_sentence = line.endswith(_SENTENCE_ENDS) and not line.endswith(_ELLIPSES) and len(line.split()) >= 3
        if is_sentence and not any(words in low for words in _NO_SENTENCES):
            kept.append(line)
    return "\n".join(kept)


def broken_rule_of_c4(text: str) -> str:
    """Returns the first rule of C4 for pages that a text breaks, "" for none. text: of `sentences_of_c4`. Its list of
    bad words is left out."""
    if "lorem ipsum" in text.lower():
        return "lorem ipsum"
    if "{" in text:
        return "curly brackets"
    return "few sentences" if len(re.findall(r"[.!?]+[\"”')]*(?:\s|$)", text)) < 5 else ""


def language_of(text: str) -> str:
    """Returns the code of the language in which a text is most probably written."""
    return _identifier().classify(text[:_FOR_LANGUAGE])[0]


def check_languages(codes: Sequence[str]) -> None:
    """Raises ValueError (one line) for a code that is not known, and where py3langid is missing."""
    known = _identifier().labels
    for code in codes:
        if code not in known:
            raise ValueError(f"--language {code} is not known; known are {', '.join(sorted(known))}")


@functools.cache
def _identifier() -> Any:
    with from_extra("clean", "--language needs py3langid"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    return LanguageIdentifier.from_model_file(MODEL_FILE)
