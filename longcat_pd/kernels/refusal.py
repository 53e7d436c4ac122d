"""What a table of operators says no to. Whoever builds a rank's model makes a start-up error of it."""

from __future__ import annotations


class Unsupported(Exception):
    """The device, its software or a model's sizes do not fit the operators.

    Args:
        message: what is wrong, with the numbers, and what can be done instead.
        param: path of the culprit in the configuration.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
