"""The list of deliberate faults is alive: each can be put into the code, a test by day looks for it, and its page shows
both."""

import ast
import sys
from pathlib import Path

from failures import Failures
from paths import ROOT

sys.path.insert(0, str(Path(__file__).parent))

from faults import FAULTS


def test_each_fault_can_be_put_into_the_code_and_is_looked_for_by_day():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    with Failures() as failures:
        for fault in FAULTS:
            with failures.of(fault.name):
                text = (ROOT / fault.file).read_text(encoding="utf-8")
                assert text.count(fault.old) == 1, f"{fault.old!r} is {text.count(fault.old)} times in {fault.file}"
                ast.parse(text.replace(fault.old, fault.new))
                file, _, name = fault.test.partition("::")
                tests = ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
                [test] = [one for one in tests if isinstance(one, ast.FunctionDef) and one.name == name]
                marks = [ast.unparse(decorator) for decorator in test.decorator_list]
                assert "pytest.mark.slow" not in marks, f"{fault.test} does not run by day"


def test_the_page_shows_each_fault_and_the_test_that_finds_it():
    page = (ROOT / "docs/deliberate-faults.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert rows == [f"| {fault.name} | `{fault.file}` | `{fault.test}` |" for fault in FAULTS]
