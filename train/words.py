"""Formats numbers and durations for people."""


def short_number(value: float) -> str:
    """Writes 1234567 as "1.23M"."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or unit == "T":
            return f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Writes a duration as in 12 ms, 1.5 s, 45 s, 12 min, 1.9 h, 2.3 days; what is negative counts as nothing."""
    if seconds <= 0:
        return "0 s"
    sizes = {"days": 86400, "h": 3600, "min": 60, "s": 1}
    unit = next((unit for unit, size in sizes.items() if seconds >= size), "ms")
    value = seconds / sizes.get(unit, 1e-3)
    return f"{value:.2g} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
