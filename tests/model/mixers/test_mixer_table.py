"""The tables of docs/mixers.md say of every registered mixer what its class says."""

from paths import ROOT

from matmix.model.mixers import MIXERS

PAGE = ROOT / "docs/mixers.md"


def test_the_page_has_every_mixer_with_its_facts():
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    found = {row[0].strip(" `"): tuple(row[2:-1]) for row in rows if len(row) == 7}
    forms = {(True, True): "both", (True, False): "causal", (False, True): "bidirectional"}
    assert found == {
        name: (
            forms[mixer.causal_form, mixer.bidirectional_form],
            "data" if mixer.data_dependent else "parameters",
            "fixed" if mixer.fixed_length else "any",
            mixer.complexity,
        )
        for name, mixer in MIXERS.items()
    }
