"""Sessions of programs that are started elsewhere: opened, recorded, rewarded, ended and stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from verifiers.cli.external_run import ExternalRun
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import ResultStore, read_run
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.testing import FakeOpenAIServer, Fault, decode_ids

KEY = "0123456789abcdef-of-the-gateway"
PROMPT = [{"role": "user", "content": "6 times 7?"}]


class Client:
    """A caller of the gateway, which holds its key."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self._http = url, http

    async def post(self, path: str = "", key: str = KEY, **body: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post(f"{self.url}/sessions{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def open(self, **body: Any) -> dict[str, Any]:
        status, session = await self.post(**body)
        assert status == 200, session
        return session

    async def end(self, session: dict[str, Any], **body: Any) -> dict[str, Any]:
        status, result = await self.post(f"/{session['id']}/end", **body)
        assert status == 200, result
        return result


async def ask(session: dict[str, Any], *texts: str) -> list[str]:
    """Play a conversation by the session's base URL and key."""
    messages, answers = list(PROMPT), []
    async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0) as client:
        for text in ("", *texts):
            messages += [{"role": "user", "content": text}] if text else []
            answer = await client.chat.completions.create(model=session["model"], messages=messages)  # type: ignore[arg-type]
            answers.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


Start = Callable[..., Any]


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that serves a run, drains it at the end, and gives a client and the run."""
    monkeypatch.setenv("VF_GATEWAY_KEY", KEY)

    @asynccontextmanager
    async def serve(
        answers: Any = None, faults: Any = None, latency_s: float = 0.0, **settings: Any
    ) -> AsyncIterator[tuple[Client, ExternalRun]]:
        async with AsyncExitStack() as held:
            server = await held.enter_async_context(FakeOpenAIServer(answers, faults=faults, latency_s=latency_s))
            backend = HttpBackend(Endpoint(server.url))
            held.push_async_callback(backend.close)
            store = held.enter_context(ResultStore(tmp_path, {"env": "external", "model": "fake"}))
            given = {"retry": RetryPolicy(max_attempts=1), "drain_s": 0.2, **settings}
            results = RolloutResults()
            run = ExternalRun(backend, "fake", store, results, host="127.0.0.1", port=0, **given)
            serving = asyncio.create_task(run.serve())
            url = (await run.start()).url
            http = await held.enter_async_context(aiohttp.ClientSession())
            yield Client(url, http), run
            run.drain()
            await serving

    return serve


async def test_a_session_is_stored_as_a_rollout_with_its_conversation_and_token_ids(
    gateway: Start, tmp_path: Path
) -> None:
    async with gateway(["41", "42"], require_tokens=True) as (client, run):
        session = await client.open(prompt=PROMPT, answer="42", task="sums", info={"node": 3})
        assert await ask(session, "really?") == ["41", "42"]
        assert (await client.post(f"/{session['id']}/reward", reward=0.5, metrics={"quick": 1}))[0] == 200
        result = await client.end(session)
        # a lost answer is asked for again
        assert await client.end(session) == result
    assert (result["outcome"], result["reward"], result["calls"]) == ("completed", 0.5, 2)
    (row,) = read_run(tmp_path).rows
    assert (row["outcome"], row["reward"], row["turns"], row["answer"]) == ("completed", 0.5, 2, "42")
    assert row["metrics"] == {"quick": 1.0, "posted_reward": 0.5}
    assert row["info"] == {"node": 3, "session_id": session["id"]}
    assert row["prompt"] == PROMPT
    assert [message["content"] for message in row["completion"]] == ["41", "really?", "42"]
    (line,) = map(json.loads, (tmp_path / "tokens.jsonl").read_text().splitlines())
    (tokens,) = line["rows"]
    assert len(tokens["completion_ids"]) == len(tokens["loss_mask"]) == len(tokens["logprobs"])
    sampled = [i for i, kept in zip(tokens["completion_ids"], tokens["loss_mask"], strict=True) if kept]
    assert decode_ids(sampled).startswith("41")
    assert run.results.mean_reward == 0.5


async def test_a_session_whose_caller_hangs_up_before_it_begins_is_cancelled(
    gateway: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway() as (client, run):
        begins, may_begin, begin = asyncio.Event(), asyncio.Event(), run._run_agent

        async def begin_late(*args: Any) -> Any:
            begins.set()
            await may_begin.wait()
            return await begin(*args)

        monkeypatch.setattr(run, "_run_agent", begin_late)
        opening = asyncio.create_task(client.open(prompt=PROMPT))
        await begins.wait()
        opening.cancel()
        runner = (await run.start())._listener._runner
        assert runner is not None
        assert runner.server is not None
        async with asyncio.timeout(60):
            # the gateway sees the end of the connection
            while runner.server.connections:  # noqa: ASYNC110 - a server tells nobody
                await asyncio.sleep(0.01)
        may_begin.set()
        async with asyncio.timeout(60):
            while len(run.results) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    (row,) = read_run(tmp_path).rows
    assert (row["outcome"], row["reward"]) == ("cancelled", None)
    assert "hung up" in str(row["error"])


async def test_sessions_of_one_prompt_or_group_are_rollouts_of_one_example(gateway: Start, tmp_path: Path) -> None:
    async with gateway() as (client, _):
        sessions = [await client.open(prompt=PROMPT) for _ in range(2)]
        sessions += [await client.open(group="a"), await client.open(group="a"), await client.open(group=7)]
        sessions += [await client.open(), await client.open()]
        for session in sessions:
            await ask(session)
            await client.end(session, reward=1.0)
    examples = [session["example_id"] for session in sessions]
    assert examples[0] == examples[1] != examples[2] == examples[3]
    assert examples[4] == 7
    assert len(set(examples)) == 5
    assert sorted(row["generation"] for row in read_run(tmp_path).rows) == [0, 0, 0, 0, 0, 1, 1]


async def test_every_end_has_its_outcome_and_only_a_reward_that_was_posted_counts(
    gateway: Start, tmp_path: Path
) -> None:
    async with gateway(faults=[Fault(400)]) as (client, _):
        refused = await client.open()
        with pytest.raises(openai.BadRequestError):
            await ask(refused)
        results = {"refused": await client.end(refused, error="no answer")}
        for name, asks, end in (
            ("unrewarded", True, {}),
            ("failed", True, {"error": "exit code 3"}),
            ("silent", False, {"reward": 1.0}),
        ):
            session = await client.open()
            if asks:
                await ask(session)
            results[name] = await client.end(session, **end)
        late = await client.open(timeout_s=0.3)
        async with asyncio.timeout(30):
            while (await client.post(f"/{late['id']}/reward", reward=1.0))[0] == 200:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.02)
        cut = await client.open(max_turns=1)
        with pytest.raises(openai.PermissionDeniedError):
            await ask(cut, "more")
        results["cut"] = await client.end(cut, reward=0.25)
        # of a session that is over, the result is told again
        results["late"] = await client.end(late)
        with pytest.raises(openai.ConflictError):
            await ask(late)
        stopped = await client.open()
        await ask(stopped)
    found = {name: (result["outcome"], result["reward"]) for name, result in results.items()}
    assert found == {
        "refused": ("provider_error", None),
        "unrewarded": ("grading_error", None),
        "failed": ("environment_error", None),
        "silent": ("environment_error", None),
        "cut": ("truncated", 0.25),
        "late": ("timed_out", None),
    }
    rows = {row["info"]["session_id"]: row for row in read_run(tmp_path).rows}
    assert len(rows) == 7
    assert (rows[stopped["id"]]["outcome"], rows[stopped["id"]]["turns"]) == ("cancelled", 1)
    assert "gateway was stopped" in rows[stopped["id"]]["error"]


async def test_a_session_that_cannot_begin_is_refused_and_others_go_on(gateway: Start, tmp_path: Path) -> None:
    async with gateway() as (client, _):
        session = await client.open()
        async with asyncio.timeout(20):
            status, answer = await client.post(info={"oai_tools": 5})
        assert status == 400
        assert "the session could not begin" in answer["error"]["message"]
        await ask(session)
        assert (await client.end(session, reward=1.0))["outcome"] == "completed"
    assert sorted(row["outcome"] for row in read_run(tmp_path).rows) == ["completed", "environment_error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("", {"promt": []}, 400, "promt: Extra inputs are not permitted"),
        ("", {"sampling_args": {"n": 2}}, 400, "sampling_args has 'n'"),
        ("", {"timeout_s": 1e9}, 400, "at most 1800 s"),
        ("", {"max_turns": 0}, 400, "max_turns"),
        ("/{id}/reward", {"reward": "much"}, 400, "reward: Input should be a valid number"),
        ("/{id}/end", {"metrics": {"a": None}}, 400, "metrics.a"),
        ("/nobody/end", {}, 404, "no session 'nobody'"),
    ],
)
async def test_bad_input_is_refused_in_one_sentence(
    gateway: Start, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    async with gateway(rollout_timeout_s=1800.0) as (client, _):
        session = await client.open()
        found, answer = await client.post(path.format(id=session["id"]), **body)
    assert found == status
    assert text in answer["error"]["message"]


async def test_the_routes_need_the_gateways_own_key(gateway: Start) -> None:
    async with gateway() as (client, _):
        session = await client.open()
        for key in ("", "other", session["key"]):
            for path in ("", f"/{session['id']}/reward", f"/{session['id']}/end"):
                assert (await client.post(path, key=key, reward=1.0))[0] == 401


async def test_no_more_sessions_are_open_than_allowed_and_none_opens_while_the_run_ends(gateway: Start) -> None:
    async with gateway(limiter=Limiter(1), drain_s=20.0) as (client, run):
        session = await client.open()
        assert (await client.post())[0] == 429
        run.drain()
        assert (await client.post())[0] == 503
        await ask(session)
        result = await client.end(session, reward=1.0)
        assert result["outcome"] == "completed"


async def test_an_endpoint_without_token_ids_fails_each_session_and_not_the_gateway(
    gateway: Start, tmp_path: Path
) -> None:
    plain = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "42"}, "finish_reason": "stop"}]}
    async with gateway(faults=[Fault(200, body=json.dumps(plain))], require_tokens=True) as (client, _):
        session = await client.open()
        with pytest.raises(openai.APIStatusError, match="without prompt_token_ids"):
            await ask(session)
        assert (await client.end(session))["outcome"] == "provider_error"
        session = await client.open()
        await ask(session)
        assert (await client.end(session, reward=1))["outcome"] == "completed"
    assert len(read_run(tmp_path).rows) == 2
