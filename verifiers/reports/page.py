"""The page around the data: one file with its style and script inside, and a policy that lets nothing else run.

Evaluations and training runs share the page: the data says what happened, and the script draws it. Three safeguards
against what models write: the data is JSON in an element that no browser executes and that cannot be closed from
within; the script sets text, never HTML; and the content security policy names the hashes of the one style and the
one script, so that anything else that got in would neither run nor load.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from verifiers.monitoring.run_log import replace_file

_SHARED_SCRIPTS = ("core.js", "transcript.js", "plot.js")
EVALUATION_SCRIPTS = (
    *_SHARED_SCRIPTS,
    "rollouts.js",
    "list.js",
    "rollout_view.js",
    "charts.js",
    "overview.js",
    "app.js",
    "navigation.js",
)
"""Files of the script that draws one evaluation, or two."""

TRAINING_SCRIPTS = (*_SHARED_SCRIPTS, "curves.js", "samples.js", "training.js")
"""Files of the script that draws a training run."""


def page_text(
    title: str,
    data: Any,
    blocks: Sequence[str] = (),
    *,
    scripts: Sequence[str] = EVALUATION_SCRIPTS,
    live: bool = False,
) -> str:
    """Return the whole page.

    Args:
        data: read by the script at the start, as plain data without NaN.
        blocks: transcripts as of `json_block`; a live page has none and asks its server.
        scripts: files of the script, which see each other's names.
        live: allow the page to ask the server that it came from, and no other.
    """
    script = script_text(tuple(scripts))
    parts = [f'<script type="application/json" id="vf-data">{json_text(data)}</script>']
    parts += [f'<script type="application/json" id="vf-block-{n}">{block}</script>' for n, block in enumerate(blocks)]
    return "\n".join(
        [
            *_head(title, content_policy(script, live=live)),
            '<body class="app">',
            '<noscript><p class="notice">This report is drawn by the script inside this file; '
            "please allow it to run. It loads nothing from elsewhere.</p></noscript>",
            '<div id="app"></div>',
            *parts,
            f'<script type="module">{script}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def plain_page(title: str, body: str) -> str:
    """Return a page of text and links without any script; its body is HTML, escaped by the caller."""
    policy = f"default-src 'none'; style-src '{_hash(style_text())}'; form-action 'self'; base-uri 'none'"
    return "\n".join([*_head(title, policy), f'<body class="plain">{body}</body>', "</html>", ""])


def content_policy(script: str, *, live: bool) -> str:
    """Return the content security policy of a page with this script."""
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style_text())}'; img-src data:; "
    return policy + ("connect-src 'self'; " if live else "") + "base-uri 'none'; form-action 'none'"


@functools.cache
def script_text(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_file(name) for name in names)


@functools.cache
def style_text() -> str:
    return "\n" + _file("page.css")


def json_text(value: Any) -> str:
    """Return JSON for a script element: compact, and without a character that could end the element.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def write_page(target: Path, text: str) -> Path:
    """Write a page in one step: readers see the old file or the new one. Creates the directory.

    Half of a surrogate pair, which models do write, becomes a backslash escape: in JSON that is the same character.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        # a device or a pipe is written to, and stays what it is
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
    else:
        replace_file(target, text)
    return target


def _head(title: str, policy: str) -> list[str]:
    return [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{style_text()}</style>",
        "</head>",
    ]


def _file(name: str) -> str:
    return files("verifiers.reports").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
