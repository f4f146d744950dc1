"""Cleaning before pretraining: which documents are left out, for what they say or because others say the same."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from matmix.data.config import Limits


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """What cleaning leaves out."""

    dedup: Literal["none", "exact", "minhash"] = "none"
    """Keep only the first of equal documents (exact), or of similar ones as well (minhash), of the whole input."""
    dedup_similarity: float = 0.6
    """Share of their runs of three words that similar documents have in common (Jaccard's), for --dedup minhash.
    Documents that differ in one word of twenty have about 0.75."""
    language: tuple[str, ...] = ()
    """Keep documents in these languages only: codes of ISO 639-1, such as en."""
    quality: tuple[Literal["gopher", "c4"], ...] = ()
    """Rules that documents must meet: those of Gopher (lengths, symbols, stop words, repetitions) and of C4 (lines that
    are no sentences go, then documents of few sentences)."""
    decontaminate: tuple[str, ...] = ()
    """Files of evaluations, or folders of them, of the kinds that are prepared (.txt, .jsonl, .parquet, ...): leave out
    documents that share a run of 13 words with a text in them."""

    @property
    def cleans(self) -> bool:
        return self.dedup != "none" or bool(self.language or self.quality or self.decontaminate)

    def clean_limits(self) -> Limits:
        is_for_minhash = self.dedup == "minhash" or self.dedup_similarity == CleanOptions.dedup_similarity
        return [
            ("dedup_similarity", 0.5 <= self.dedup_similarity <= 1, "in [0.5, 1]"),
            ("dedup_similarity", is_for_minhash, "left out without --dedup minhash"),
            ("quality", {*self.quality} <= {"gopher", "c4"}, "gopher, c4 or both"),
            ("language", all(self.language), "codes such as en"),
        ]

    def clean_contents(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults; the files of evaluations count by their contents."""
        chosen = {option.name: getattr(self, option.name) for option in fields(CleanOptions)}
        defaults = {option.name: option.default for option in fields(CleanOptions)}
        return {name: v for name, v in chosen.items() if v != defaults[name] and name != "decontaminate"}


CLEANING = tuple(option.name for option in fields(CleanOptions))
"""Names of the options."""
