"""Logging of the package."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from verifiers.utils.logging_utils import setup_logging


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    logger = logging.getLogger("verifiers")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield
    logger.setLevel(before[0])
    logger.handlers[:], logger.propagate = before[1], before[2]


def test_only_the_logger_of_the_package_is_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    setup_logging("debug")
    setup_logging("INFO", log_format="%(levelname)s %(message)s")
    logging.getLogger("verifiers.envs").info("shown once")
    logging.getLogger("verifiers.envs").debug("not shown")
    assert capsys.readouterr().err == "INFO shown once\n"
    assert (root.level, list(root.handlers)) == before


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        setup_logging("loud")
