"""The markers that a LongCat model writes into its text, and holding back what may become one.

Owns their spelling. What they mean is ``reasoning.py`` and ``tool_calls.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

THINK_OPEN = "<longcat_think>"
THINK_CLOSE = "</longcat_think>"
CALL_OPEN = "<longcat_tool_call>"
CALL_CLOSE = "</longcat_tool_call>"
KEY_OPEN = "<longcat_arg_key>"
KEY_CLOSE = "</longcat_arg_key>"
VALUE_OPEN = "<longcat_arg_value>"
VALUE_CLOSE = "</longcat_arg_value>"

MARKERS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)
ROLE_TOKENS = (
    "<longcat_system>",
    "<longcat_user>",
    "<longcat_assistant>",
    "<longcat_observation>",
    "<longcat_files>",
)


def open_tail(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning, but not the whole, of a marker."""
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
