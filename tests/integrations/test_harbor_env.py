"""HarborEnv: task folders as they are read, and twelve of them played in containers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.cli.evaluate import main as evaluate
from verifiers.inference.endpoint import ClientBackend, Endpoint, HttpBackend
from verifiers.integrations.harbor import HarborEnv
from verifiers.integrations.harbor_task import read_rewards, read_tasks, without_canary
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient, FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

TASKS = Path(__file__).with_name("harbor_tasks")
REWARDS: dict[str, tuple[str, float | None]] = {
    **dict.fromkeys(("agent-timeout", "files", "full-disk", "healthcheck", "mend-program"), ("completed", 1.0)),
    **dict.fromkeys(("reward-json", "start-server", "two-steps", "two-users"), ("completed", 1.0)),
    **dict.fromkeys(("hanging-test", "malformed-reward"), ("grading_error", None)),
    "failing-build": ("environment_error", None),
}


def copy_of(name: str, directory: Path, toml: str | None = None) -> Path:
    folder = directory / name
    shutil.copytree(TASKS / name, folder)
    if toml is not None:
        (folder / "task.toml").write_text(toml)
    return folder


# -- reading --------------------------------------------------------------------------------------------------------


def test_a_row_is_a_task_with_its_instruction_and_without_canary() -> None:
    env = HarborEnv(TASKS, tool="podman")
    rows = {row["task"]: row for row in env.get_eval_dataset()}
    assert sorted(rows) == sorted(REWARDS)
    asked = rows["files"]["prompt"][-1]["content"]
    assert asked.startswith("Copy every .txt file")
    assert "canary" not in asked
    # the first step's; the second is asked when that is done
    assert rows["two-steps"]["prompt"][-1]["content"] == 'Write "one" into /app/draft.'
    assert without_canary("# a canary\n<!-- CANARY b -->\n\n# Title\ncanary birds\n") == "# Title\ncanary birds"


def test_older_schemas_mean_the_same() -> None:
    [task] = read_tasks(TASKS / "mend-program")
    assert (task.environment.memory_mb, task.environment.storage_mb) == (256, 64)
    [step] = task.steps
    assert (step.agent_timeout_s, step.verifier_timeout_s) == (60, 600)


def test_steps_take_what_they_do_not_say_from_the_task(tmp_path: Path) -> None:
    table = (TASKS / "two-steps/task.toml").read_text()
    table += 'agent = { timeout_sec = 7, user = "worker" }\n\n[agent]\ntimeout_sec = 9\n[verifier.env]\nA = "1"\n'
    [task] = read_tasks(copy_of("two-steps", tmp_path, table))
    assert [(step.agent_timeout_s, step.agent_user) for step in task.steps] == [(9, None), (7, "worker")]
    assert [dict(step.verifier_env) for step in task.steps] == [{"A": "1"}] * 2
    assert task.steps[0].min_reward == {"reward": 0.5}


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ('[environment]\nos = "windows"', "os = 'windows'"),
        ("[environment]\ngpus = 1", "gpus = 1"),
        ('[environment.tpu]\ntype = "v5"', "a TPU"),
        ('[[environment.mcp_servers]]\nname = "files"', "MCP servers"),
        ('[verifier]\nenvironment_mode = "separate"', "a container of its own for the verifier"),
        ('artifacts = [{ source = "/log", service = "db" }]', "artifacts of another service"),
        ('[verifier.env]\nKEY = "${NO_SUCH_VARIABLE}"', "the variable NO_SUCH_VARIABLE for KEY, which is not set"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ("environment = 5", "environment: Input should be"),
        ("[environment]\nmemory = 2048", "memory = 2048 is no size"),
        ("[environment]\nmemory = '2GB'", "memory = '2GB' is no size"),
        ("[environment", "task.toml cannot be read"),
        ('[[steps]]\nname = "../out"', "no name of a folder"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(toml: str, text: str, tmp_path: Path) -> None:
    copy_of("files", tmp_path, toml)
    with pytest.raises(vf.ConfigError) as raised:
        read_tasks(tmp_path)
    assert text in str(raised.value)
    copy_of("healthcheck", tmp_path)
    assert [task.name for task in read_tasks(tmp_path, ["health*"])] == ["healthcheck"]


def test_several_services_a_list_of_hosts_and_missing_files_are_refused(tmp_path: Path) -> None:
    folder = copy_of("files", tmp_path, '[environment]\nnetwork_mode = "allowlist"\n')
    with pytest.raises(vf.ConfigError, match="'files' needs a network with a list of hosts"):
        HarborEnv(folder, network="task", tool="podman")
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(vf.ConfigError, match="'files' needs several services"):
        read_tasks(folder)
    (folder / "environment/docker-compose.yaml").unlink()
    (folder / "tests/test.sh").unlink()
    with pytest.raises(vf.ConfigError, match=r"no files/tests/test\.sh"):
        read_tasks(folder)
    with pytest.raises(vf.ConfigError, match="is no task folder"):
        read_tasks(folder / "tests")


def test_keys_that_are_not_known_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("files", "healthcheck"):
        copy_of(name, tmp_path, "colour = 1\n[environment]\nram = 3\n")
    with caplog.at_level(logging.WARNING, "verifiers.envs"):
        read_tasks(tmp_path)
    assert [
        word for record in caplog.records for word in ("colour", "environment.ram") if word in record.message
    ] == [*("colour", "environment.ram")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"agent": "mine {promt}"}, r"no placeholder \{promt\}; did you mean \{prompt\}"),
        ({"agent": ["mine", "{promt}"]}, r"no placeholder \{promt\}; did you mean \{prompt\}"),
        ({"agent": "mine 'Solve: {prompt}'"}, "outside of quotes"),
        ({"agent": 'mine "{task}" {prompt}'}, "outside of quotes"),
        # by its characters "*" would be every task
        ({"tasks": "files*"}, r"tasks is the text 'files\*'; give a list"),
        ({"eval_tasks": "files"}, "eval_tasks is the text"),
        ({"readable": "/agents"}, "readable is the text"),
    ],
    ids=str,
)
def test_arguments_that_mean_something_else_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(vf.ConfigError, match=text):
        HarborEnv(TASKS, tool="podman", **arguments)


def test_tasks_that_are_held_out_are_evaluated_and_never_trained() -> None:
    env = vf.HarborEnv(TASKS, tool="podman", eval_tasks=["two-*"])
    assert set(env.get_eval_dataset()["task"]) == {"two-steps", "two-users"}
    assert set(env.get_dataset()["task"]) == {*REWARDS} - {"two-steps", "two-users"}
    with pytest.raises(vf.ConfigError, match=r"no task is named 'three-\*'; there are \['agent-timeout'"):
        vf.HarborEnv(TASKS, tool="podman", eval_tasks=["three-*"])
    with pytest.raises(vf.ConfigError, match="none is left to train on"):
        vf.HarborEnv(TASKS, tool="podman", eval_tasks=["*"])


def test_an_edited_task_is_another_row(tmp_path: Path) -> None:
    folder = copy_of("files", tmp_path)
    before = read_tasks(folder)[0]
    (folder / "tests/test.sh").chmod(0o644)
    tests = read_tasks(folder)[0]
    assert (tests.digest == before.digest, tests.image_digest == before.image_digest) == (False, True)
    # a name from an archive of another system
    (folder / "environment" / os.fsdecode(b"caf\xe9")).touch()
    assert read_tasks(folder)[0].image_digest != before.image_digest


@pytest.mark.parametrize(
    ("name", "text", "rewards"),
    [
        ("reward.txt", " 0.5\n", {"reward": 0.5}),
        ("reward.json", "1", {"reward": 1.0}),
        ("reward.json", '{"a": 1, "b": 0}', {"a": 1.0, "b": 0.0}),
        *(("reward.txt", text, None) for text in ("", "nan", "great")),
        *(("reward.json", text, None) for text in ("{}", "[1]", '{"a": "1"}', '{"a": 1e999}', "{")),
    ],
)
def test_a_reward_is_a_finite_number_or_a_table_of_them(
    name: str, text: str, rewards: dict[str, float] | None
) -> None:
    problem, found = read_rewards(name, text)
    assert (found, bool(problem)) == (rewards or {}, rewards is None)


# -- playing --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
def test_the_oracle_scores_each_task_as_it_should_and_goes_on_from_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [f"harbor:{TASKS}", "--agent", "oracle", "-r", "1", "-n"]
    assert evaluate([*command, "4"]) == 0
    assert evaluate([*command, "-1"]) == 0
    # the build that fails is tried again
    assert "3 of 12 rollouts are there" in capsys.readouterr().err
    [stored] = tmp_path.glob("outputs/evals/*/*/results.jsonl")
    rows = {row["task"]: row for row in map(json.loads, stored.read_text().splitlines())}
    assert {name: (row["outcome"], row["reward"]) for name, row in rows.items()} == REWARDS
    assert rows["reward-json"]["metrics"]["length"] == 3
    assert "there is no compiler here" in rows["failing-build"]["error"]
    assert "great" in rows["malformed-reward"]["error"]
    assert "verifier.timeout_sec=3" in rows["hanging-test"]["error"]
    assert rows["mend-program"]["info"]["test_output"] == "2 of 2 are right\n"
    assert rows["two-steps"]["info"]["artifacts"] == {"/app/draft": "one\n"}
    assert "2 of 2 are right" in (stored.parent / "report.html").read_text()


def shell(*commands: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "shell", "arguments": {"command": command}} for command in commands]}


async def played(env: Any, backend: Any, name: str, **options: Any) -> Rollout:
    row = next(row for row in env.get_eval_dataset() if row["task"] == name)
    info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
    runner = Run(env, backend, "fake", {}, **options)
    group = await runner.run_group([RolloutRequest(RolloutKey(0, 0, 0), row["prompt"], task=name, info=info)])
    return group.rollouts[0]


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_a_policy_works_by_the_tool_shell_and_never_sees_the_tests() -> None:
    env = HarborEnv(TASKS, tool="podman", tasks=["mend-program", "two-users"])
    looks = "ls -d /tests /solution; cat /logs/verifier/*; id -un; echo hello > /app/kept"
    mends = "cat kept; sed -i 's/numbers = list/numbers = sorted/' median.py"
    answers = [shell(looks), shell(mends), "Done."]
    rollout = await played(env, ClientBackend(FakeClient(answers)), "mend-program")
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 1.0, 3), rollout.failure
    first, second = [message["content"] for message in rollout.completion if message["role"] == "tool"]
    assert first.count("No such file") == 3
    assert "root" in first
    assert second == "hello"
    idle = await played(env, ClientBackend(FakeClient(["I would rather not."])), "mend-program")
    assert (idle.outcome, idle.reward) == (Outcome.COMPLETED, 0.0)
    by_worker = await played(env, ClientBackend(FakeClient([shell("id -un", "cat /root/secret"), "ok"])), "two-users")
    assert "worker" in str(by_worker.completion)
    assert "Permission denied" in str(by_worker.completion)


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
@pytest.mark.parametrize(
    "last",
    ["rm -rf /app", "rm -rf /app; sleep 60", "rm -rf /app /logs; touch /app /logs"],
    ids=["gone", "late", "file"],
)
@pytest.mark.parametrize("workdir", ["/app", "/app/tests"])
async def test_a_policy_that_removes_its_directory_is_tested_by_what_it_left(
    last: str, workdir: str, tmp_path: Path
) -> None:
    folder = copy_of("mend-program", tmp_path)
    with (folder / "environment/Dockerfile").open("a") as file:
        file.write(f"WORKDIR {workdir}\n")
    env = HarborEnv(folder, tool="podman", command_timeout_s=2)
    answers = [shell(last), shell("echo on"), "Done."]
    rollout = await played(env, ClientBackend(FakeClient(answers)), "mend-program")
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 0.0), rollout.failure


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_an_agent_is_the_images_user_or_one_that_is_there(tmp_path: Path) -> None:
    folder = copy_of("two-users", tmp_path, "[verifier]\nuser = 'root'\nenv = { EXPECTED = 'worker' }\n")
    with (folder / "environment/Dockerfile").open("a") as dockerfile:
        dockerfile.write("USER worker\n")
    writes = [shell("echo $(id -un) hello > who"), "ok"]
    rollout = await played(HarborEnv(folder, tool="podman"), ClientBackend(FakeClient(writes)), "two-users")
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 1.0), rollout.failure
    (folder / "task.toml").write_text("[agent]\nuser = 'wroker'\n")
    rollout = await played(HarborEnv(folder, tool="podman"), ClientBackend(FakeClient(writes)), "two-users")
    assert (rollout.outcome, rollout.turns) == (Outcome.ENVIRONMENT_ERROR, 0)
    assert "user 'wroker'" in str(rollout.failure)


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_a_tasks_variables_are_not_the_tools_and_no_argument_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARBOR_KEY", "worker-4711")
    toml = '[environment]\nenv = { EXPECTED = "${HARBOR_KEY}" }\n[verifier]\nenv = { CONTAINERS_CONF = "/nowhere" }\n'
    folder = copy_of("two-users", tmp_path, toml)
    test = '[ "$(cat who)" = $EXPECTED$CONTAINERS_CONF ] && echo 1 > /logs/verifier/reward.txt'
    (folder / "tests/test.sh").write_text(test)
    arguments = []

    def answer(body: dict[str, Any]) -> Any:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                arguments.append(file.read_bytes())
        return "ok" if len(body["messages"]) > 3 else shell("echo $EXPECTED/nowhere > who")

    rollout = await played(HarborEnv(folder, tool="podman"), ClientBackend(FakeClient(answer)), "two-users")
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 1.0), rollout.failure
    assert b"podman" in b"".join(arguments)
    assert b"worker-4711" not in b"".join(arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_steps_are_asked_one_after_the_other_and_end_below_min_reward() -> None:
    env = HarborEnv(TASKS / "two-steps", tool="podman")
    answers = [shell("echo one > draft"), "Done.", shell("ls /tests; cat draft more > final"), "Done."]
    rollout = await played(env, ClientBackend(FakeClient(answers)), "two-steps")
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 0.5, 4), rollout.failure
    asked = [message["content"] for message in rollout.completion if message["role"] == "user"]
    assert [text.split(",")[0] for text in asked] == ["Write the text of /app/draft and that of /app/more"]
    early = await played(env, ClientBackend(FakeClient(["Done."])), "two-steps")
    assert (early.outcome, early.reward, early.turns) == (Outcome.COMPLETED, 0.0, 1), early.failure


AGENT = """
import json, os, subprocess, sys, urllib.request

body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("ran", said)
subprocess.run(said, shell=True, check=True)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_a_mounted_agent_inside_reaches_the_gateway_alone_and_is_trained(agent: Path) -> None:
    words = ["python3", str(agent), "{prompt}"]
    env = HarborEnv(TASKS / "reward-json", words, tool="podman", readable=[str(agent)])
    answer = "echo 42 > answer; ls /sys/class/net > /logs/artifacts/net"
    async with FakeOpenAIServer(answer) as server:
        backend = HttpBackend(Endpoint(server.url))
        rollout = await played(env, backend, "reward-json", require_tokens=True)
        await backend.close()
    assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 1.0, 1), rollout.failure
    assert len(rollout.rows) == 1
    assert rollout.completion == [{"role": "assistant", "content": f"ran {answer}"}]
    assert rollout.info["artifacts"] == {"/logs/artifacts/net": "lo\n"}
    assert server.requests[0].body["messages"][-1]["content"].startswith("Write the number 42")
    env = HarborEnv(TASKS / "two-steps", f"exec python3 {agent} {{prompt}}", tool="podman", readable=[str(agent)])
    async with FakeOpenAIServer(["echo one > draft", "echo $(cat draft more) > final"]) as server:
        backend = HttpBackend(Endpoint(server.url))
        steps = await played(env, backend, "two-steps")
        await backend.close()
    assert (steps.outcome, steps.reward, steps.turns) == (Outcome.COMPLETED, 1.0, 2), steps.failure
    # one that does not start says why
    env = HarborEnv(TASKS / "reward-json", "pyhton3 {prompt}", tool="podman")
    lost = await played(env, ClientBackend(FakeClient("unasked")), "reward-json")
    assert (lost.outcome, lost.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "pyhton3: not found" in str(lost.failure)
    # a line, too, is given all of the instruction as it is
    assert server.requests[0].body["messages"][-1]["content"] == 'Write "one" into /app/draft.'


@pytest.mark.slow
@pytest.mark.usefixtures("podman")
async def test_an_agent_cannot_write_its_own_reward() -> None:
    env = HarborEnv(TASKS / "reward-json", tool="podman")
    forged = "echo 1 > /logs/verifier/reward.txt; mkdir /tests; ln -s /app/mine /tests/test.sh; echo 1 > mine"
    rollout = await played(env, ClientBackend(FakeClient([shell(forged), "ok"])), "reward-json")
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 0.0), rollout.failure
