"""Checks of a run's settings with its host: the output directory, and the packages to report to."""

from __future__ import annotations

import difflib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.errors import ConfigError
from verifiers.train.validation.process_settings import refuse_short_ddp_timeout

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["check_output_dir", "check_report_to", "check_start"]

# transformers cannot tell whether these are installed
_UNKNOWN_TO_TRANSFORMERS = ("azure_ml", "flyte")


def check_start(config: GRPOConfig) -> None:
    """Refuse settings that would end a run after its server was started; leaves nothing behind.

    Raises:
        ConfigError: with the setting that is to be changed.
    """
    check_output_dir(str(config.output_dir))
    check_report_to(config.report_to)
    refuse_short_ddp_timeout(config, config.world_size)


def check_output_dir(output_dir: str) -> None:
    """Refuse a directory that cannot be made or written to."""
    there = Path(output_dir).absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        # permissions do not tell: file systems may be full, read-only, or no place for files
        os.rmdir(tempfile.mkdtemp(prefix=".verifiers-", dir=there))
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir!r} cannot be written to: {error.strerror or error} in {str(there)!r}; give a "
            "directory that can."
        ) from error


def check_report_to(names: list[str]) -> None:
    """Refuse logging integrations that transformers does not know, and those whose package is missing."""
    if not names:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            nearest = difflib.get_close_matches(str(name), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(INTEGRATION_TO_CALLBACK)}."
            raise ConfigError(f"report_to has {name!r}, which transformers cannot report to; {hint}")
    missing = sorted({*names} - {*get_available_reporting_integrations(), *_UNKNOWN_TO_TRANSFORMERS})
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"report_to has {', '.join(map(repr, missing))}, whose package is not installed; run: pip install "
            f"{packages}; or leave it out."
        )
