"""DNA from a FASTA file to a trained encoder that reads both strands alike."""

import numpy as np
import pytest
from runs import losses, run_recipe

from matmix.data.prepare.command import prepare
from matmix.data.prepare.text import PrepareConfig
from matmix.use.generation import fill_masks
from matmix.use.opening import open_model

COMPLEMENT = str.maketrans("ACGT", "TGCA")
MOTIF = "ACGTTGCCA"


@pytest.mark.slow
def test_dna_is_learned_from_both_strands(tmp_path):
    rng = np.random.default_rng(3)
    chromosomes = ("".join(MOTIF[(begin + i) % 9] for i in range(700)) for begin in rng.integers(0, 9, 12))
    (tmp_path / "a.fa").write_text("".join(f">chr{n}\n{letters}\n" for n, letters in enumerate(chromosomes)))
    (tmp_path / "a.bed").write_text("".join(f"chr{n}\t{n}\t600\n" for n in range(12)))
    inputs, data = (str(tmp_path / "a.fa"),), str(tmp_path / "data")
    options = {"tokenizer": "dna", "max_document_chars": 62, "intervals": str(tmp_path / "a.bed"), "processes": 1}
    prepare(PrepareConfig(inputs=inputs, out=data, validation_fraction=0.2, **options), summary=False)
    options = ["--model.architecture", "strand_encoder", "--data.reverse_complement", "0.5", "--steps", "60"]
    options += [
        "--data.seqlen",
        "64",
        "--data.packing",
        "document",
        "--model.layers",
        "hydra",
        "--schedule.warmup",
        "2",
    ]
    run_recipe("debug_hydra", data, tmp_path / "run", *options)
    assert np.mean(losses(tmp_path / "run")[-3:]) < 0.5 * losses(tmp_path / "run")[0]
    opened = open_model(tmp_path / "run", device="cpu")
    text = MOTIF * 4
    place, turned = 13, text[::-1].translate(COMPLEMENT)
    other = len(text) - 1 - place
    shares, shares_turned = (
        dict(fill_masks(opened, t[:at] + "<mask>" + t[at + 1 :]).masks[0]) for t, at in ((text, place), (turned, other))
    )
    assert shares[text[place]] > 0.5
    for base in "ACGT":
        assert shares[base] == pytest.approx(shares_turned[base.translate(COMPLEMENT)], abs=1e-4)
