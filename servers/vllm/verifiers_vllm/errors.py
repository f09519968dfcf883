"""The error that ends a start: one sentence for the user, and an exit code."""

from __future__ import annotations


class StartError(Exception):
    """The server cannot be started; the message says why and what to do.

    Attributes:
        exit_code: 2 where the command line is wrong, else 1.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
