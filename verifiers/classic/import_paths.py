"""Names of the classic package that are elsewhere here, and those that are not here at all.

`verifiers` looks here for a submodule that has no file, and it and the modules that still have classic names for a
name that they do not have.
"""

from __future__ import annotations

import functools
import importlib
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _moved(module: str, home: str, names: str) -> dict[str, str]:
    return {f"{module}:{name}": f"{home}:{name}" for name in names.split()}


_LATE = "verifiers.classic.late_names"
_LATE_TYPES = (
    "DatasetBuilder GenerateMetadata GroupRewardFunc ImageUrlContentPart IndividualRewardFunc InputAudioContentPart "
    "Response RolloutOutput RolloutTiming TextContentPart TrajectoryStepTokens"
)

CLASSIC_NAMES = {
    # verifiers and verifiers.types
    **_moved("verifiers", "verifiers.envs.sandbox_env", "SandboxState"),
    **_moved("verifiers", _LATE, "MissingKeyError ensure_keys log_level quiet_verifiers"),
    **_moved("verifiers", "verifiers.errors", "InvalidModelResponseError"),
    "verifiers:Client": "openai:AsyncOpenAI",
    **_moved("verifiers.types", "openai.types.chat", "ChatCompletion ChatCompletionToolParam"),
    "verifiers.types:Completion": "openai.types:Completion",
    "verifiers.types:Tool": f"{_LATE}:ToolDef",
    **_moved("verifiers", _LATE, _LATE_TYPES),
    **_moved("verifiers.types", _LATE, _LATE_TYPES),
    # modules that have gone
    **_moved("verifiers.clients", _LATE, "setup_client"),
    "verifiers.clients:Client": "openai:AsyncOpenAI",
    "verifiers.clients.client:Client": "openai:AsyncOpenAI",
    **_moved("verifiers.decorators", "verifiers.envs.lifecycle", "stop cleanup teardown"),
    **_moved("verifiers.envs.experimental.gym_env", "verifiers.integrations.gymnasium", "GymEnv"),
    **_moved("verifiers.envs.experimental.gym_env", "verifiers.rubrics.shaping", "EpisodicSumRubric"),
    **_moved("verifiers.envs.experimental.mcp_env", "verifiers.integrations.mcp", "MCPEnv MCPServerConfig"),
    **_moved("verifiers.envs.integrations.openenv_env", "verifiers.integrations.openenv", "OpenEnvEnv"),
    **_moved("verifiers.envs.multiturn_env", _LATE, "MultiTurnMonitorRubric"),
    **_moved("verifiers.envs.python_env", "verifiers.envs.sandbox_env", "PythonEnv"),
    **_moved("verifiers.envs.sandbox_env", _LATE, "SandboxMonitorRubric"),
    **_moved("verifiers.envs.singleturn_env", "verifiers.envs.multiturn_env", "SingleTurnEnv"),
    **_moved("verifiers.envs.stateful_tool_env", "verifiers.envs.tool_env", "StatefulToolEnv"),
    **_moved("verifiers.envs.tool_env", _LATE, "ToolMonitorRubric"),
    **{
        f"{package}.{name}": f"verifiers.integrations.{name.replace(old, new)}"
        for package in ("verifiers.envs", "verifiers.envs.integrations")
        for name, old, new in (
            ("textarena_env:TextArenaEnv", "textarena_env", "textarena"),
            ("reasoninggym_env:ReasoningGymEnv", "reasoninggym_env", "reasoning_gym"),
        )
    },
    **_moved("verifiers.parsers.maybe_think_parser", "verifiers.parsers.parser", "MaybeThinkParser"),
    **_moved("verifiers.parsers.think_parser", "verifiers.parsers.parser", "MaybeThinkParser ThinkParser"),
    **_moved("verifiers.rubrics.rubric_group", "verifiers.rubrics.rubric", "RubricGroup"),
    **_moved("verifiers.scripts.eval", "verifiers.cli.evaluate", "main"),
    **_moved("verifiers.utils.async_utils", "verifiers.envs.lifecycle", "maybe_await"),
    **_moved("verifiers.utils.async_utils", _LATE, "maybe_semaphore"),
    **_moved("verifiers.utils.client_utils", _LATE, "setup_client"),
    "verifiers.utils.client_utils:setup_openai_client": f"{_LATE}:setup_client",
    **_moved("verifiers.utils.config_utils", _LATE, "MissingKeyError ensure_keys"),
    **_moved(
        "verifiers.utils.data_utils",
        "verifiers.parsers.parser",
        "BOXED_SYSTEM_PROMPT THINK_BOXED_SYSTEM_PROMPT extract_boxed_answer extract_hash_answer",
    ),
    **_moved("verifiers.utils.data_utils", "verifiers.classic.example_datasets", "load_example_dataset"),
    **_moved("verifiers.utils.env_utils", "verifiers.envs.registry", "load_environment"),
    **_moved("verifiers.utils.error_utils", _LATE, "ErrorChain"),
    **_moved("verifiers.utils.eval_utils", "verifiers.envs.registry", "load_environment"),
    **_moved("verifiers.utils.logging_utils", "verifiers.log", "setup_logging"),
    **_moved("verifiers.utils.logging_utils", "verifiers.parsers.messages", "print_prompt_completions_sample"),
    **_moved("verifiers.utils.logging_utils", _LATE, "log_level quiet_verifiers"),
    **_moved(
        "verifiers.utils.message_utils",
        "verifiers.parsers.messages",
        "cleanup_message cleanup_messages message_to_printable messages_to_printable",
    ),
    **_moved("verifiers.utils.message_utils", _LATE, "concat_messages sanitize_tool_calls"),
    "verifiers.utils.message_utils:normalize_messages": "verifiers.types:as_messages",
    **_moved("verifiers.utils.response_utils", _LATE, "parse_response_message parse_response_messages"),
    **_moved("verifiers.utils.response_utils", "verifiers.classic.token_processing", "parse_response_tokens"),
    "verifiers.utils.save_utils:make_dataset": "verifiers.classic.outputs:to_dataset",
    **_moved("verifiers.trainers", "verifiers.train.config", "GRPOConfig grpo_defaults lora_defaults"),
    **_moved("verifiers.trainers", "verifiers.train.trainer", "GRPOTrainer"),
    **_moved("verifiers.trainers.async_batch_generator", "verifiers.rollouts.generator", "AsyncBatchGenerator"),
    **_moved("verifiers.trainers.async_batch_generator", "verifiers.rollouts.block", "BatchRequest"),
    **_moved("verifiers.trainers.grpo_config", "verifiers.train.config", "GRPOConfig"),
    **_moved("verifiers.trainers.grpo_trainer", "verifiers.data.sampler", "RepeatSampler"),
    **{
        name: target
        for module in (
            "verifiers.trainers.grpo_trainer",
            "verifiers.train.buffers",
            "verifiers.train.batching.buffers",
        )
        for name, target in {
            **_moved(module, "verifiers.data.sampler", "reorder_chunks"),
            **_moved(module, "verifiers.train.batching.advantages", "group_advantages"),
            **_moved(module, "verifiers.train.batching.micro_batches", "shuffle_tensor_dict split_tensor_dict"),
        }.items()
    },
    **_moved("verifiers.trainers.grpo_trainer", "verifiers.train.trainer", "GRPOTrainer"),
    **_moved("verifiers.utils.tool_utils", _LATE, "convert_func_to_tool_def"),
    **_moved("verifiers.utils.tool_utils", "verifiers.envs.tools", "convert_func_to_oai_tool"),
    **_moved("verifiers.utils.tools", "verifiers.envs.tools", "convert_func_to_oai_tool"),
}
"""The place of each name that has gone or moved, by its classic place; both as "module:name"."""

_HOSTED_MODULES = "envs.experimental envs.integrations gepa rl serve v1"
_HOSTED_NAMES = (
    "AnthropicMessagesClient BrowserEnv CLIHarness CliAgentEnv Env EnvConfig Harness HarnessConfig "
    "HarborTaskset HarborTasksetConfig MCPTool MCPToolConfig MiniSWEAgent OpenAIChatCompletionsClient "
    "OpenAICompletionsClient OpenAIResponsesClient OpenCode Pi RLConfig RLM RLMEnv RLTrainer RendererClient "
    "SandboxConfig Task Taskset TasksetConfig Toolset ToolsetConfig TunnelError User UserConfig advantage metric "
    "reward setup update"
)
_COMMAND_PARTS = "async_utils.maybe_retry save_utils.state_to_output save_utils.states_to_outputs"
_HOSTED = {
    *(f"verifiers.{path}" for path in f"{_HOSTED_MODULES} {_HOSTED_NAMES}".split()),
    *(f"verifiers.utils.{path}" for path in _COMMAND_PARTS.split()),
}


def _is_refused(path: str) -> bool:
    is_client = path.startswith("verifiers.clients.")
    return is_client or any(path == hosted or path.startswith(f"{hosted}.") for hosted in _HOSTED)


def classic_name(module: str, name: str) -> Any:
    """Return what a classic module has under a name.

    Raises:
        AttributeError: it has no such name here.
    """
    target = CLASSIC_NAMES.get(f"{module}:{name}")
    if target is not None:
        home, _, attribute = target.partition(":")
        return getattr(importlib.import_module(home), attribute)
    path = f"{module}.{name}"
    raise AttributeError(_refusal(path) if _is_refused(path) else f"module {module!r} has no attribute {name!r}")


def classic_spec(path: str) -> ModuleSpec | None:
    """Return how to import a module of the classic package that has no file; None for one that was never there.

    Args:
        path: of a module, or of a name that `from verifiers import NAME` did not find.

    Raises:
        ImportError: it is a part of the classic package that is not provided here.
    """
    holds_modules = any(module.startswith(f"{path}.") for module in _classic_modules())
    if not holds_modules and path not in _classic_modules():
        if _is_refused(path):
            raise ImportError(_refusal(path), name=path)
        return None
    # `from MODULE import NAME` shows why a name is refused where the module is a package
    holds_refused = path == "verifiers.clients" or any(path == hosted.rpartition(".")[0] for hosted in _HOSTED)
    return ModuleSpec(path, _ClassicModule(), is_package=holds_modules or holds_refused)  # type: ignore[arg-type]


class _ClassicModule:
    """The loader of a module whose names are elsewhere."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = _classic_modules().get(module.__name__, [])
        module.__getattr__ = functools.partial(classic_name, module.__name__)  # type: ignore[method-assign]


@functools.cache
def _classic_modules() -> dict[str, list[str]]:
    """Return the names of each module of the table."""
    modules: dict[str, list[str]] = {}
    for path in CLASSIC_NAMES:
        module, _, name = path.partition(":")
        modules.setdefault(module, []).append(name)
    return modules


def _refusal(path: str) -> str:
    part = "hosted or experimental part"
    instead = "vf.ToolEnv, vf.SandboxEnv and verifiers.integrations are what there is"
    if path.startswith("verifiers.clients."):
        part, instead = "client classes", "an environment is given an openai.AsyncOpenAI or a URL"
    elif path.startswith("verifiers.utils."):
        part, instead = "commands", "vf-eval and verifiers.evals retry rollouts and store them"
    return f"{path} belongs to the {part} of the classic verifiers, which this package does not provide; {instead}."
