"""Import paths and names of the classic package that have no file of their own here.

`verifiers` looks here for a submodule that it does not find, and `verifiers.types` for a name that it does not have.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verifiers.types import ModelResponse, Record

__all__ = ["ClassicModule", "classic_name", "spec_of"]

_TYPES = {
    "AssistantMessage": "verifiers.types:AssistantMessage",
    "ChatCompletion": "openai.types.chat:ChatCompletion",
    "ClientConfig": "verifiers.types:ClientConfig",
    "Completion": "openai.types:Completion",
    "DatasetBuilder": "verifiers.envs.classic.import_paths:DatasetBuilder",
    "GenerateMetadata": "verifiers.envs.classic.import_paths:GenerateMetadata",
    "Response": "verifiers.envs.classic.import_paths:Response",
    "RolloutOutput": "verifiers.envs.classic.import_paths:RolloutOutput",
    "RolloutTiming": "verifiers.envs.classic.import_paths:RolloutTiming",
    "Tool": "verifiers.envs.classic.tool_defs:ToolDef",
}
_SETUP = {"setup_client": "verifiers.envs.classic.clients:setup_client"}
_MODULES: dict[str, dict[str, str]] = {
    "verifiers.clients": {"Client": "openai:AsyncOpenAI", **_SETUP},
    "verifiers.decorators": {name: f"verifiers.envs.lifecycle:{name}" for name in ("stop", "cleanup", "teardown")},
    "verifiers.envs.python_env": {"PythonEnv": "verifiers.envs.sandbox_env:PythonEnv"},
    "verifiers.envs.reasoninggym_env": {
        "ReasoningGymEnv": "verifiers.integrations.reasoning_gym:ReasoningGymEnv",
    },
    "verifiers.envs.textarena_env": {"TextArenaEnv": "verifiers.integrations.textarena:TextArenaEnv"},
    "verifiers.parsers.maybe_think_parser": {"MaybeThinkParser": "verifiers.parsers.think_parser:MaybeThinkParser"},
    "verifiers.utils.env_utils": {"load_environment": "verifiers.envs.registry:load_environment"},
    "verifiers.utils.error_utils": {"ErrorChain": "verifiers.envs.classic.import_paths:ErrorChain"},
    "verifiers.utils.eval_utils": {"load_environment": "verifiers.envs.registry:load_environment"},
    "verifiers.utils.response_utils": {
        "parse_response_message": "verifiers.envs.classic.import_paths:parse_response_message",
    },
    "verifiers.utils.save_utils": {"make_dataset": "verifiers.envs.classic.batch_api:to_dataset"},
}
_REFUSED = (
    "verifiers.envs.experimental",
    "verifiers.envs.integrations",
    "verifiers.gepa",
    "verifiers.rl",
    "verifiers.serve",
    "verifiers.v1",
)

Response = ModelResponse
"""The late second generation's name of a model's answer."""

DatasetBuilder = Any
"""A function without arguments that returns a dataset."""


class GenerateMetadata(Record):
    """Figures that the rollouts of one call share: `results.metadata`."""


class RolloutOutput(Record):
    """One rollout of `results.outputs`."""


class RolloutTiming(Record):
    """Milliseconds of a rollout: generation_ms, scoring_ms, total_ms."""


class ErrorChain:
    """An error with its causes, as text.

    Args:
        error: the outermost.
    """

    def __init__(self, error: BaseException) -> None:
        self.root_error = error
        self.chain: list[BaseException] = []
        following: BaseException | None = error
        while following is not None and following not in self.chain:
            self.chain.append(following)
            following = following.__cause__

    def __str__(self) -> str:
        return " -> ".join(type(error).__name__ for error in self.chain)

    def __contains__(self, kind: type[BaseException]) -> bool:
        return any(isinstance(error, kind) for error in self.chain)


async def parse_response_message(response: Any) -> list[Any]:
    """Return a model's answer as messages."""
    from verifiers.inference.wire import assistant_message

    return [assistant_message(response.choices[0].message)]


def classic_name(module: str, name: str) -> Any:
    """Return what a classic module has under a name.

    Raises:
        AttributeError: it has no such name here.
    """
    target = (_TYPES if module == "verifiers.types" else _MODULES.get(module, {})).get(name)
    if target is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    path, _, attribute = target.partition(":")
    return getattr(importlib.import_module(path), attribute)


class ClassicModule(ModuleType):
    """A module of the classic package whose names are elsewhere here."""

    def __getattr__(self, name: str) -> Any:
        return classic_name(self.__name__, name)


class _Loader:
    """Makes a `ClassicModule`; there is nothing to run."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ClassicModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names: Mapping[str, str] = _MODULES[module.__name__]
        module.__dict__["__all__"] = sorted(names)


def spec_of(name: str) -> ModuleSpec | None:
    """Return how to import a classic module; None for a module that the classic package has not.

    Raises:
        ImportError: it is a part that is not provided here.
    """
    if any(name == path or name.startswith(f"{path}.") for path in _REFUSED):
        raise ImportError(
            f"{name} belongs to the hosted or experimental part of the classic verifiers, which this package does "
            "not provide; vf.ToolEnv, vf.SandboxEnv and verifiers.integrations are what there is.",
            name=name,
        )
    return ModuleSpec(name, _Loader()) if name in _MODULES else None  # type: ignore[arg-type]
