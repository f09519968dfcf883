"""Tools as the late second generation of the classic API writes them: `vf.Tool(name, description, parameters)`.

Inside, a tool is OpenAI's dict, `{"type": "function", "function": {...}}`. A `ToolDef` is that dict, whose fields are
found where the second generation looks for them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verifiers.envs.tools import TOOL_FIELDS, convert_func_to_oai_tool, openai_tools
from verifiers.types import Record

__all__ = ["ToolDef", "convert_func_to_tool_def", "tool_defs_of"]


class ToolDef(Record):
    """A tool's definition: OpenAI's dict, with `name`, `description`, `parameters` and `strict` as fields of its own.

    `parameters` are a JSON schema of the arguments; `strict` asks the server to keep to it, and is left out where it
    is None.
    """

    def __init__(
        self,
        name: str,
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        strict: bool | None = None,
    ) -> None:
        fields = {"name": name, "description": description, "parameters": dict(parameters or {}), "strict": strict}
        dict.__init__(self, openai_tools([fields])[0])

    @classmethod
    def model_validate(cls, tool: Any) -> ToolDef:
        """Return a tool given in any form: a `ToolDef`, OpenAI's dict, or fields as a dict or an object."""
        if isinstance(tool, cls):
            return tool
        made = cls.__new__(cls)
        dict.update(made, openai_tools([tool])[0])
        return made

    def __missing__(self, name: str) -> Any:
        function = dict.get(self, "function") or {}
        if name in function or name not in TOOL_FIELDS:
            return function[name]
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        (self["function"] if name in TOOL_FIELDS else self)[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, of either form."""
        return self[name] if name in self or name in TOOL_FIELDS else default

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return name, description, parameters and strict."""
        return {name: self[name] for name in TOOL_FIELDS}


def convert_func_to_tool_def(func: Callable[..., Any]) -> ToolDef:
    """Return a function's definition out of its signature and docstring; as `convert_func_to_oai_tool`."""
    return ToolDef.model_validate(convert_func_to_oai_tool(func))


def tool_defs_of(tools: Iterable[Any] | None) -> list[Any] | None:
    """Return the tools as `ToolDef`s; a list that holds nothing else is returned itself, and so is None."""
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, ToolDef) for tool in tools)):
        return tools
    return [ToolDef.model_validate(tool) for tool in tools]
