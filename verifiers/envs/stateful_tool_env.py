"""Classic import path of `verifiers.envs.tool_env`."""

from verifiers.envs.tool_env import StatefulToolEnv

__all__ = ["StatefulToolEnv"]
