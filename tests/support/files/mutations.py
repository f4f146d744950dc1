"""Valid files, changed as damage and malice change them: hypothesis draws how."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_TELLING = [0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("["), ord("{"), ord("-"), ord("9"), ord("\n")]


@st.composite
def _change(draw: st.DrawFn, raw: bytes) -> bytes:
    if not raw:
        return draw(st.binary(max_size=20))
    begin = draw(st.integers(0, len(raw) - 1))
    end = min(len(raw), begin + draw(st.sampled_from([1, 1, 2, 4, 8, 100, len(raw)])))
    kind = draw(st.sampled_from(["flip", "set", "insert", "delete", "splice", "repeat", "cut"]))
    if kind == "flip":
        return raw[:begin] + bytes([raw[begin] ^ (1 << draw(st.integers(0, 7)))]) + raw[begin + 1 :]
    if kind == "set":
        value = draw(st.sampled_from(_TELLING))
        return raw[:begin] + bytes([value]) * (end - begin) + raw[end:]
    if kind == "insert":
        return raw[:begin] + draw(st.binary(min_size=1, max_size=20)) + raw[begin:]
    if kind == "delete":
        return raw[:begin] + raw[end:]
    if kind == "cut":
        return raw[:begin]
    if kind == "repeat":
        return raw[:end] + raw[begin:end] * draw(st.sampled_from([1, 3, 100])) + raw[end:]
    other = draw(st.integers(0, len(raw) - 1))
    return raw[:begin] + raw[other : other + end - begin] + raw[end:]


@st.composite
def mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    """`raw` after one to four changes."""
    for _ in range(draw(st.integers(1, 4))):
        raw = draw(_change(raw))
    return raw


_WORDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "../x", "/etc/x", "a\nb", "\x1b[2J", "\ud800", "x" * 300, "0", "-1", "None"]),
    st.just([]),
    st.just({}),
    st.just([[[[]]]]),
)


@st.composite
def mutated_json(draw: st.DrawFn, value: object) -> object:
    """`value` of JSON with one to three of its parts, at any depth, replaced, removed or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value)
    return value


def _changed(draw: st.DrawFn, value: object) -> object:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 9)) == 0:
        return draw(_WORDS)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, copy = draw(st.sampled_from(keys)), value.copy()
    kind = draw(st.sampled_from(["inside", "inside", "inside", "inside", "remove", "add"]))
    if kind == "inside":
        copy[key] = _changed(draw, copy[key])
    elif kind == "remove":
        del copy[key]
    elif isinstance(copy, dict):
        copy[draw(st.sampled_from(["x", "../x", "", "\n"]))] = copy[key]
    else:
        copy.append(copy[key])
    return copy


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Settings of a fuzzing test: so many examples, times MATMIX_FUZZ (1; the nightly run sets more). Files are made
    for each example, so the fixtures may be shared."""
    times = float(os.environ.get("MATMIX_FUZZ", "1"))
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    # Making a failure smaller takes longer than finding it.
    return settings(
        max_examples=max(1, int(examples * times)),
        suppress_health_check=shared,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


def works_or_is_one_line(use: Callable[[], Any]) -> Any:
    """What `use` gives, or None where it raises what users see as one line. Lets every other error through."""
    try:
        return use()
    except (ValueError, OSError) as error:
        text = str(error)
        if "\n" in text or "\x1b" in text:
            raise AssertionError(f"not one line: {text!r}") from error
        return None
