"""Section "Names": what packages of the classic API import, and from where."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from typing import Any

import pytest

import verifiers as vf
from verifiers.classic.import_paths import CLASSIC_NAMES


def names(text: str) -> list[str]:
    return text.split()


CLASSES = names("""Parser ThinkParser MaybeThinkParser XMLParser Rubric JudgeRubric RubricGroup ToolRubric MathRubric
    Environment MultiTurnEnv SingleTurnEnv ToolEnv StatefulToolEnv SandboxEnv PythonEnv EnvGroup TextArenaEnv
    ReasoningGymEnv GymEnv MCPEnv EpisodicSumRubric""")
FUNCTIONS = names("""extract_boxed_answer extract_hash_answer load_example_dataset setup_logging load_environment
    print_prompt_completions_sample stop cleanup teardown""")
TRAINING = names("get_model get_tokenizer get_model_and_tokenizer GRPOConfig GRPOTrainer grpo_defaults lora_defaults")
ERRORS = names("""Error ModelError EmptyModelResponseError OverlongPromptError ToolError ToolParseError ToolCallError
    InfraError SandboxError""")
TYPES = names("""ChatMessage Message Messages MessageType ModelResponse Info State SamplingArgs RewardFunc
    GenerateInputs GenerateOutputs RolloutScore RolloutScores ProcessedOutputs RolloutInput TrajectoryStep""")
# those of which the files are still there; CLASSIC_NAMES has the others
MODULES = {
    "verifiers.envs.env_group": "EnvGroup EnvGroupRubric",
    "verifiers.envs.environment": "Environment",
    "verifiers.envs.multiturn_env": "MultiTurnEnv",
    "verifiers.envs.sandbox_env": "SandboxEnv",
    "verifiers.envs.tool_env": "ToolEnv",
    "verifiers.parsers.parser": "Parser",
    "verifiers.parsers.xml_parser": "XMLParser",
    "verifiers.rubrics.judge_rubric": "JudgeRubric",
    "verifiers.rubrics.math_rubric": "MathRubric",
    "verifiers.rubrics.rubric": "Rubric",
    "verifiers.rubrics.tool_rubric": "ToolRubric",
    "verifiers.types": "Messages State ToolCall",
}


def test_every_promised_name_is_there() -> None:
    for name in CLASSES + FUNCTIONS + ERRORS + TYPES + TRAINING:
        if name in TRAINING and importlib.util.find_spec("torch") is None:
            continue
        value = getattr(vf, name)
        assert value is not None
        if name in CLASSES + ERRORS:
            assert (isinstance(value, type), value.__name__) == (True, name)
        assert name in dir(vf)


def test_every_promised_module_has_its_names() -> None:
    for module, names in MODULES.items():
        found = importlib.import_module(module)
        for name in names.split():
            value = getattr(found, name)
            if name in dir(vf):
                assert value is getattr(vf, name)


def test_every_moved_name_is_there() -> None:
    for old, target in CLASSIC_NAMES.items():
        module, _, name = old.partition(":")
        home, _, attribute = target.partition(":")
        found = importlib.import_module(module)
        assert getattr(found, name) is getattr(importlib.import_module(home), attribute)


def test_moved_modules_are_modules_in_every_form_of_import() -> None:
    names: dict[str, Any] = {}
    exec("from verifiers.utils.data_utils import *\nfrom verifiers.utils import tool_utils", names)
    assert names["extract_boxed_answer"] is vf.extract_boxed_answer
    assert names["tool_utils"] is importlib.import_module("verifiers.utils.tool_utils")
    exec("from verifiers.clients import client", names)
    assert names["client"].Client is vf.Client
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verifiers\.utils\.nothing'"):
        importlib.import_module("verifiers.utils.nothing")
    with pytest.raises(AttributeError, match=r"module 'verifiers\.utils\.env_utils' has no attribute 'nothing'"):
        _ = importlib.import_module("verifiers.utils.env_utils").nothing


@pytest.mark.parametrize("name", ["CliAgentEnv", "Env", "RLMEnv", "RLTrainer", "v1"])
def test_names_that_are_not_promised_say_so_in_both_forms_of_import(name: str) -> None:
    if name != "v1":
        with pytest.raises(AttributeError, match=f"verifiers.{name} belongs to .* does not provide"):
            getattr(vf, name)
        assert not hasattr(vf, name)
    with pytest.raises(ImportError, match=f"verifiers.{name} belongs to .* does not provide"):
        exec(f"from verifiers import {name}")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("envs.experimental.rlm_env", "vf.ToolEnv, vf.SandboxEnv and verifiers.integrations are what there is"),
        ("envs.integrations.browser_env", "vf.ToolEnv, vf.SandboxEnv and verifiers.integrations are what there is"),
        ("clients.OpenAIChatCompletionsClient", "an environment is given an openai.AsyncOpenAI or a URL"),
        ("clients.resolve_client", "an environment is given an openai.AsyncOpenAI or a URL"),
        ("clients.openai_chat_completions_client.OpenAIChatCompletionsClient", "an openai.AsyncOpenAI or a URL"),
        ("utils.async_utils.maybe_retry", "vf-eval and verifiers.evals retry rollouts and store them"),
        ("utils.save_utils.states_to_outputs", "vf-eval and verifiers.evals retry rollouts and store them"),
    ],
)
def test_a_name_of_a_moved_module_that_is_not_promised_says_so(path: str, instead: str) -> None:
    module, _, name = f"verifiers.{path}".rpartition(".")
    with pytest.raises(ImportError, match=rf"^verifiers\.[\w.]+ belongs to .* does not provide; .*{instead}"):
        exec(f"from {module} import {name}")
    if "_client." not in path:
        with pytest.raises(AttributeError, match=rf"^verifiers\.{path} belongs to .*{instead}"):
            getattr(importlib.import_module(module), name)


# -- small functions and classes --------------------------------------------------------------------------------


async def test_monitor_rubrics_measure_without_changing_the_reward() -> None:
    from verifiers.envs.multiturn_env import MultiTurnMonitorRubric
    from verifiers.envs.sandbox_env import SandboxMonitorRubric
    from verifiers.envs.tool_env import ToolMonitorRubric

    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    completion = [{"role": "assistant", "content": "", "tool_calls": calls}]
    times = {"ready": True, "ready_wait_time": 2.0, "command_execution_times": [1.0, 4.0]}
    tools = ToolMonitorRubric(tool_names=["sub"])
    tools.add_tool_metric("add")
    tools.remove_tool_metric("sub")
    for rubric, expected in (
        (MultiTurnMonitorRubric(), {"num_turns": 1.0}),
        (SandboxMonitorRubric(), {"sandbox_ready_wait_time": 2.0, "sandbox_command_execution_time": 2.5}),
        (tools, {"total_tool_calls": 1.0, "add_calls": 1.0}),
    ):
        state = vf.State(trajectory=[{}], sandbox_state=times)
        score = await rubric.score_rollout("q", completion, "", state)
        assert (score.reward, score.metrics) == (0.0, expected)


def test_a_client_is_made_of_a_config_a_mapping_or_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.types import ClientConfig
    from verifiers.utils.client_utils import setup_client

    monkeypatch.setenv("MY_KEY", "sk-1")
    config = ClientConfig(api_key_var="MY_KEY", api_base_url="http://127.0.0.1:9/v1", extra_headers={"X-Team": "a"})
    for given in (config, {name: getattr(config, name) for name in ("api_key_var", "api_base_url", "extra_headers")}):
        client = setup_client(given, timeout=7.0)
        assert str(client.base_url) == "http://127.0.0.1:9/v1/"
        assert (client.api_key, client.timeout, client.max_retries) == ("sk-1", 7.0, 10)
        assert client._custom_headers == {"X-Team": "a"}
    monkeypatch.delenv("MY_KEY")
    assert setup_client(config).api_key == "EMPTY"
    with pytest.raises(ValueError, match="setup_client has no setting 'base'"):
        setup_client({"base": "x"})


def printed(monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> str:
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", out)
    vf.print_prompt_completions_sample(*args, **kwargs)
    return out.getvalue()


def test_a_sample_of_rollouts_is_printed_with_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    prompts = [[{"role": "user", "content": f"question {n} [bold]"}] for n in range(3)]
    completions: list[Any] = [
        [{"role": "assistant", "content": f"answer {n}", "tool_calls": [call]}] for n in range(3)
    ]
    text = printed(monkeypatch, prompts, completions, [0.25, 0.5, 1.0], 7, num_samples=2)
    assert "Step 7" in text
    assert ["question 0 [bold]" in text, "answer 1" in text, "answer 2" in text] == [True, True, False]
    assert ["0.25" in text, "0.50" in text, "1.00" in text, '"name": "add"' in text] == [True, True, False, True]
    assert "0.25" in printed(monkeypatch, ["a"], ["b"], {"reward": [0.25]}, 1)
    newest = printed(monkeypatch, ["a"], ["b"], [ValueError("broke")], [0.25], 3, 1)
    assert ("Step 3" in newest, "0.25" in newest, "broke" in newest) == (True, True, True)
    assert "0.25" in printed(monkeypatch, prompts=["a"], completions=["b"], rewards=[0.25], step=1, num_samples=5)
