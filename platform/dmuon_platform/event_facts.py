"""Facts out of the events of a journal, of which a damaged one may have lost some."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def number(content: Content | None, key: str) -> float | None:
    """Return a number in plain data, None where there is none or one beyond all of float64."""
    value = None if content is None else content.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return value


def finite(content: Content | None, key: str) -> float | None:
    """Return a number in plain data that is neither infinite nor NaN, None where there is none."""
    value = number(content, key)
    return value if value is not None and math.isfinite(value) else None


def whole(content: Content | None, key: str) -> int | None:
    """Return a number in plain data without its fraction, None where there is none."""
    value = number(content, key)
    return int(value) if value is not None and math.isfinite(value) else None


def clock(unix_time: float | None) -> str:
    """Return a time as people read it, here; ``?`` for what is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time or math.nan))
    except (ValueError, OverflowError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units."""
    if not math.isfinite(seconds):
        return "?"
    s = max(0, round(seconds))
    if s < HOUR_S:
        return f"{s} s" if s < MINUTE_S else f"{s // MINUTE_S} min {s % MINUTE_S} s"
    if s < DAY_S:
        return f"{s // HOUR_S} h {s % HOUR_S // MINUTE_S} min"
    return f"{s // DAY_S} d {s % DAY_S // HOUR_S} h"


def last(events: Sequence[Content], *kinds: str) -> Content | None:
    """Return the newest event of some kinds, None without one."""
    return next((event for event in reversed(events) if event["kind"] in kinds), None)
