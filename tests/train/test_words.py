"""Numbers and durations as a person says them."""

from matmix.train.words import duration, short_number


def test_numbers_are_short():
    assert [short_number(n) for n in (0.5, 999, 1234567, 3.2e9)] == ["0.5", "999", "1.23M", "3.2G"]


def test_durations_are_short():
    assert [duration(s) for s in (-3, 0, 0.0123, 1.5, 5)] == ["0 s", "0 s", "12 ms", "1.5 s", "5 s"]
    assert [duration(s) for s in (45.3, 90, 7000, 200_000, 1.3e6)] == [
        "45 s",
        "1.5 min",
        "1.9 h",
        "2.3 days",
        "15 days",
    ]
