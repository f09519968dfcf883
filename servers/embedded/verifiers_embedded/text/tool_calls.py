"""Tool calls in the text of a model: found in one of the common formats, cut out without changing a byte.

The arguments of a call are handed on as the model wrote them, where they are JSON: a template that prints
them again then gives the tokens that were sampled, and the next turn's prompt extends this one.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_CALL = re.compile(r"\s*([\w.-]+)\s*(.*)", re.DOTALL)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HARMONY_ADDRESS = re.compile(r"\bto=functions\.([\w.-]+)")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_GLM_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>\n?(.*?)\n?</arg_value>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each parameter, by function and name."""

Parse = Callable[[str, Parameters], Answer]


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Parameters:
    """Return the schemas of the parameters of a request's tools."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    properties = {name: schema.get("properties") for name, schema in schemas.items()}
    return {name: found if isinstance(found, dict) else {} for name, found in properties.items()}


def parse_hermes(text: str, parameters: Parameters) -> Answer:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or more: Hermes, Qwen 3."""
    return _tagged(text, _json_call)


def parse_qwen3_coder(text: str, parameters: Parameters) -> Answer:
    """Parse ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``: Qwen3-Coder."""
    return _tagged(text, functools.partial(_written_out, parameters=parameters, form=_FUNCTION, pair=_PARAMETER))


def parse_glm(text: str, parameters: Parameters) -> Answer:
    """Parse ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>``: GLM 4.5."""
    return _tagged(text, functools.partial(_written_out, parameters=parameters, form=_GLM_CALL, pair=_GLM_PAIR))


def parse_llama3_json(text: str, parameters: Parameters) -> Answer:
    """Parse ``{"name": ..., "parameters": {...}}`` and nothing else, or several joined by ";": Llama 3."""
    calls = _json_calls(text.strip().removeprefix("<|python_tag|>"), ";", "")
    return Answer("", calls) if calls else Answer(text)


def parse_mistral(text: str, parameters: Parameters) -> Answer:
    """Parse ``[TOOL_CALLS]`` and a JSON list of calls, or ``[TOOL_CALLS]NAME[ARGS]{...}`` once or more: Mistral."""
    content, *pieces = text.split("[TOOL_CALLS]")
    rest = pieces[0].strip() if pieces else ""
    if rest.startswith("["):
        calls: tuple[ToolCall, ...] = _json_calls(rest[1:], ",", "]")
    else:
        found = [_named_call(piece) for piece in pieces]
        calls = tuple(call for call in found if call is not None) if all(found) else ()
    return Answer(content, calls) if calls else Answer(text)


def parse_phi4_mini(text: str, parameters: Parameters) -> Answer:
    """Parse ``<|tool_call|>`` or ``functools``, and behind it a JSON list of calls: Phi 4 mini."""
    for mark in ("<|tool_call|>", "functools"):
        content, _, rest = text.partition(mark)
        if rest.lstrip().startswith("["):
            calls = _json_calls(rest.lstrip()[1:], ",", "]")
            return Answer(content, calls) if calls else Answer(text)
    return Answer(text)


def parse_olmo3(text: str, parameters: Parameters) -> Answer:
    """Parse ``<function_calls>NAME(KEY=VALUE, ...)</function_calls>``, a call a line, values as in Python: OLMo 3."""
    content, _, rest = text.partition("<function_calls>")
    try:
        body = ast.parse(rest.partition("</function_calls>")[0].strip()).body
        calls = tuple(_python_call(statement) for statement in body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        calls = ()
    return Answer(content.removesuffix("\n"), calls) if calls else Answer(text)


def parse_gemma4(text: str, parameters: Parameters) -> Answer:
    """Parse ``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``, texts between ``<|"|>``, once or more: Gemma 4."""
    content, *pieces = text.split("<|tool_call>")
    calls = [_gemma_call(piece.partition("<tool_call|>")[0]) for piece in pieces]
    found = tuple(call for call in calls if call is not None)
    return Answer(content, found) if found and len(found) == len(calls) else Answer(text)


def parse_glm4(text: str, parameters: Parameters) -> Answer:
    """Parse the name of a tool, and a JSON object on the next line, once or more: GLM 4."""
    content, calls = "", []
    for piece in text.split("<|assistant|>"):
        name, _, arguments = piece.strip().partition("\n")
        if name in parameters and _is_json_object(arguments):
            calls.append(ToolCall(name, arguments.strip()))
        else:
            content += piece
    return Answer(content, tuple(calls)) if calls else Answer(text)


def parse_harmony(text: str, parameters: Parameters) -> Answer:
    """Parse messages ``<|channel|>NAME<|message|>TEXT`` that end with a mark: gpt-oss.

    Analysis is reasoning, what is sent ``to=functions.NAME`` a call, and all else content.
    """
    if "<|message|>" not in text:
        return Answer(text)
    content: list[str] = []
    reasoning: list[str] = []
    calls = []
    for message in text.split("<|start|>assistant"):
        header, _, rest = message.partition("<|message|>")
        body = _HARMONY_END.split(rest)[0]
        channel, address = _HARMONY_CHANNEL.search(header), _HARMONY_ADDRESS.search(header)
        if address and _is_json_object(body):
            calls.append(ToolCall(address[1], body.strip()))
        else:
            (reasoning if channel and channel[1] == "analysis" else content).append(body)
    return Answer("".join(content), tuple(calls), "".join(reasoning) if reasoning else None)


FORMATS: dict[str, Parse] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "glm45": parse_glm,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    "phi4_mini_json": parse_phi4_mini,
    "olmo3": parse_olmo3,
    "gemma4": parse_gemma4,
    "glm4": parse_glm4,
    "openai": parse_harmony,
}
"""Each format under the name that vLLM's ``--tool-call-parser`` gives it; of "glm4" vLLM has none."""

HARMONY = "openai"
"""The format in which reasoning and content are messages of their own, with calls or without."""

_TAGS = ("<tool_call>", "</tool_call>")
MARKS = {
    "hermes": _TAGS,
    "qwen3_coder": _TAGS,
    "glm45": (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm4": ("<|assistant|>",),
    "openai": tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")),
}
"""Marks of each format, which are special tokens of some tokenizers and then left out by plain decoding."""

WHOLE = FORMATS.keys() - {"hermes", "qwen3_coder", "glm45"}
"""Formats of which no mark may stand before a call, or one that no text keeps: an answer is read when it is whole."""


def format_of_template(template: str) -> str | None:
    """Return the format in which a chat template writes calls; None where it writes none that is known here."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<arg_key>" in template:
        return "glm45"
    if "<|tool_call>" in template:
        return "gemma4"
    if "<|channel|>" in template:
        return HARMONY
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "<function_calls>" in template:
        return "olmo3"
    if "<|tool|>" in template or "functools" in template:
        return "phi4_mini_json"
    if "<|observation|>" in template:
        return "glm4"
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


def _named_call(text: str) -> ToolCall | None:
    """Read ``NAME[ARGS]{...}``, perhaps with an id between."""
    name, _, arguments = text.partition("[ARGS]")
    name = name.partition("[CALL_ID]")[0].strip()
    return ToolCall(name, arguments.strip()) if name and _is_json_object(arguments) else None


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _gemma_call(text: str) -> ToolCall | None:
    """Read ``call:NAME{...}``: JSON, but for keys without quotes and texts between marks of their own."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        return None
    pieces = match[2].split('<|"|>')
    written = [json.dumps(one) if place % 2 else _GEMMA_KEY.sub(r'\1"\2":', one) for place, one in enumerate(pieces)]
    try:
        return ToolCall(match[1], json.dumps(json.loads("".join(written)), ensure_ascii=False))
    except (ValueError, RecursionError):
        return None


def _python_call(statement: ast.stmt) -> ToolCall:
    """Read a call with keywords as Python writes it. Raises ValueError for anything else."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
        raise ValueError("no call with keywords alone")
    arguments = {keyword.arg: _python_value(keyword.value) for keyword in call.keywords}
    return ToolCall(ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False))


def _python_value(node: ast.expr) -> Any:
    """Return a literal's value, in which true, false and null may stand as in JSON. Raises ValueError for others."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _python_value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def _written_out(text: str, parameters: Parameters, form: re.Pattern[str], pair: re.Pattern[str]) -> ToolCall | None:
    """Read a call whose arguments stand between tags, each converted as the tool's schema says."""
    match = form.fullmatch(text)
    if match is None:
        return None
    name, body = match.groups()
    if pair.sub("", body).strip():
        return None
    schemas = parameters.get(name, {})
    arguments = {key: _converted(value, schemas.get(key)) for key, value in pair.findall(body)}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _converted(text: str, schema: Any) -> Any:
    """Return a value as its schema says; a text where that says string, or nothing of this parameter."""
    if not isinstance(schema, dict):
        return text
    kinds = _kinds(schema)
    if "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {one for one in (named, *_listed(named)) if isinstance(one, str)}
    kinds |= {"string" for value in (*_listed(schema.get("enum")), schema.get("const")) if isinstance(value, str)}
    return kinds.union(*(_kinds(one) for key in ("anyOf", "oneOf", "allOf") for one in _listed(schema.get(key))))


def _listed(value: Any) -> list[Any]:
    # schemas that a program wrote have nulls
    return value if isinstance(value, list) else []


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
