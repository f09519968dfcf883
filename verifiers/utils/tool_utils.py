"""Classic import path of `verifiers.envs.tools` and `verifiers.envs.classic.tool_defs`."""

from verifiers.envs.classic.tool_defs import convert_func_to_tool_def
from verifiers.envs.tools import convert_func_to_oai_tool

__all__ = ["convert_func_to_oai_tool", "convert_func_to_tool_def"]
