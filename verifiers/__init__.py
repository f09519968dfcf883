"""Reinforcement learning and evaluation of language models on verifiable tasks.

Everything here is loaded when it is first used, so `import verifiers` is quick and needs no extra.
`from verifiers import *` leaves out the names that need an extra, some of which would load torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.data.curriculum import Curriculum
    from verifiers.data.curriculum_policies import curriculum_from
    from verifiers.data.sampler import RepeatSampler
    from verifiers.envs.agent_env import AgentEnv
    from verifiers.envs.classic.example_datasets import load_example_dataset
    from verifiers.envs.classic.tool_defs import ToolDef as Tool
    from verifiers.envs.env_group import EnvGroup
    from verifiers.envs.environment import Environment
    from verifiers.envs.external_env import ExternalEnv
    from verifiers.envs.lifecycle import cleanup, stop, teardown
    from verifiers.envs.multiturn_env import MultiTurnEnv
    from verifiers.envs.program_env import ProgramEnv
    from verifiers.envs.registry import load_environment
    from verifiers.envs.sandbox_env import PythonEnv, SandboxEnv
    from verifiers.envs.singleturn_env import SingleTurnEnv
    from verifiers.envs.tool_env import StatefulToolEnv, ToolEnv
    from verifiers.errors import (
        AgentError,
        ConfigError,
        EmptyModelResponseError,
        Error,
        GradingError,
        InfraError,
        ModelError,
        OverlongPromptError,
        ProviderError,
        SandboxError,
        ToolCallError,
        ToolError,
        ToolParseError,
        UnknownEnvironmentError,
        WorkerCallError,
        WorkerError,
        WorkerTimeoutError,
    )
    from verifiers.integrations.dataserver import RemoteEnv
    from verifiers.integrations.dataserver_trl import RemoteRLDataset, remote_reward
    from verifiers.integrations.gymnasium import GymEnv
    from verifiers.integrations.mcp import MCPEnv as MCPEnv
    from verifiers.integrations.openenv import OpenEnvEnv
    from verifiers.integrations.reasoning_gym import ReasoningGymEnv as ReasoningGymEnv
    from verifiers.integrations.textarena import TextArenaEnv as TextArenaEnv
    from verifiers.log import setup_logging
    from verifiers.parsers.messages import print_prompt_completions_sample
    from verifiers.parsers.parser import Parser, extract_boxed_answer, extract_hash_answer
    from verifiers.parsers.think_parser import MaybeThinkParser, ThinkParser
    from verifiers.parsers.xml_parser import XMLParser
    from verifiers.rollouts.block import BatchRequest
    from verifiers.rollouts.generator import AsyncBatchGenerator
    from verifiers.rubrics.judge_rubric import JudgeRubric
    from verifiers.rubrics.math_rubric import MathRubric
    from verifiers.rubrics.ranking_rubric import RankingRubric
    from verifiers.rubrics.rubric import Rubric
    from verifiers.rubrics.rubric_group import RubricGroup
    from verifiers.rubrics.shaping import EpisodicSumRubric, overlong_penalty, r1_zero_reward
    from verifiers.rubrics.tool_rubric import ToolRubric
    from verifiers.sandbox.spec import Sandbox, SandboxSpec
    from verifiers.train.config import (
        GRPOConfig as GRPOConfig,
    )
    from verifiers.train.config import (
        grpo_defaults as grpo_defaults,
    )
    from verifiers.train.config import (
        lora_defaults as lora_defaults,
    )
    from verifiers.train.models import (
        get_model as get_model,
    )
    from verifiers.train.models import (
        get_model_and_tokenizer as get_model_and_tokenizer,
    )
    from verifiers.train.models import (
        get_tokenizer as get_tokenizer,
    )
    from verifiers.train.trainer import GRPOTrainer as GRPOTrainer
    from verifiers.types import (
        AssistantMessage,
        ChatMessage,
        ClientConfig,
        GenerateInputs,
        GenerateOutputs,
        Info,
        Message,
        Messages,
        MessageType,
        ModelResponse,
        ProcessedOutputs,
        RewardFunc,
        RolloutInput,
        RolloutScore,
        RolloutScores,
        SamplingArgs,
        State,
        SystemMessage,
        ToolCall,
        ToolMessage,
        TrajectoryStep,
        UserMessage,
    )

__version__: str

__all__ = [
    "AgentEnv",
    "AgentError",
    "AssistantMessage",
    "AsyncBatchGenerator",
    "BatchRequest",
    "ChatMessage",
    "ClientConfig",
    "ConfigError",
    "Curriculum",
    "EmptyModelResponseError",
    "EnvGroup",
    "Environment",
    "EpisodicSumRubric",
    "Error",
    "ExternalEnv",
    "GenerateInputs",
    "GenerateOutputs",
    "GradingError",
    "GymEnv",
    "Info",
    "InfraError",
    "JudgeRubric",
    "MathRubric",
    "MaybeThinkParser",
    "Message",
    "MessageType",
    "Messages",
    "ModelError",
    "ModelResponse",
    "MultiTurnEnv",
    "OpenEnvEnv",
    "OverlongPromptError",
    "Parser",
    "ProcessedOutputs",
    "ProgramEnv",
    "ProviderError",
    "PythonEnv",
    "RankingRubric",
    "RemoteEnv",
    "RemoteRLDataset",
    "RepeatSampler",
    "RewardFunc",
    "RolloutInput",
    "RolloutScore",
    "RolloutScores",
    "Rubric",
    "RubricGroup",
    "SamplingArgs",
    "Sandbox",
    "SandboxEnv",
    "SandboxError",
    "SandboxSpec",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "SystemMessage",
    "ThinkParser",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolEnv",
    "ToolError",
    "ToolMessage",
    "ToolParseError",
    "ToolRubric",
    "TrajectoryStep",
    "UnknownEnvironmentError",
    "UserMessage",
    "WorkerCallError",
    "WorkerError",
    "WorkerTimeoutError",
    "XMLParser",
    "cleanup",
    "curriculum_from",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_environment",
    "load_example_dataset",
    "overlong_penalty",
    "print_prompt_completions_sample",
    "r1_zero_reward",
    "remote_reward",
    "setup_logging",
    "stop",
    "teardown",
]

_LAZY_IMPORTS = {
    "Parser": "verifiers.parsers.parser:Parser",
    "MaybeThinkParser": "verifiers.parsers.think_parser:MaybeThinkParser",
    "ThinkParser": "verifiers.parsers.think_parser:ThinkParser",
    "XMLParser": "verifiers.parsers.xml_parser:XMLParser",
    "Rubric": "verifiers.rubrics.rubric:Rubric",
    "Environment": "verifiers.envs.environment:Environment",
    "AgentEnv": "verifiers.envs.agent_env:AgentEnv",
    "ProgramEnv": "verifiers.envs.program_env:ProgramEnv",
    "ExternalEnv": "verifiers.envs.external_env:ExternalEnv",
    "MultiTurnEnv": "verifiers.envs.multiturn_env:MultiTurnEnv",
    "SingleTurnEnv": "verifiers.envs.singleturn_env:SingleTurnEnv",
    "load_environment": "verifiers.envs.registry:load_environment",
    "cleanup": "verifiers.envs.lifecycle:cleanup",
    "stop": "verifiers.envs.lifecycle:stop",
    "teardown": "verifiers.envs.lifecycle:teardown",
    "extract_boxed_answer": "verifiers.parsers.parser:extract_boxed_answer",
    "extract_hash_answer": "verifiers.parsers.parser:extract_hash_answer",
    "load_example_dataset": "verifiers.envs.classic.example_datasets:load_example_dataset",
    "Tool": "verifiers.envs.classic.tool_defs:ToolDef",
    "setup_logging": "verifiers.log:setup_logging",
    "AsyncBatchGenerator": "verifiers.rollouts.generator:AsyncBatchGenerator",
    "BatchRequest": "verifiers.rollouts.block:BatchRequest",
    "RepeatSampler": "verifiers.data.sampler:RepeatSampler",
    "AssistantMessage": "verifiers.types:AssistantMessage",
    "ChatMessage": "verifiers.types:ChatMessage",
    "ClientConfig": "verifiers.types:ClientConfig",
    "GenerateInputs": "verifiers.types:GenerateInputs",
    "GenerateOutputs": "verifiers.types:GenerateOutputs",
    "Info": "verifiers.types:Info",
    "Message": "verifiers.types:Message",
    "MessageType": "verifiers.types:MessageType",
    "Messages": "verifiers.types:Messages",
    "ModelResponse": "verifiers.types:ModelResponse",
    "ProcessedOutputs": "verifiers.types:ProcessedOutputs",
    "RewardFunc": "verifiers.types:RewardFunc",
    "RolloutInput": "verifiers.types:RolloutInput",
    "RolloutScore": "verifiers.types:RolloutScore",
    "RolloutScores": "verifiers.types:RolloutScores",
    "SamplingArgs": "verifiers.types:SamplingArgs",
    "State": "verifiers.types:State",
    "SystemMessage": "verifiers.types:SystemMessage",
    "ToolCall": "verifiers.types:ToolCall",
    "ToolMessage": "verifiers.types:ToolMessage",
    "TrajectoryStep": "verifiers.types:TrajectoryStep",
    "UserMessage": "verifiers.types:UserMessage",
    "AgentError": "verifiers.errors:AgentError",
    "ConfigError": "verifiers.errors:ConfigError",
    "EmptyModelResponseError": "verifiers.errors:EmptyModelResponseError",
    "Error": "verifiers.errors:Error",
    "GradingError": "verifiers.errors:GradingError",
    "InfraError": "verifiers.errors:InfraError",
    "ModelError": "verifiers.errors:ModelError",
    "OverlongPromptError": "verifiers.errors:OverlongPromptError",
    "ProviderError": "verifiers.errors:ProviderError",
    "SandboxError": "verifiers.errors:SandboxError",
    "ToolCallError": "verifiers.errors:ToolCallError",
    "ToolError": "verifiers.errors:ToolError",
    "ToolParseError": "verifiers.errors:ToolParseError",
    "UnknownEnvironmentError": "verifiers.errors:UnknownEnvironmentError",
    "RubricGroup": "verifiers.rubrics.rubric_group:RubricGroup",
    "JudgeRubric": "verifiers.rubrics.judge_rubric:JudgeRubric",
    "ToolRubric": "verifiers.rubrics.tool_rubric:ToolRubric",
    "MathRubric": "verifiers.rubrics.math_rubric:MathRubric",
    "EpisodicSumRubric": "verifiers.rubrics.shaping:EpisodicSumRubric",
    "RankingRubric": "verifiers.rubrics.ranking_rubric:RankingRubric",
    "overlong_penalty": "verifiers.rubrics.shaping:overlong_penalty",
    "r1_zero_reward": "verifiers.rubrics.shaping:r1_zero_reward",
    "ToolEnv": "verifiers.envs.tool_env:ToolEnv",
    "StatefulToolEnv": "verifiers.envs.tool_env:StatefulToolEnv",
    "SandboxEnv": "verifiers.envs.sandbox_env:SandboxEnv",
    "PythonEnv": "verifiers.envs.sandbox_env:PythonEnv",
    "EnvGroup": "verifiers.envs.env_group:EnvGroup",
    "Sandbox": "verifiers.sandbox.spec:Sandbox",
    "SandboxSpec": "verifiers.sandbox.spec:SandboxSpec",
    "print_prompt_completions_sample": "verifiers.parsers.messages:print_prompt_completions_sample",
    "TextArenaEnv": "verifiers.integrations.textarena:TextArenaEnv",
    "ReasoningGymEnv": "verifiers.integrations.reasoning_gym:ReasoningGymEnv",
    "GymEnv": "verifiers.integrations.gymnasium:GymEnv",
    "MCPEnv": "verifiers.integrations.mcp:MCPEnv",
    "RemoteEnv": "verifiers.integrations.dataserver:RemoteEnv",
    "RemoteRLDataset": "verifiers.integrations.dataserver_trl:RemoteRLDataset",
    "remote_reward": "verifiers.integrations.dataserver_trl:remote_reward",
    "Curriculum": "verifiers.data.curriculum:Curriculum",
    "curriculum_from": "verifiers.data.curriculum_policies:curriculum_from",
    "OpenEnvEnv": "verifiers.integrations.openenv:OpenEnvEnv",
    "WorkerError": "verifiers.errors:WorkerError",
    "WorkerTimeoutError": "verifiers.errors:WorkerTimeoutError",
    "WorkerCallError": "verifiers.errors:WorkerCallError",
    "GRPOConfig": "verifiers.train.config:GRPOConfig",
    "grpo_defaults": "verifiers.train.config:grpo_defaults",
    "lora_defaults": "verifiers.train.config:lora_defaults",
    "get_model": "verifiers.train.models:get_model",
    "get_model_and_tokenizer": "verifiers.train.models:get_model_and_tokenizer",
    "get_tokenizer": "verifiers.train.models:get_tokenizer",
    "GRPOTrainer": "verifiers.train.trainer:GRPOTrainer",
}
"""The place of each public name: name -> "module:attribute"."""

_SUBMODULES = frozenset(
    {
        "cli",
        "data",
        "envs",
        "errors",
        "evals",
        "parsers",
        "rollouts",
        "rubrics",
        "sandbox",
        "scripts",
        "testing",
        "train",
        "types",
        "utils",
    }
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _LAZY_IMPORTS:
        value = _imported(name)
    elif name in _SUBMODULES:
        import importlib

        value = importlib.import_module(f"{__name__}.{name}")
    else:
        from verifiers.envs.classic.import_paths import classic_name

        value = classic_name(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_IMPORTS, *_SUBMODULES, "__version__"} - {"Any", "TYPE_CHECKING", "annotations"})


def _imported(name: str) -> Any:
    import importlib

    from verifiers.installation import EXTRAS, install_hint

    module, _, attribute = _LAZY_IMPORTS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise AttributeError(
            f"verifiers.{name} needs {missing}, which is not installed or does not fit; "
            f"{install_hint(EXTRAS[missing])}."
        ) from error


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        # a checkout that is on the path without being installed
        return "1.0.0.dev0"


class _ClassicPaths:
    """A finder of modules of the classic package that have no file here; it is asked last."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("verifiers."):
            return None
        from verifiers.envs.classic.import_paths import classic_spec

        return classic_spec(name)


sys.meta_path.append(_ClassicPaths)
