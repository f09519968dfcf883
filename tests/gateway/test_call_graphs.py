"""Random agents against the gateway: what is trained is what they read, once, whatever they do with connections."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from verifiers.errors import ProviderError
from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.wire import WireObject
from verifiers.rollouts.recording_client import RolloutClient, rows_from_turns

LONGER_THAN_BUFFERS = 16 * 2**20
Messages = list[dict[str, str]]
Answer = tuple[list[int], list[int]]


class Policy:
    """A model whose answers are all different, and whose template gives a sampled answer its sampled ids again."""

    base_url, api_key = "http://policy", "EMPTY"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ids: dict[str, list[int]] = {}
        self.answered: dict[str, Answer] = {}
        # of each answer, its call among those that began
        self.numbers: dict[str, int] = {}
        self._numbers = itertools.count()
        self.begun: asyncio.Event | None = None
        self.held: asyncio.Event | None = None
        self.fails = False
        self.padding = ""

    def render(self, messages: Messages) -> list[int]:
        return [token for message in messages for token in self._ids_of(message["content"])]

    def _ids_of(self, text: str) -> list[int]:
        return self._ids.setdefault(text, [10_000 + len(self._ids)] * 2)

    async def call(self, path: str, arguments: Mapping[str, Any]) -> WireObject:
        held, fails, padding = self.held, self.fails, self.padding
        number = next(self._numbers)
        if self.begun is not None:
            self.begun.set()
        await (held.wait() if held is not None else asyncio.sleep(self._rng.random() * 0.002))
        if fails:
            raise ProviderError("broken", status=500)
        text = f"answer {len(self.answered)}{padding}"
        sampled = [len(self.answered) * 10 + place for place in range(self._rng.randint(1, 4))]
        self._ids[text] = sampled
        prompt = self.render(arguments["messages"])
        self.answered[text] = prompt, sampled
        self.numbers[text] = number
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "token_ids": sampled,
            "logprobs": {"content": [{"token": "", "logprob": -token / 1000} for token in sampled]},
        }
        return WireObject(
            {"id": f"chatcmpl-{len(self.answered)}", "choices": [choice], "prompt_token_ids": prompt, "usage": None}
        )

    async def close(self) -> None: ...


class Agent:
    """Plays a random graph of calls over real connections, and notes which answers it read."""

    def __init__(self, rng: random.Random, policy: Policy, gateway: Gateway, session: Session) -> None:
        self.rng, self.policy, self.gateway, self.session = rng, policy, gateway, session
        self.read: set[str] = set()
        self.conversations: list[Messages] = [[{"role": "user", "content": "task"}]]
        # long answers take time
        self.cuts = rng.random() < 0.2
        self._said = 0

    def _user(self, text: str) -> dict[str, str]:
        self._said += 1
        return {"role": "user", "content": f"{text} {self._said}"}

    async def _ask(self, http: aiohttp.ClientSession, messages: Messages, *, is_retry: bool = False) -> str | None:
        body = {"model": "policy", "messages": messages, "stream": len(messages[-1]["content"]) % 2 == 0}
        headers = {"Authorization": f"Bearer {self.session.key}"}
        if is_retry:
            headers["x-stainless-retry-count"] = "1"
        url = f"{self.gateway.base_url}/chat/completions"
        async with http.post(url, data=json.dumps(body), headers=headers) as response:
            content = await response.text()
        if response.status == 502:
            return None
        assert response.status == 200, content
        if not body["stream"]:
            text: str = json.loads(content)["choices"][0]["message"]["content"]
        else:
            events = [json.loads(line[6:]) for line in content.split("\n") if line.startswith("data: {")]
            # a stream that has begun tells of a failure by an event
            if any("error" in event for event in events):
                return None
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        self.read.add(text)
        return text

    async def _hang_up(self, http: aiohttp.ClientSession, messages: Messages) -> None:
        """Ask, and drop the connection before the answer is there, at once or long before it."""
        self.policy.held, self.policy.begun = asyncio.Event(), asyncio.Event()
        asking = asyncio.create_task(self._ask(http, messages))
        await self.policy.begun.wait()
        release, self.policy.held, self.policy.begun = self.policy.held, None, None
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if self.rng.random() < 0.5:
            await asyncio.sleep(0.002)
        release.set()

    async def _cut(self, messages: Messages) -> None:
        """Ask, read the beginning of what is written, and drop the connection before the rest can be."""
        streams = self.rng.random() < 0.5
        waits = streams and self.rng.random() < 0.5
        if waits:
            # a line that keeps the connection alive is all there is to read
            self.policy.held = asyncio.Event()
        else:
            # more than the sockets of both sides hold
            self.policy.padding = "x" * (LONGER_THAN_BUFFERS // (6 if streams else 1))
        body = json.dumps({"model": "policy", "messages": messages, "stream": streams}).encode()
        host, port = self.gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {self.session.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(self.rng.randint(1, 10 if waits else 2000))
        self.policy.padding = ""
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        if self.policy.held is not None:
            release, self.policy.held = self.policy.held, None
            release.set()

    async def play(self, http: aiohttp.ClientSession) -> None:
        for _ in range(self.rng.randint(1, 7)):
            conversation = self.rng.choice(self.conversations)
            move = self.rng.choice(
                [
                    "turn",
                    "turn",
                    "retry",
                    "lost",
                    "fail",
                    "parallel",
                    "sub-agent",
                    "compact",
                    "same",
                    *(["cut"] if self.cuts else []),
                ]
            )
            if move == "retry":
                await self._hang_up(http, conversation)
                await self._turn(http, conversation, is_retry=self.rng.random() < 0.5)
            elif move == "lost":
                await self._hang_up(http, [*conversation, self._user("lost")])
            elif move == "cut":
                asked = [*conversation, self._user("cut")]
                await self._cut(asked)
                if self.rng.random() < 0.5:
                    # asked again, what nobody has read is the answer
                    await self._turn(http, asked, is_retry=self.rng.random() < 0.5)
            elif move == "fail":
                self.policy.fails = True
                assert await self._ask(http, conversation) is None
                self.policy.fails = False
                await self._turn(http, conversation, is_retry=True)
            elif move == "parallel":
                branches = [[*conversation, self._user("branch")] for _ in range(self.rng.randint(2, 3))]
                await asyncio.gather(*(self._turn(http, branch) for branch in branches))
                self.conversations += branches
            elif move == "same":
                # the same question twice at once is two samples, not a retry
                first, second = await asyncio.gather(self._ask(http, conversation), self._ask(http, conversation))
                assert first != second
                conversation += [{"role": "assistant", "content": first or ""}, self._user("next")]
            elif move == "sub-agent":
                self.conversations.append([self._user("sub-task")])
            elif move == "compact":
                conversation[1:] = [self._user("summary")]
            else:
                await self._turn(http, conversation)

    async def _turn(self, http: aiohttp.ClientSession, conversation: Messages, *, is_retry: bool = False) -> None:
        text = await self._ask(http, conversation, is_retry=is_retry)
        assert text is not None
        conversation += [{"role": "assistant", "content": text}, self._user("next")]


def expected_rows(turns: list[Answer]) -> list[tuple[list[int], list[int]]]:
    """Return (ids, loss mask) of each row: a turn goes on the longest row that its prompt begins with."""
    rows: list[tuple[list[int], list[int]]] = []
    for prompt, sampled in turns:
        begun = [row for row in rows if prompt[: len(row[0])] == row[0]]
        row = max(begun, key=lambda each: len(each[0]), default=None)
        if row is None:
            row = [], []
            rows.append(row)
        written = prompt[len(row[0]) :]
        row[0].extend([*written, *sampled])
        row[1].extend([0] * len(written) + [1] * len(sampled))
    return rows


async def play_one(gateway: Gateway, seed: int) -> None:
    rng = random.Random(seed)
    policy = Policy(rng)
    client = RolloutClient(policy, model="policy", require_tokens=True, retry=RetryPolicy(max_attempts=1))
    session = Session(client, "policy")
    agent = Agent(rng, policy, gateway, session)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=rng.random() < 0.5)) as http:
        async with gateway.serving(session):
            await agent.play(http)
        late = http.post(
            f"{gateway.base_url}/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": "late"}]},
            headers={"x-api-key": session.key},
        )
        async with late as response:
            assert response.status == 409
    # an answer that was cut off while it was written counts by what its reader has of it: nothing
    known = sorted(policy.answered.keys() & agent.read, key=policy.numbers.__getitem__)
    read = [policy.answered[text] for text in known]
    rows, _ = rows_from_turns(client.turns)
    trained = [([*row.prompt_ids, *row.completion_ids], [0] * len(row.prompt_ids) + row.loss_mask) for row in rows]
    assert trained == expected_rows(read), seed


@pytest.mark.parametrize("graphs", [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_random_call_graphs_train_what_was_read(graphs: int) -> None:
    gateway = Gateway(keep_alive_s=0.02)
    await gateway.start()
    for seed in range(graphs):
        await play_one(gateway, seed)
    await gateway.close()
