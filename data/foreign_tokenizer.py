"""Tokenizers as transformers keeps them: folders of fast and slow ones, and names at the Hugging Face hub.

Each becomes the contents of one tokenizer.json. No code that comes with a folder is run: only classes of transformers
itself read it, those of its fast tokenizers, which read JSON, lists of words and sentencepiece models.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matmix.data.alphabets import ALPHABETS
from matmix.data.artifacts import errors_in_one_line, one_line, panics_as_errors, read_json

CONFIG_NAME = "tokenizer_config.json"
# In the order in which they count less: those of older versions of transformers.
_CONFIGS = (CONFIG_NAME, "special_tokens_map.json")
_VOCABULARIES = ("vocab.txt", "vocab.json")
# What is asked for at the hub: never weights, never pickles.
_FILES = (
    "tokenizer.json",
    *_CONFIGS,
    "added_tokens.json",
    *_VOCABULARIES,
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "config.json",
)
# Members of a tokenizer_config.json that its class is not given: with them, and with names of files, it could be made
# to read files elsewhere.
_LEFT_OUT = ("auto_map", "chat_template", "init_inputs", "name_or_path", "tokenizer_object")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w.-]+)?", re.ASCII)


def is_transformers_folder(folder: Path) -> bool:
    """Returns whether a folder has files by which transformers knows a tokenizer, beside a tokenizer.json."""
    return any((folder / name).is_file() for name in (CONFIG_NAME, *_VOCABULARIES))


def convert(folder: Path) -> bytes:
    """Returns the tokenizer.json of a folder without one, made by the class of transformers that the folder names.
    Raises ValueError (one line) where it names none, one that has no fast form or is not transformers' own, or does not
    hold what the class reads."""
    config = _object(folder / CONFIG_NAME)
    name = _class_name(folder, config)
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    fast = f"{name.removesuffix('Fast')}Fast"
    if fast not in {names[1] for names in TOKENIZER_MAPPING_NAMES.values()}:
        raise ValueError(
            f"{folder} names the tokenizer {one_line(name)}, which has no fast form in transformers (code that comes "
            "with a folder is not run): give a folder with a tokenizer.json"
        )
    marks = _object(folder / _CONFIGS[1])
    kept = {
        CONFIG_NAME: {key: config[key] for key in config if key not in _LEFT_OUT and not key.endswith("_file")},
        _CONFIGS[1]: {key: marks[key] for key in marks if key.endswith(("_token", "_tokens"))},
    }
    kept[CONFIG_NAME]["tokenizer_class"] = fast
    with tempfile.TemporaryDirectory() as scratch:
        for file in (folder / name for name in _FILES if name not in ("config.json", *_CONFIGS)):
            if file.is_file():
                shutil.copyfile(file, Path(scratch, file.name))
        for file, content in kept.items():
            if content:
                Path(scratch, file).write_text(json.dumps(content))
        try:
            with panics_as_errors():
                made = tokenizer_class_from_name(fast).from_pretrained(scratch, local_files_only=True)
                return made.backend_tokenizer.to_str(pretty=True).encode()
        except Exception as error:  # of many kinds, of several libraries
            reason = one_line(f"{type(error).__name__}: {error}".replace(scratch, str(folder)))
            raise ValueError(f"{folder} cannot be read as a {fast} of transformers: {reason}") from error


def _class_name(folder: Path, config: Mapping[str, Any]) -> str:
    model = _object(folder / "config.json")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    if name is None and "model_type" in model:
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

        name = next((one for one in TOKENIZER_MAPPING_NAMES.get(str(model["model_type"]), ()) if one), None)
    if not isinstance(name, str):
        raise ValueError(
            f"{folder} does not say which tokenizer of transformers reads it: add a {CONFIG_NAME} that does, such as "
            '{"tokenizer_class": "BertTokenizer"} or {"tokenizer_class": "GPT2Tokenizer"}'
        )
    return name


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, an empty one where there is no file. Raises ValueError (one line)."""
    if not path.is_file():
        return {}
    if not isinstance(value := read_json(path), dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return value


@errors_in_one_line()
def named_roles(folder: Path) -> dict[str, str]:
    """Returns which tokens a folder of transformers calls its pad, unk, bos, eos, cls, sep and mask token. Raises
    ValueError (one line) for damaged files."""
    roles: dict[str, str] = {}
    for name in _CONFIGS:
        for key, token in _object(folder / name).items():
            content = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(content, str):
                roles.setdefault(key.removesuffix("_token"), content)
    return roles


def with_roles(raw: bytes, known: Mapping[str, int | None], named: Mapping[str, str]) -> bytes:
    """Returns a tokenizer.json that says which roles its tokens have: in the member `roles` of added tokens, which the
    library passes over. It stays as it is where `known`, the ids that its names tell, is what `named` says."""
    if not named:
        return raw
    file = json.loads(raw)
    vocabulary, added = file["model"]["vocab"], file.get("added_tokens") or []
    if not isinstance(vocabulary, dict):
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    roles = {role: name for role, name in named.items() if role in known and name in ids}
    # What text becomes that the vocabulary lacks cannot have another role as well.
    roles = {role: name for role, name in roles.items() if role == "unk" or ids[name] != known["unk"]}
    others = {name for role, name in roles.items() if role != "unk"}
    if roles.get("unk") in others:  # GPT-2's is the end of a text, which stands for nothing unknown
        del roles["unk"]
    new = {role: name for role, name in roles.items() if known[role] != ids[name]}
    if not new:
        return raw
    tokens = {token["content"]: token for token in added}
    for role, name in new.items():
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = tokens.setdefault(name, {"id": ids[name], "content": name, **plain, "special": True})
        token["roles"] = [*token.get("roles", ()), role]
    file["added_tokens"] = sorted(tokens.values(), key=lambda token: token["id"])
    return json.dumps(file, ensure_ascii=False).encode()


def local_or_hub(name: str) -> str | Path:
    """Returns the path or the alphabet that `name` is, or the folder with the tokenizer of that name (NAME or
    NAME@REVISION) from the Hugging Face hub, in the cache of its library. Raises FileNotFoundError (one line) where
    there is none."""
    path = Path(name).expanduser()
    if name in ALPHABETS:
        return name
    if path.exists() or path.suffix in (".json", ".model") or not _HUB_NAME.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES)))
    except HFValidationError:
        return path
    except LocalEntryNotFoundError:
        reason = "the Hugging Face hub cannot be reached, nor is there an earlier download"
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no answer")
        token = "of a private or gated one set HF_TOKEN to a token of an account that may read it"
        reason = f"the Hugging Face hub gives you none of that name ({status}; {token})"
    except OSError as error:
        reason = f"the Hugging Face hub cannot be read ({one_line(error)})"
    raise FileNotFoundError(
        f"tokenizer {name} is no file or folder here, and {reason}: give a sentencepiece .model, a tokenizer.json, or "
        "the folder of a tokenizer"
    )
