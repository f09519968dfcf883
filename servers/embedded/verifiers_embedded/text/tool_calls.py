"""Tool calls in the text of a model: found in one of the common formats, cut out without changing a byte.

The arguments of a call are handed on as the model wrote them, where they are JSON: a template that prints
them again then gives the tokens that were sampled, and the next turn's prompt extends this one.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    content: str
    calls: tuple[ToolCall, ...] = ()


Parse = Callable[[str], Answer]


def parse_hermes(text: str) -> Answer:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Hermes, Qwen 3."""
    return _tagged(text, _json_call)


def parse_qwen3_coder(text: str) -> Answer:
    """Parse ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``: Qwen3-Coder.

    A value that is JSON is taken as such, any other as a string.
    """
    return _tagged(text, _function_call)


def parse_llama3_json(text: str) -> Answer:
    """Parse ``{"name": ..., "parameters": {...}}`` and nothing else, or several joined by ";": Llama 3."""
    calls = _json_calls(text.strip().removeprefix("<|python_tag|>"), ";", "")
    return Answer("", calls) if calls else Answer(text)


def parse_mistral(text: str) -> Answer:
    """Parse ``[TOOL_CALLS]`` followed by a JSON list of calls: Mistral."""
    content, mark, rest = text.partition("[TOOL_CALLS]")
    rest = rest.strip()
    calls = _json_calls(rest[1:], ",", "]") if mark and rest.startswith("[") else ()
    return Answer(content, calls) if calls else Answer(text)


FORMATS: dict[str, Parse] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
}
"""Each format under the name that vLLM's ``--tool-call-parser`` gives it."""

KEEPS_SPECIAL_TOKENS = frozenset({"llama3_json", "mistral"})
"""Formats whose mark is a special token, which plain decoding leaves out."""


def format_of_template(template: str) -> str | None:
    """Return the format in which a chat template writes calls; None where it writes none that is known here."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if '"parameters"' in template and "tools" in template:
        return "llama3_json"
    return None


def call_id(prompt_ids: Sequence[int], token_ids: Sequence[int], place: int) -> str:
    """Name a call. The same request gets the same name, calls of other turns get others.

    Nine letters and digits, since the templates of Mistral's models accept nothing else.
    """
    digest = hashlib.blake2b(array("q", [*prompt_ids, -1, *token_ids, place]).tobytes(), digest_size=8).digest()
    number, letters = int.from_bytes(digest, "big"), []
    for _ in range(_ID_LENGTH):
        number, letter = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[letter])
    return "".join(letters)


def _tagged(text: str, read: Callable[[str], ToolCall | None]) -> Answer:
    """Read the calls between ``<tool_call>`` and ``</tool_call>``; where one cannot be read, all is plain text."""
    content, *pieces = text.split("<tool_call>")
    calls: list[ToolCall] = []
    for piece in pieces:
        inside, closing, after = piece.partition("</tool_call>")
        call = read(inside)
        if call is None or (not closing and after.strip()):
            return Answer(text)
        calls.append(call)
        if after.strip():
            # said after the call: no template puts it back there, so it joins what was said before
            content += after
    # templates put the calls on a line of their own
    return Answer(content.removesuffix("\n"), tuple(calls)) if calls else Answer(text)


def _json_call(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    key = next((key for key in ("arguments", "parameters") if key in value), None)
    if key is None:
        return ToolCall(value["name"], "{}")
    if isinstance(value[key], str):
        return ToolCall(value["name"], value[key])
    if not isinstance(value[key], dict):
        return None
    return ToolCall(value["name"], _as_written(text, key, value[key]))


def _as_written(text: str, key: str, value: dict[str, Any]) -> str:
    """Return the JSON text of `value` as it stands behind `key`."""
    decoder = json.JSONDecoder()
    for match in re.finditer(rf'"{key}"\s*:\s*', text):
        try:
            found, end = decoder.raw_decode(text, match.end())
        except ValueError:
            continue
        if found == value:
            return text[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def _function_call(text: str) -> ToolCall | None:
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    name, body = match.groups()
    if _PARAMETER.sub("", body).strip():
        return None
    arguments: dict[str, Any] = {}
    for key, value in _PARAMETER.findall(body):
        try:
            arguments[key] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[key] = value
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _json_calls(text: str, separator: str, end: str) -> tuple[ToolCall, ...]:
    """Return the calls up to the mark that ends them, or the end of the text; none where one cannot be read."""
    calls: list[ToolCall] = []
    rest = text.lstrip()
    while rest and not (end and rest.startswith(end)):
        try:
            size = json.JSONDecoder().raw_decode(rest)[1]
        except (ValueError, RecursionError):
            return ()
        call = _json_call(rest[:size])
        if call is None:
            return ()
        calls.append(call)
        rest = rest[size:].lstrip().removeprefix(separator).lstrip()
    return tuple(calls)
