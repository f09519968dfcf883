"""The HTML around the data: one file with its style and script inside, and a policy that lets nothing else run.

Three locks against what models write: the data is JSON in an element that no browser executes and cannot be closed
from within; the script sets text, never HTML; and the content security policy names the hashes of the one style and
the one script, so that anything else that got in would neither run nor load.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from verifiers.evals.viewer.data import json_text

__all__ = ["SCRIPTS", "content_policy", "page_text", "plain_page", "script_text", "style_text"]

SCRIPTS = ("core.js", "list.js", "transcript.js", "plot.js", "charts.js", "overview.js", "app.js", "go.js")


def page_text(title: str, data: Any, blocks: Sequence[str] = (), *, live: bool = False) -> str:
    """The whole page.

    Args:
        title: of the window.
        data: what the script reads at the start, as plain data without NaN.
        blocks: transcripts as of `data.json_block`; a live page has none and asks its server.
        live: allow the page to ask the server that it came from, and no other.
    """
    held = [f'<script type="application/json" id="vf-data">{json_text(data)}</script>']
    held += [f'<script type="application/json" id="vf-block-{n}">{block}</script>' for n, block in enumerate(blocks)]
    return "\n".join(
        [
            *_head(title, content_policy(live=live)),
            '<body class="app">',
            '<noscript><p class="notice">This report is drawn by the script inside this file; '
            "please allow it to run. It loads nothing from elsewhere.</p></noscript>",
            '<div id="app"></div>',
            *held,
            f'<script type="module">{script_text()}</script>',
            "</body>",
            "</html>",
            "",
        ]
    )


def plain_page(title: str, body: str) -> str:
    """A page of text and links without any script.

    Args:
        body: HTML, escaped by the caller.
    """
    policy = f"default-src 'none'; style-src '{_hash(style_text())}'; form-action 'self'; base-uri 'none'"
    return "\n".join([*_head(title, policy), f'<body class="plain">{body}</body>', "</html>", ""])


def content_policy(*, live: bool) -> str:
    """The content security policy of the page."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script_text())}'",
            f"style-src '{_hash(style_text())}'",
            "img-src data:",
            *(["connect-src 'self'"] if live else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


@functools.cache
def script_text() -> str:
    """The page's script: all its files, joined."""
    return "\n" + "\n".join(_file(name) for name in SCRIPTS)


@functools.cache
def style_text() -> str:
    """The page's style sheet."""
    return "\n" + _file("viewer.css")


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
    return files("verifiers.evals.viewer").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
