"""The page on long contexts names the mixers by what they cost, all that take any length and no others."""

import re

from paths import ROOT

from matmix.model.mixers import MIXERS

PAGE = (ROOT / "docs/long-contexts.md").read_text()


def test_mixers_stand_in_the_row_of_their_cost():
    rows = re.findall(r"^\| (O\(.+?\)), any length \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert {cost for cost, _, _ in rows} == {mixer.complexity for mixer in MIXERS.values() if not mixer.fixed_length}
    for cost, causal, both in rows:
        fits = {name: mixer for name, mixer in MIXERS.items() if mixer.complexity == cost and not mixer.fixed_length}
        assert set(re.findall(r"`(\w+)`", causal)) == {name for name, mixer in fits.items() if mixer.causal_form}
        assert set(re.findall(r"`(\w+)`", both)) == {name for name, mixer in fits.items() if mixer.bidirectional_form}
