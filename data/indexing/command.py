"""Describes files of tokens that were made elsewhere, so that they are read where they lie.

    matmix index DIR --format megatron --tokenizer tokenizer.json

Nothing is copied: DIR gets a manifest as of a prepared dataset, whose shards are stretches of the files there, a copy
of the tokenizer, and for each split where its documents begin (`starts.npy`) and how long they are (`lengths.npy`).
`.index.json`, which is written before them, lists them, so that no file of somebody else is ever overwritten.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matmix.data.arrays import write_vector
from matmix.data.artifacts import artifact_path, fits, read_json, shell_line
from matmix.data.foreign_tokenizer import local_or_hub
from matmix.data.formats import READ_ONLY
from matmix.data.indexing import LAYOUTS
from matmix.data.indexing.base import Layout
from matmix.data.indexing.stretches import Found, SplitOfFiles, read_files
from matmix.data.manifest import MANIFEST_NAME, Manifest
from matmix.data.prepare.base import SPLITS
from matmix.data.prepare.text.preparation import HISTOGRAM_NAME, write_counts
from matmix.data.storage.files import sha256_of, write_atomic
from matmix.data.storage.remote import is_url, refuse_secrets
from matmix.data.tokenizer import Tokenizer

_RECORD = ".index.json"
_TOKENIZERS = ("tokenizer/tokenizer.model", "tokenizer/tokenizer.json")
_VECTORS = ("lengths.npy", "starts.npy")
_FRACTION = 0.01
_END_BYTES = 1 << 16


def index(
    folder: str,
    *,
    format: str,
    tokenizer: str,
    end: str = "eos",
    dtype: str = "",
    validation: str = "",
    validation_fraction: float | None = None,
    out: str = "",
) -> Manifest:
    """Writes the manifest of the files in a folder, and says on stdout what it holds. Arguments: as the fields of
    `matmix index`. Raises FileNotFoundError and ValueError (one line) for files that are damaged or do not fit."""
    for option, value in (("DIR", folder), ("tokenizer", tokenizer), ("validation", validation), ("out", out)):
        refuse_secrets(value, f"index: {option}")
    root = _folder(folder)
    home = _home(out, root)
    if format not in LAYOUTS:
        raise ValueError(f"index: format must be one of {', '.join(LAYOUTS)}, got {format!r}")
    if not tokenizer:
        raise ValueError("index: no --tokenizer is given: name the one that made the tokens")
    if validation and validation_fraction is not None:
        raise ValueError("index: --validation and --validation-fraction are both given: keep one of them")
    fraction = _FRACTION if validation_fraction is None and not validation else validation_fraction or 0.0
    if not 0 <= fraction < 1:
        raise ValueError(f"index: validation-fraction must be in [0, 1), got {fraction}")
    words = Tokenizer.load(local_or_hub(tokenizer))
    layout = LAYOUTS[format](end=_end_id(end, words), dtype=dtype, vocab_size=words.vocab_size)
    known = _earlier(home)
    paths = _find_files(root, layout, [home / name for name in {*_own_files(home), *(known.files if known else ())}])
    held_out = {path for path in paths if validation and _matches(path.relative_to(root).as_posix(), validation)}
    if validation and not held_out:
        raise FileNotFoundError(f"no file of tokens in {root} matches the --validation pattern {validation}")
    names = dict.fromkeys(name for path in paths for name in layout.files(path))  # an index may be that of many files
    inputs = [(name, name.stat().st_size, _digest(name)) for name in names]
    wanted = {
        "layout": format,
        "end": layout.end,
        "dtype": dtype,
        "validation": validation,
        "validation_fraction": fraction,
        "tokenizer": words.sha256,
        "inputs": [[path.relative_to(root).as_posix(), size, digest] for path, size, digest in inputs],
    }
    elsewhere = None if home == root else str(root.resolve())
    if known is None:
        manifest = _index(root, home, layout, paths, held_out, words, wanted)
    elif (known.options, known.folder) == (wanted, elsewhere):
        manifest = known
    else:
        raise ValueError(
            f"{home} holds the manifest of another dataset, or of these files before they were changed; delete "
            f"{home / MANIFEST_NAME} to index them anew"
        )
    when = "now" if known is None else "earlier, with the same files and options: nothing to do"
    _summarise(root, home, manifest, when)
    return manifest


def _folder(folder: str) -> Path:
    if not folder:
        raise ValueError("no folder given: matmix index DIR --format FORMAT --tokenizer FILE")
    if is_url(folder):
        raise ValueError(f"index: tokens are read where they lie, in a folder of this machine, not at {folder}")
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder")
    return root


def _home(out: str, root: Path) -> Path:
    """Returns the folder that the index lies in."""
    if is_url(out):
        raise ValueError(f"index: an index lies in a folder of this machine, not at {out}")
    home = Path(out).expanduser() if out else root
    if home.exists() and not home.is_dir():
        raise ValueError(f"index: {home} of --out is no folder")
    return root if home.resolve() == root.resolve() else home


def _earlier(home: Path) -> Manifest | None:
    """Returns the manifest of an earlier index; None where there is none. Raises ValueError (one line) for another."""
    if not (home / MANIFEST_NAME).exists():
        return None
    try:
        manifest = Manifest.load(home)
    except ValueError as error:
        raise ValueError(f"{home / MANIFEST_NAME} is in the way of an index: {error}") from None
    if manifest.format not in READ_ONLY:
        raise ValueError(f"{home} holds a prepared dataset, which needs no index: data.path reads it as it is")
    return manifest


def _files(splits: Iterable[str]) -> list[str]:
    """Returns the files of an index of these splits, without the manifest and the tokenizer."""
    return [HISTOGRAM_NAME, *(f"{split}/{vector}" for split in splits for vector in _VECTORS)]


def _own_files(home: Path) -> set[str]:
    """Returns the files in a folder that an index, finished or not, has made. Raises ValueError (one line)."""
    names = read_json(home / _RECORD) if (home / _RECORD).is_file() else []
    return {*_files(SPLITS), *_TOKENIZERS}.intersection(names if fits(names, [str]) else ())


def _refuse_others(home: Path, names: Iterable[str], tokenizer: Tokenizer) -> None:
    """Raises ValueError (one line) where a file of an index, or another tokenizer, lies there and is somebody else's.
    The same tokenizer may."""
    own = _own_files(home)
    for name in (*names, *_TOKENIZERS):
        path = artifact_path(home, name, "the index", nested=True)
        found = path.parent if path.parent.exists() and not path.parent.is_dir() else path
        same = name in _TOKENIZERS and path.is_file() and path.read_bytes() == tokenizer.raw
        if name not in own and found.exists() and not same:
            raise ValueError(
                f"{found} was not made by `matmix index`, which has a file of that name: move it, or name another "
                "folder for the index with --out"
            )


def _end_id(end: str, tokenizer: Tokenizer) -> int | None:
    """Returns the id of --end: none, an id, or the role of a special token."""
    if end == "none":
        return None
    index = int(end) if end.isdecimal() else tokenizer.special.get(end)
    if index is None:
        known = ", ".join(name for name, value in tokenizer.special.items() if value is not None)
        raise ValueError(f"index: the tokenizer has no end token {end!r}: give --end an id, none, or one of {known}")
    if index >= tokenizer.vocab_size:
        raise ValueError(
            f"index: the id {index} of --end is outside of the {tokenizer.vocab_size:,} ids of {tokenizer.path}"
        )
    return index


def _find_files(root: Path, layout: Layout, own: Iterable[Path]) -> list[Path]:
    """Returns the files of tokens, sorted. own: files of an index, which are none."""
    ours = {path.resolve() for path in own}
    found = [path for path in sorted(root.rglob("*")) if path.suffix in layout.suffixes and path.is_file()]
    found = [path for path in found if path.resolve() not in ours]
    if not found:
        packed = next((path for path in root.rglob("*.mds.*")), None) if ".mds" in layout.suffixes else None
        hint = f"; {packed.name} is compressed: decompress such files first" if packed else ""
        raise FileNotFoundError(f"{root} holds no {' or '.join(layout.suffixes)} file{hint}")
    # Refuses what no manifest could name, and links, which may lead elsewhere.
    return [artifact_path(root, path.relative_to(root).as_posix(), root, nested=True) for path in found]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def _digest(path: Path) -> str:
    """Returns a digest of both ends of a file, which tells versions of it apart."""
    ends = sha256_of(path, 0, _END_BYTES), sha256_of(path, max(0, path.stat().st_size - _END_BYTES), _END_BYTES)
    return hashlib.sha256("".join(ends).encode()).hexdigest()


def _index(
    root: Path,
    home: Path,
    layout: Layout,
    paths: Sequence[Path],
    held_out: set[Path],
    tokenizer: Tokenizer,
    wanted: dict[str, Any],
) -> Manifest:
    """Reads all files once, and writes the index. held_out: files of the validation split alone."""
    place = next(path for path in (home, *home.resolve().parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise ValueError(f"{place} cannot be written to: name another folder for the index with --out")
    fraction = wanted["validation_fraction"]
    names = ["train"] * (len(held_out) < len(paths)) + ["validation"] * bool(fraction or held_out)
    _refuse_others(home, _files(names), tokenizer)
    found = read_files(root, layout, paths, tokenizer, names, held_out, fraction)
    total = sum(found.documents.values())
    if not total:
        raise ValueError(f"there is no document in the {len(paths)} files of {root}")
    for name, split in found.splits.items():
        if not split.shards:
            hint = f" at a validation fraction of {fraction:g}; give another, 0 for none" if fraction else ""
            raise ValueError(f"the {name} split got none of the {total:,} documents{hint}")
    return _write(root, home, tokenizer, found, wanted)


def _write(
    root: Path,
    home: Path,
    tokenizer: Tokenizer,
    found: Found,
    wanted: dict[str, Any],
) -> Manifest:
    """Writes the files of the index, the manifest last."""
    splits, documents = found.splits, found.documents
    home.mkdir(parents=True, exist_ok=True)
    own, files, copy = _own_files(home), _files(splits), f"tokenizer/{tokenizer.file_name}"
    made = {*files, copy} if copy in own or not (home / copy).exists() else {*files}
    write_atomic(home / _RECORD, json.dumps(sorted(own | made)))
    for name in own - made:  # of an index of other splits, or with another tokenizer
        (home / name).unlink(missing_ok=True)
    if copy in made:
        tokenizer.save(home / "tokenizer")
    train = splits.get("train", SplitOfFiles.empty(tokenizer.vocab_size))
    facts = write_counts(home, tokenizer, train.counts)
    infos = {name: split.info() for name, split in splits.items()}
    for name, split in splits.items():
        (home / name).mkdir(exist_ok=True)
        for vector, kind, pieces in zip(_VECTORS, ("<u4", "<i8"), (split.lengths, split.starts), strict=True):
            write_vector(
                home / name / vector, kind, infos[name].documents, (one.astype(kind).tobytes() for one in pieces)
            )
    manifest = Manifest(
        format="in_place",
        compression=None,
        dtype=found.dtype.name,
        splits=infos,
        sources=tuple(
            {"path": name, "bytes": size, "digest": digest, "documents": documents.get(name, 0)}
            for name, size, digest in wanted["inputs"]
        ),
        malformed={"count": 0, "records": sum(documents.values()) + found.empty, "examples": []},
        empty_documents=found.empty,
        options=wanted,
        files={name: sha256_of(home / name) for name in files},
        folder=None if home == root else str(root.resolve()),
        **facts,
    )
    write_atomic(home / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def _summarise(root: Path, home: Path, manifest: Manifest, when: str) -> None:
    lines = [f"indexed {root} ({manifest.options['layout']}, {manifest.dtype}) {when}; no token was copied"]
    for name, split in manifest.splits.items():
        lines.append(f"  {name:<11} {split.documents:,} documents, {split.tokens:,} tokens")
    info, most = manifest.tokenizer, max(manifest.splits.values(), key=lambda split: split.tokens)
    rate = f"{most.bytes / max(1, most.tokens):.2f} bytes a token"
    lines.append(f"  tokenizer   {info.kind}, {info.vocab_size:,} ids, {rate}")
    if manifest.empty_documents:
        lines.append(f"  empty       {manifest.empty_documents:,} documents without tokens were left out")
    print(*lines, f"next: {shell_line('matmix', 'train', 'RECIPE.toml', '--data.path', home)}", sep="\n", flush=True)
