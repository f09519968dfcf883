"""report.html: a training run in one file that needs nothing else, made of what its directory holds.

Three locks against what models write: every text is escaped; the script only sets texts and hides elements; and the
content security policy names the hashes of the one style and the one script, so that nothing else runs or loads.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
from importlib.resources import files
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.evals.hiding import Hider, secrets_of_run
from verifiers.evals.viewer.page import style_text
from verifiers.evals.viewer.writing import write_page
from verifiers.train.watching.curves import curve_sections
from verifiers.train.watching.history import read_history
from verifiers.train.watching.record import METRICS, RUN, read_run
from verifiers.train.watching.sections import (
    failures_section,
    header,
    plan_section,
    time_section,
    verdict_of,
    verdict_section,
)
from verifiers.train.watching.transcripts import samples_section

__all__ = ["is_training_run", "report_text", "write_training_report"]


def is_training_run(directory: str | Path) -> bool:
    """True for a directory that a training run has left its record in."""
    return (Path(directory) / RUN).is_file() and (Path(directory) / METRICS).is_file()


def write_training_report(run_dir: str | Path, out: Path | None = None) -> Path:
    """Write the page that shows a training run: its numbers, curves, and rollouts to read.

    The file is replaced in one step: readers see it as it was before, or whole.

    Args:
        run_dir: the run's `output_dir`; the run may still go on.
        out: the file to write; report.html in `run_dir` when left out.

    Returns:
        The path written to.

    Raises:
        ConfigError: the directory holds no record of a training run.
        OSError: the file cannot be written.
    """
    directory = Path(run_dir)
    if not (directory / RUN).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RUN}; give the output_dir of a training run.")
    target = Path(out) if out is not None else directory / "report.html"
    # what came from elsewhere, such as a stored evaluation, may hold a key of this environment
    text = Hider(secrets_of_run("", "", {}))(report_text(directory))
    # here they stand in HTML
    return write_page(target, text, surrogates="replace")


def report_text(directory: Path) -> str:
    """The page of `write_training_report`."""
    run, history = read_run(directory), read_history(directory)
    name = " / ".join(str(run[key]) for key in ("env", "model") if run.get(key)) or directory.name
    verdict = verdict_of(run, history.time)
    parts = [
        header(run, history, name),
        verdict_section(verdict, history.time),
        curve_sections(run, history),
        time_section(history.time, run.get("memory")),
        failures_section(history),
        samples_section(directory),
        plan_section(run),
    ]
    style, script = _style(), _script()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(name)}</title>",
            f"<style>{style}</style>",
            "</head>",
            f'<body class="plain"><main>{"".join(parts)}</main>',
            f'<script type="module">{script}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


@functools.cache
def _style() -> str:
    return style_text() + _file("report.css")


@functools.cache
def _script() -> str:
    return "\n" + _file("report.js")


def _file(name: str) -> str:
    return files("verifiers.train.watching").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
