"""Classic import path of `verifiers.envs.tools`."""

from verifiers.envs.tools import convert_func_to_oai_tool

__all__ = ["convert_func_to_oai_tool"]
