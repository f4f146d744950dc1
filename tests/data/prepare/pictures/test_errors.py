"""What a user can mend in a source of pictures: one line that names it, and no folder left behind."""

import json

import pyarrow
import pytest
from failures import each
from pictures import encoded, pixels, prepare, samples, write_tar, write_tree
from pyarrow import parquet

from matmix.data.manifest import Manifest

PNG = encoded(pixels(0))


def missing_label(folder):
    return write_tar(folder / "a.tar", [("1.png", PNG), ("1.cls", b"0"), ("2.png", PNG)])


def missing_picture(folder):
    return write_tar(folder / "a.tar", [("1.png", PNG), ("1.cls", b"0"), ("2.cls", b"1")])


def cut_tar(folder):
    path = write_tar(folder / "a.tar", [("1.cls", b"0"), ("1.png", encoded(pixels(0, 80, 80)))])
    path.write_bytes(path.read_bytes()[:3000])
    return path


def no_tar(folder):
    (folder / "a.tar").write_bytes(b"no tar at all" * 100)
    return folder / "a.tar"


def empty_class(folder):
    write_tree(folder / "tree", samples(1))
    (folder / "tree" / "newt").mkdir()
    return folder / "tree"


def no_classes(folder):
    (folder / "flat").mkdir()
    (folder / "flat" / "a.png").write_bytes(PNG)
    return folder / "flat"


def label_out_of_range(folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    members = [("1.png", PNG), ("1.cls", b"0"), ("2.png", PNG), ("2.cls", b"7")]
    return write_tar(folder / "a.tar", members), {"classes": str(folder / "classes.txt")}


def one_name_twice(folder):
    return write_tar(folder / "a.tar", [("1.png", PNG), ("1.cls", b"0"), ("1.png", PNG), ("1.cls", b"1")])


def dots_in_all_names(folder):
    return write_tar(folder / "a.tar", [("cat.1.png", PNG), ("cat.1.cls", b"0")])


def dots_in_some_names(folder):
    return write_tar(folder / "a.tar", [("1.png", PNG), ("1.cls", b"0"), ("1.b.png", PNG), ("1.b.json", b"1")])


def negative_label(folder):
    table = pyarrow.table({"image": [PNG, PNG], "label": [0, -1]})
    parquet.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def unknown_class(folder):
    (folder / "classes.txt").write_text("cat\ndog\n")
    return write_tree(folder / "tree", samples(1)), {"classes": str(folder / "classes.txt")}


def other_column(folder):
    parquet.write_table(pyarrow.table({"img": [PNG], "label": [0]}), folder / "a.parquet")
    return folder / "a.parquet"


def no_parquet(folder):
    (folder / "a.parquet").write_bytes(b"PAR1 or not")
    return folder / "a.parquet"


def member_not_in_tar(folder):
    (folder / "labels.json").write_text(json.dumps({"1.png": 0, "2.png": 1}))
    return write_tar(folder / "a.tar", [("1.png", PNG)]), {"labels": str(folder / "labels.json")}


def table_outside(folder):
    (folder / "labels.csv").write_text("image,label\n../../etc/passwd,0\n")
    (folder / "flat").mkdir()
    return folder / "flat", {"labels": str(folder / "labels.csv")}


def table_without_column(folder):
    (folder / "labels.csv").write_text("file,label\na.png,0\n")
    (folder / "flat").mkdir()
    return folder / "flat", {"labels": str(folder / "labels.csv")}


def no_such_folder(folder):
    return folder / "nowhere"


CASES = {
    missing_label: "sample 2 has no member with the label",
    missing_picture: "sample 2 has no member with the picture",
    cut_tar: "damaged, truncated",
    no_tar: "no uncompressed .tar file",
    empty_class: "class folder .*newt is empty",
    no_classes: "--labels",
    one_name_twice: r"a\.tar holds 1\.png twice",
    dots_in_all_names: r"cat\.1\.png .*no dots",
    dots_in_some_names: r"1\.b\.png .*no dots",
    label_out_of_range: r"a\.tar: 2: label 7 is out of range: .*classes 0 to 1",
    negative_label: "label -1",
    unknown_class: "'owl' is no class of .*classes.txt",
    other_column: "no column 'image' .*img, label",
    no_parquet: "damaged, or no .parquet file",
    member_not_in_tar: r"lacks the member 2\.png",
    table_outside: "climbs",
    table_without_column: "no 'image' .*--image-field",
    no_such_folder: "nowhere does not exist",
}


@each("make", CASES)
def test_one_line(tmp_path, make):
    made = make(tmp_path)
    source, options = made if isinstance(made, tuple) else (made, {})
    with pytest.raises((ValueError, FileNotFoundError), match=CASES[make]) as error:
        prepare(source, tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_further_pictures_of_a_sample_are_passed_over(tmp_path):
    members = [("1.png", PNG), ("1.cls", b"0"), ("1.depth.png", PNG), ("2.png", PNG), ("2.cls", b"1")]
    out = prepare(write_tar(tmp_path / "a.tar", members), tmp_path / "out")
    assert Manifest.load(out).splits["train"].documents == 2


def test_a_set_that_no_package_has(tmp_path):
    with pytest.raises(ValueError, match="known: sklearn:digits"):
        prepare("sklearn:faces", tmp_path / "out")


def test_a_missing_file_of_a_table_counts_as_corrupt(tmp_path):
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.png").write_bytes(PNG)
    (tmp_path / "labels.csv").write_text("image,label\n1.png,0\n2.png,1\n")
    with pytest.raises(ValueError, match=r"1 of 2 pictures are corrupt .*2\.png: the file is missing"):
        prepare(tmp_path / "flat", tmp_path / "out", labels=str(tmp_path / "labels.csv"))
