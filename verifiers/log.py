"""Logging of the package, for programs that have no logging set up of their own."""

from __future__ import annotations

import logging
import sys

__all__ = ["setup_logging"]


def setup_logging(level: int | str = "INFO", log_format: str | None = None, date_format: str | None = None) -> None:
    """Send the package's log to standard error. Other libraries' loggers and the root logger stay as they are.

    Calling it again replaces what the earlier call set.

    Args:
        level: a level's name or number.
        log_format: as in `logging.Formatter`.
        date_format: as in `logging.Formatter`.

    Raises:
        ValueError: an unknown level.
    """
    logger = logging.getLogger("verifiers")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            log_format or "%(asctime)s %(levelname)s %(name)s: %(message)s", date_format or "%Y-%m-%d %H:%M:%S"
        )
    )
    logger.handlers[:] = [handler]
    # the handler above already prints it; a root handler would print it twice
    logger.propagate = False
