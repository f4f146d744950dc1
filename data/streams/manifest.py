"""Checks the `manifest.json` of a dataset that is to be read, from wherever its bytes came."""

import json

from matmix.data.manifest import MANIFEST_VERSION, Manifest


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Manifest from the bytes of its file; `where` names the dataset in errors.

    Raises ValueError if it is not JSON, lacks a field, has another version, or names something this
    cannot read.
    """
    try:
        top = json.loads(raw)
        version = top["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} is not a prepared dataset: its manifest.json has no version") from None
    if version != MANIFEST_VERSION:
        raise ValueError(
            f"{where}: its manifest has version {version}, this matmix reads version {MANIFEST_VERSION}; "
            "prepare the data again or use the matmix it was made with"
        )
    try:
        manifest = Manifest.from_dict(top)
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{where}: its manifest.json is damaged ({error}); prepare the data again") from None
    for what, value, readable in (
        ("format", manifest.format, ("mds", "webdataset")),
        ("compression", manifest.compression, ("zstd", None)),
        ("dtype", manifest.dtype, ("uint16", "uint32")),
    ):
        if value not in readable:
            names = ", ".join(str(name) for name in readable)
            raise ValueError(f"{where}: its manifest says {what} {value!r}; readable are {names}")
    return manifest


def _check(manifest: Manifest) -> None:
    # Names are joined to the paths of caches: one that climbs out of them must not pass.
    for part in manifest.tokenizer.file.split("/"):
        _check_name(part)
    for name, split in manifest.splits.items():
        _check_name(name)
        for shard in split.shards:
            _check_name(shard.file)
        for count in ("documents", "tokens"):
            if sum(getattr(shard, count) for shard in split.shards) != getattr(split, count):
                raise ValueError(f"the shards of split {name} do not add up to its {count}")


def _check_name(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ValueError(f"bad file name {name!r}")
