"""Text of others, without what a terminal would obey or show in another order."""

import re

_OBEYED = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    # OSC and its like: titles, links, as far as they end on their line
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"  # character sets, resets, and the beginnings of what has no end
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # all other controls of ECMA-48 but newline and tab
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # directions of Unicode
)


def terminal_text(text: str) -> str:
    """Return the text without control characters and sequences; newlines and tabs stay."""
    return _OBEYED.sub("", text)
