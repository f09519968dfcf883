"""vf-eval: a table and files for people and machines, and one sentence for what went wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import validate_repo_id

from verifiers.cli.evaluate import main
from verifiers.evals.store import read_run
from verifiers.testing import FakeOpenAIServer, Fault

KEY = "sk-secret-0123456789"
OTHER_KEY = "other-canary-9876543210"


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """-v sets up the package's logger for the process, which is the test run's here."""
    logger = logging.getLogger("verifiers")
    before = logger.level, logger.handlers[:], logger.propagate
    yield
    logger.level, logger.handlers[:], logger.propagate = before


def test_a_table_is_printed_and_every_rollout_is_written(
    server: FakeOpenAIServer, env_name: str, capsys: pytest.CaptureFixture[str], results: Any
) -> None:
    arguments = [env_name, "-m", "org/policy", "-b", server.url, "-n", "2", "-r", "3", "-T", "0.5", "-t", "9"]
    assert main([*arguments, "-S", '{"top_p": 0.9}', "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "toy-sums-env / org/policy" in shown
    assert "reward: mean 1.000, ± stderr 0.000, 95 % interval" in shown
    assert "scored 6 of 6" in shown
    assert re.search(
        r"^pass@3: mean 1\.000, ± stderr 0\.000, 95 % interval 0\.\d{3} \.\. 1\.000, scored 6 of 6$", shown, re.M
    )
    assert "pass^2: mean 1.000" in shown
    assert "6 rollouts of 2 prompts" in shown
    assert "2 of 2 prompts are training rows too: this is not a held-out reward" in shown
    assert "6 completed; 0 retries; 12 completion tokens" in shown
    directory = results.directory
    assert directory.parent.name == "toy-sums-env--org--policy"
    assert str(directory / "results.jsonl") in shown
    rows = results.rows
    assert sorted((row["example_id"], row["generation"]) for row in rows) == [
        (e, g) for e in (0, 1) for g in range(3)
    ]
    row = rows[0]
    assert (row["outcome"], row["reward"], row["good"], row["error"]) == ("completed", 1.0, 1.0, None)
    assert row["completion"] == [{"role": "assistant", "content": "4"}]
    assert {"prompt", "answer", "task", "info", "generation_ms", "scoring_ms", "completion_tokens"} <= set(row)
    body = server.requests[0].body
    assert (body["model"], body["temperature"], body["max_completion_tokens"], body["top_p"]) == (
        "org/policy",
        0.5,
        9,
        0.9,
    )
    assert len({request.body["seed"] for request in server.requests}) == 6
    metadata = json.loads((directory / "metadata.json").read_text())
    assert (metadata["model"], metadata["num_examples"], metadata["rollouts_per_example"]) == ("org/policy", 2, 3)
    assert metadata["summary"]["rewards"]["reward"]["mean"] == 1.0
    assert metadata["prompts_trained_on"] == metadata["summary"]["prompts_trained_on"] == 2
    assert metadata["versions"]["python"] == sys.version.split()[0]
    assert (metadata["api_key_var"], metadata["status"]) == ("OPENAI_API_KEY", "finished")
    assert {"git", "identity", "env_source", "max_concurrent", "rollout_timeout_s"} <= set(metadata)


@pytest.mark.parametrize("workers", ["inline", "processes:1"])
def test_tool_calls_that_fail_are_counted_and_the_first_is_named(
    env_name: str, capsys: pytest.CaptureFixture[str], results: Any, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    source = Path("modules/toy_sums_env.py").read_text().replace("SingleTurnEnv(", "ToolEnv(tools=[look], ")
    look = 'def look(at: int) -> int:\n    """Look."""\n    raise OSError(f"no\\nlight at {at}\\x1b[2J, %s")\n' % KEY  # noqa: UP031
    Path("modules/toy_sums_env.py").write_text(f"{source}\n\n{look}")
    calls = [{"name": "look", "arguments": {"at": 3}}] * 2

    def answer(body: dict[str, Any]) -> Any:
        return {"content": "4", "refusal": "no"} if body["messages"][-1]["role"] == "tool" else {"tool_calls": calls}

    with FakeOpenAIServer(answer) as server:
        command = [env_name, "-b", server.url, "-k", "MY_KEY", "-n", "1", "-r", "2", "--workers", workers]
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert main([*command, "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
    assert "4 tool calls failed, the first: OSError: no light at 3?[2J, " in shown
    assert KEY not in shown + json.dumps(summary)
    assert summary["tool_call_errors"] == results.metadata["summary"]["tool_call_errors"] == 4
    assert summary["first_tool_call_error"].startswith("OSError: no\nlight")
    assert [(len(row["tool_call_errors"]), row["refusal"]) for row in results.rows] == [(2, "no")] * 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"content": "", "refusal": "I\nwill not."}, "I\nwill not."),
        ({"content": "4", "finish_reason": "content_filter"}, "content_filter"),
    ],
)
def test_refusals_and_filtered_answers_are_counted_and_stand_in_row_and_report(
    env_name: str, capsys: pytest.CaptureFixture[str], results: Any, answer: dict[str, Any], why: str
) -> None:
    with FakeOpenAIServer(answer) as server:
        assert main([env_name, "-b", server.url, "-n", "1", "-r", "2"]) == 0
    said = f"2 rollouts ended with a refusal or a filtered answer, the first: {' '.join(why.split())}"
    assert said in capsys.readouterr().out
    assert results.metadata["summary"]["refusals"] == 2
    assert [(row["outcome"], row["refusal"]) for row in results.rows] == [("completed", why)] * 2
    assert "refused: " in (results.directory / "report.html").read_text()


def test_a_key_that_everything_quotes_is_found_nowhere(
    env_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that quotes the key it refuses, a reward function that raises it, a model that says it, and -v."""
    source = Path("modules/toy_sums_env.py").read_text()
    raising = "import os\n" + source.replace(
        "    return float", '    assert "4" in completion[-1]["content"], os.environ["MY_KEY"]\n    return float'
    )
    Path("modules/toy_sums_env.py").write_text(raising)
    monkeypatch.setenv("MY_KEY", f"{KEY}\n")
    monkeypatch.setenv("OTHER_API_KEY", OTHER_KEY)
    refusal = Fault(401, body={"error": {"message": f"wrong key {KEY}, {OTHER_KEY}"}})
    faults = [refusal, Fault(200, body=f"<html>{KEY}"), None, None, None]
    answers = ["4", f"no: {KEY}", f"4, as {OTHER_KEY}"]
    monkeypatch.setattr("random.random", lambda: 0.0)
    shown = ""
    for number, plan in enumerate((faults, refusal)):
        with FakeOpenAIServer(answers, faults=plan if number == 0 else (lambda _: refusal)) as server:
            arguments = [
                env_name,
                "-b",
                server.url,
                "-k",
                "MY_KEY",
                "-c",
                "1",
                "-v",
                "--header",
                f"X-Token: {OTHER_KEY}",
            ]
            arguments += [
                "-a",
                json.dumps({"column": "question"}),
                "-S",
                json.dumps({"metadata": {"key": OTHER_KEY}}),
            ]
            assert main([*arguments, "-n", "2", "-r", "2"]) == number
            headers = server.requests[0].headers
            assert (headers["authorization"], headers["x-token"]) == (f"Bearer {KEY}", OTHER_KEY)
        output = capsys.readouterr()
        shown += output.out + output.err
    files = [path for path in Path("outputs").rglob("*") if path.is_file()]
    assert {"results.jsonl", "failures.jsonl", "metadata.json"} <= {path.name for path in files}
    written = "".join(path.read_text() for path in files)
    assert written.count("***") > 4
    assert "NothingScoredError" in shown
    for secret in (KEY, OTHER_KEY, KEY[3:], OTHER_KEY[5:]):
        assert secret not in written + shown
    assert '"api_key_var": "MY_KEY"' in written


def test_the_built_in_fake_endpoint_needs_no_key_and_no_network(
    env_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Any
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    assert main([env_name, "-m", "fake", "-n", "6", "-r", "4"]) == 0
    shown = capsys.readouterr().out
    assert "built-in fake endpoint, no model" in shown
    rewards = [row["reward"] for row in results.rows]
    assert set(rewards) == {0.0, 1.0}
    assert main([env_name, "-m", "fake", "-n", "6", "-r", "4", "--fresh"]) == 0
    again = [read_run(path).rows for path in Path("outputs/evals").glob("*/*")]
    first, second = ([(row["example_id"], row["generation"], row["reward"]) for row in rows] for rows in again)
    assert sorted(first) == sorted(second)


def test_a_disk_that_is_full_is_one_sentence(
    server: FakeOpenAIServer,
    env_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    # the summary cannot be written either
    monkeypatch.setattr("verifiers.evals.store.ResultStore.append", full)
    monkeypatch.setattr("verifiers.evals.evaluation_run.EvaluationRun.summary", full)
    assert main([env_name, "-b", server.url]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert re.match(r"vf-eval: results cannot be written to 'outputs/.*No space left on device\.", sentence)


def test_the_summary_is_one_line_of_json_for_machines(
    server: FakeOpenAIServer, env_name: str, capsys: pytest.CaptureFixture[str], results: Any
) -> None:
    assert main([env_name, "-b", server.url, "-n", "1", "-r", "2", "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = capsys.readouterr().out.splitlines()
    summary = json.loads(line, parse_constant=refuse)
    # one prompt says nothing about how prompts differ
    reward = summary["rewards"]["reward"]
    assert [reward[name] for name in ("mean", "stderr", "low", "high")] == [1.0, None, None, None]
    assert set(summary["pass_at_k"]) == {"1", "2"}
    assert (summary["outcomes"], summary["rollouts"]) == ({"completed": 2}, 2)
    assert Path(summary["results"]) == results.directory


def test_all_rows_are_evaluated_with_minus_one(server: FakeOpenAIServer, env_name: str) -> None:
    assert main([env_name, "-a", '{"n": 4}', "-b", server.url, "-n", "-1", "-r", "1", "-c", "2", "--json"]) == 0
    assert server.request_count == 4
    assert server.max_in_flight <= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy-sum-env"], "There is no environment 'toy-sum-env' among .*the nearest are 'toy_sums_env'"),
        (["ENV", "-a", "[1]"], r"--env-args is '\[1\]'; give a JSON object like"),
        (["ENV", "-S", "top_p=1"], "--sampling-args is 'top_p=1', which is not valid JSON"),
        (["ENV", "--header", "X-Team blue"], "--header is 'X-Team blue'; give it as 'Name: value'"),
        (["ENV", "-b", "localhost:8000"], "base URL 'localhost:8000' is not an HTTP address"),
        (["ENV", "-n", "0"], "--num-examples is 0; give 1 or more, or -1 for all"),
        (["ENV", "-c", "0"], "max_concurrent is 0"),
        (["ENV", "--attempt-timeout", "0"], "--attempt-timeout is 0; give a number of seconds above 0"),
        (["ENV", "-e", "none.toml"], "leave --api-base-url and --header out"),
        (["ENV", "--requests-per-second", "-1"], "--requests-per-second is -1; give a number above 0"),
        (["ENV", "--requests-per-second", "0"], "--requests-per-second is 0; give a number above 0"),
        (["ENV", "--output-dir", "taken"], "results cannot be written under 'taken'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(
    env_name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").write_text("a file")
    argv = [env_name if argument == "ENV" else argument for argument in arguments]
    if "-b" not in argv:
        argv += ["-b", "http://127.0.0.1:1/v1"]
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert re.match(f"vf-eval: .*{message}", sentence)


def test_a_server_that_is_down_is_one_sentence_and_exit_code_1(
    env_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verifiers.cli.endpoint.LISTENER_GRACE_S", 0.3)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        assert main([env_name, "-b", url, "-n", "1", "-r", "2"]) == 1
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith(f"vf-eval: ProviderError: {url} could not be reached")
    assert sentence.endswith("start the server, or give its address with -b.")


def test_an_environment_that_fails_is_one_sentence_and_exit_code_1(
    env_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([env_name, "-m", "fake", "-a", '{"n": "many"}']) == 1
    assert "The environment 'toy-sums-env' could not be made: TypeError" in capsys.readouterr().err


def test_it_runs_as_a_command_from_an_environments_directory(server: FakeOpenAIServer, env_name: str) -> None:
    Path("environments/toy_sums_env").mkdir(parents=True)
    Path("modules/toy_sums_env.py").rename("environments/toy_sums_env/toy_sums_env.py")
    command = [sys.executable, "-m", "verifiers.cli.evaluate", env_name, "-b", server.url, "-n", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENAI_API_KEY": KEY})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rollouts"] == 3


@pytest.mark.parametrize("path", ["./modules/toy_sums_env", "modules/toy_sums_env.py"])
def test_the_rollouts_of_a_path_are_stored_under_its_modules_name(env_name: str, path: str) -> None:
    assert main([path, "-m", "fake", "-n", "1"]) == 0
    assert [run.name for run in Path("outputs/evals").iterdir()] == ["toy_sums_env--fake"]


def test_a_push_that_cannot_succeed_is_refused_before_the_first_rollout(
    env_name: str, server: FakeOpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    assert main([env_name, "-m", "m", "-b", server.url, "-H"]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("vf-eval: --save-to-hf-hub: nothing can be pushed to 'toy-sums-env-m'")
    assert not server.requests
    assert not Path("outputs").exists()


@pytest.mark.parametrize("model", ["org/Qwen3-0.6B", "../x..y/", "Müller--1.git", "a.-b", "z" * 95 + ".9", "x.git"])
def test_a_push_that_fails_at_the_end_is_code_1_and_the_rows_stay_under_a_name_that_the_hub_takes(
    model: str,
    env_name: str,
    server: FakeOpenAIServer,
    results: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: list[str] = []

    def refuse(_: Any, name: str) -> None:
        names.append(name)
        raise ConnectionError("gone")

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_, **__: {"name": "me"})
    monkeypatch.setattr("datasets.Dataset.push_to_hub", refuse)
    assert main([env_name, "-m", model, "-b", server.url, "-n", "1", "-r", "1", "-H"]) == 1
    assert re.search(
        r"HubError: the Hugging Face Hub did not take .*gone.*the results are in", capsys.readouterr().err
    )
    validate_repo_id(names[0])
    assert len(results.rows) == 1
