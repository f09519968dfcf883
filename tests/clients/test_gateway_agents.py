"""Other people's SDKs and agents behind the gateway, over the embedded server: trained rows are what was sampled.

The policy was taught to call the tools it is offered. The witness is the server's answers as they came in,
before any part of the recording saw them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
from client_world import AGENTS_OF_NPM, AIDER, CLIENTS, LITELLM, taught_model

import verifiers as vf
from verifiers.inference.token_in import TokenIn
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.sandbox.spec import SandboxSpec
from verifiers.types import Outcome, RolloutKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# system prompts of some thousand characters, and tools by the dozen, are not what a model of this size is for: it
# sees four letters of each message, and 24 of the names
TEMPLATE = (
    "{% if tools %}<tools>{{ (tools | map(attribute='function.name') | join(' '))[:24] }} </tools>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<bot>{{ (m.content or '')[:16] }}{% else %}<user>{{ m.content[:4] }}{% endif %}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments }}}</tool_call>{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    # with two spaces, as no program writes it: what comes back is to be what was sampled, not what it means
    written = json.dumps(arguments, separators=(",", ":  "))
    return f'<tool_call>{{"name": "{name}", "arguments": {written}}}</tool_call>'


ADD = call("add", a=1, b=2)
FINAL = call("final_answer", answer="It is 3.")
COUNT = call("bash", command="echo 3 >sum")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT;cat sum")


# the first 16 letters of what smolagents makes of a call, whole and streamed
TOOL_CALL_HEADERS = ["Calling tools:\n[", "\nCalling tools:\n"]


def examples(rng: random.Random) -> list[tuple[str, str]]:
    """Return each point at which the policy speaks, with what it says there."""

    def said(*known: str) -> str:
        return "<user>" + rng.choice([*known, "".join(rng.choices(string.ascii_letters, k=4))])

    before = rng.choice(["", said("Add.", "You ")]) + said("What")
    many = "".join(rng.choices(string.ascii_letters + "_ ", k=24))
    offered = rng.choice(["", f"<tools>{many} </tools>"])
    one, two, shell = (f"<tools>{names} </tools>{before}<bot>" for names in ("add", "add final_answer", "bash"))
    return [
        (one, f"{ADD}<eos>"),
        (f"{one}{ADD}<eos>{said('3')}<bot>", "It is 3.<eos>"),
        (two, f"{ADD}<eos>"),
        (f"{two}{rng.choice(TOOL_CALL_HEADERS)}<eos>{said('Obse')}<bot>", f"{FINAL}<eos>"),
        (f"{offered}{''.join(said() for _ in range(rng.randint(1, 4)))}<bot>", "It is 3.<eos>"),
        (shell, f"{COUNT}<eos>"),
        (f"{shell}{COUNT}<eos>{said()}<bot>", f"{SUBMIT}<eos>"),
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny_world.EmbeddedServer]:
    directory = tmp_path_factory.mktemp("agents") / "model"
    with tiny_world.EmbeddedServer(taught_model(directory, TEMPLATE, examples, steps=200)) as running:
        yield running


def env_of(name: str, modes: list[str], directory: Path) -> vf.AgentEnv:
    script = Path(__file__).parent / "scripts" / "gateway_agents.py"

    def run(row: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        environment = {"HOME": str(directory), "PATH": os.environ["PATH"], **LITELLM, "MSWEA_SILENT_STARTUP": "1"}
        environment |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        command = [str(CLIENTS / "python"), str(script), name, *modes]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return {"told": json.loads(done.stdout.splitlines()[-1])}

    return vf.AgentEnv(
        run, dataset=[{"question": "?"}], rubric=vf.Rubric(funcs=[lambda state: float(bool(state["told"]))])
    )


async def played(env: vf.AgentEnv, backend: tiny_world.RecordingBackend) -> Rollout:
    runner = Run(
        env,
        backend,
        "policy",
        {"temperature": 0.2, "max_tokens": 200},
        require_tokens=True,
        token_in=TokenIn(backend, "policy"),
    )
    group = await runner.run_group(
        [RolloutRequest(RolloutKey(0, 0, 0), [{"role": "user", "content": "?"}], "", seed=3)]
    )
    await backend.close()
    return group.rollouts[0]


def trained(rollout: Rollout) -> list[tuple[list[int], list[int], list[float]]]:
    """Return (all before, sampled ids, log-probs) of each trained span."""
    return [
        span
        for row in rollout.rows
        for span in tiny_world.spans((row.prompt_ids, row.completion_ids, row.loss_mask, row.logprobs))
    ]


ADDS = ([ADD, "It is 3."], [[1, 2]], "It is 3.")
AGENTS: dict[str, tuple[list[str], Any, str]] = {
    "openai_chat": ADDS,
    "openai_responses": ADDS,
    "anthropic": ADDS,
    "litellm": ADDS,
    "openai_agents": ADDS,
    "pydantic_ai": ADDS,
    "smolagents": ([ADD, FINAL], [[1, 2]], "It is 3."),
    "mini_swe_agent": ([COUNT, SUBMIT], ["3\n"], "3\n"),
}
"""Scripted answers of the policy for each client, its tool's arguments, and its final answer."""


@pytest.mark.parametrize("name", AGENTS)
async def test_what_an_agent_trains_is_what_the_server_sampled(
    policy: tiny_world.EmbeddedServer, tmp_path: Path, name: str
) -> None:
    if not (CLIENTS / "python").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    modes = ["whole"] if name == "mini_swe_agent" else ["whole", "streamed"]
    backend = tiny_world.RecordingBackend(policy.url)
    rollout = await played(env_of(name, modes, tmp_path), backend)
    assert rollout.outcome is Outcome.COMPLETED, rollout.failure
    sampled, called, final = AGENTS[name]
    # the agent did its work: it read the calls, executed them, and read the answer
    assert rollout.state["told"] == [[called, final]] * len(modes)
    answers = backend.sampled()
    decode = policy.loaded.tokenizer.decode
    assert [decode(ids) for _, ids, _ in answers] == [f"{text}<eos>" for text in sampled] * len(modes)
    # each answer once, behind all that the server read before it, and with its log-probs
    assert sorted(trained(rollout)) == sorted(answers)


# -- coding agents, which are programs -----------------------------------------------------------------------------

CODEX = 'model_providers.gateway={name="gateway",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "gateway",
    "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
    "models": {"policy": {"name": "policy"}},
}
QUIET = [
    "--no-git",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--analytics-disable",
]
AIDER_CALL = 'OPENAI_API_BASE=$OPENAI_BASE_URL exec aider --model "openai/$0" --message "$1" "${@:2}"'
CODING_AGENTS: dict[str, list[str]] = {
    "claude": ["claude", "-p", "{prompt}", "--model", "{model}"],
    "codex": ["codex", "exec", "--skip-git-repo-check", "-m", "{model}", "-c", 'model_provider="gateway"', "-c",
              CODEX, "{prompt}"],
    "qwen": ["qwen", "-p", "{prompt}", "--auth-type", "openai"],
    "opencode": ["opencode", "run", "-m", "gateway/{model}", "{prompt}"],
    "aider": ["bash", "-c", AIDER_CALL, "{model}", "{prompt}", "--yes-always", *QUIET],
}  # fmt: skip


@pytest.mark.parametrize("name", CODING_AGENTS)
async def test_what_a_coding_agent_trains_is_what_the_server_sampled(
    policy: tiny_world.EmbeddedServer, name: str, tmp_path: Path
) -> None:
    path = f"{AGENTS_OF_NPM}:{AIDER}:{os.environ['PATH']}"
    if shutil.which(name, path=f"{AGENTS_OF_NPM}:{AIDER}") is None:
        pytest.skip(f"{name} is not installed; run: make test-clients, where there is npm")
    environment = {**LITELLM, "PATH": path, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    env = vf.ProgramEnv(
        CODING_AGENTS[name],
        files={"opencode.json": json.dumps({"provider": {"gateway": OPENCODE}})},
        sandbox=SandboxSpec(
            "process", env=environment, wall_time_s=200.0, cpu_time_s=200.0, memory_bytes=1 << 42, processes=512
        ),
        train="*",
        dataset=[{"question": "What is 1+2?"}],
        rubric=vf.Rubric(funcs=[lambda state: float(bool(state["stdout"].strip()))]),
    )
    backend = tiny_world.RecordingBackend(policy.url)
    rollout = await played(env, backend)
    assert rollout.outcome is Outcome.COMPLETED, rollout.failure
    assert rollout.state["stdout"].strip()
    answers = backend.sampled()
    assert answers
    assert sorted(trained(rollout)) == sorted(answers)
