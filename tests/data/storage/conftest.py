"""Nothing here waits between the attempts of a real retry."""

import pytest
import tenacity


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(tenacity, "wait_exponential_jitter", lambda **_: tenacity.wait_fixed(0.01))
