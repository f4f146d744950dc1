"""Runs Python snippets of pages, those of one page after each other in one namespace; nothing of matmix.

    python -I -S run_snippets.py PAGES.json [SITE]

PAGES.json: [{"name", "folder": where it runs, "snippets": [{"line", "code"}]}]. SITE is put on the import path, and
then matmix must not be there. Prints one line for each page, "name: ok" or what went wrong, and versions at the end.
Models that a page has loaded are used, with the tokenizer or the processor beside them.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

if len(sys.argv) > 2:
    # Of a Python with libraries of its own, only matmix is kept away.
    if sys.argv[2] != "none":
        sys.path.insert(0, sys.argv[2])
    sys.modules |= dict.fromkeys(("matmix", "sentencepiece"))
    assert importlib.util.find_spec("matmix") is None

import torch
import transformers


def use(namespace: dict) -> None:
    """The model that a page has loaded takes what its tokenizer gives."""
    model, tokenizer = namespace.get("model"), namespace.get("tokenizer")
    if tokenizer is None or not isinstance(model, transformers.PreTrainedModel):
        return
    assert not model.training
    batch = tokenizer(["one two three", "kings"], padding=True, return_tensors="pt")
    if type(model).__name__ == "MatmixForMultipleChoice":
        batch = {name: tensor[None] for name, tensor in batch.items()}
    with torch.no_grad():
        outputs = model(**batch).to_tuple()
    assert all(torch.isfinite(output).all() for output in outputs if isinstance(output, torch.Tensor))


def run(page: dict) -> None:
    os.chdir(page["folder"])
    module = types.ModuleType(f"page_{abs(hash(page['name']))}")
    sys.modules[module.__name__] = module
    for snippet in page["snippets"]:
        code = "\n" * (snippet["line"] - 1) + snippet["code"]
        exec(compile(code, page["name"], "exec"), module.__dict__)
        use(module.__dict__)


def main(pages: list[dict]) -> int:
    transformers.logging.set_verbosity_error()
    failed = 0
    for page in pages:
        try:
            run(page)
            print(f"{page['name']}: ok", flush=True)
        except Exception as error:
            failed += 1
            at = error.__traceback__
            while at.tb_next is not None and at.tb_frame.f_code.co_filename != page["name"]:
                at = at.tb_next
            print(f"{page['name']}:{at.tb_lineno}: {type(error).__name__}: {error}", flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
