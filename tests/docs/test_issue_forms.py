"""The forms for issues are valid, and ask for what an answer needs."""

from __future__ import annotations

import pytest
import yaml
from paths import ROOT

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one(path):
    """As a code host checks it: a form that is not valid is not offered to anybody."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "checkboxes")
        assert part["attributes"]["label"]
        assert set(part) <= {"type", "id", "attributes", "validations"}
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_reports_come_with_version_and_settings():
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    for wanted in ("matmix --version", "config.toml", "MATMIX_TRACEBACK=1", "matmix: error:"):
        assert wanted in text
