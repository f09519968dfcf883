"""A server without a model that takes token ids, under vLLM's names: what the tests of token-in generation share.

Ids are code points, and marks that no text holds stand for the beginning and the end of a turn. The policy is a
function of the prompt's ids and the seed, so that another prompt, or another seed, shows in what it says.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

import verifiers as vf
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.token_in import Generation, TokenIn, token_in_for
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.types import RolloutKey

BEGIN, END, THINK, UNTHINK, CALL, UNCALL = range(0xE000, 0xE006)
"""Code points of Unicode's private use area."""

TURNS = 6
NO_WAIT = RetryPolicy(base_s=0.0)
ASK = [{"role": "user", "content": "begin"}]

Template = Callable[[Sequence[Mapping[str, Any]], Any], str]

_CALL = re.compile(f"{chr(CALL)}(.*?){chr(UNCALL)}", re.DOTALL)


def _turn(role: str, text: str) -> str:
    return f"{chr(BEGIN)}{role}\n{text}{chr(END)}\n"


def _said(message: Mapping[str, Any], *, thoughts: bool) -> str:
    thought = message.get("reasoning_content")
    text = f"{chr(THINK)}{thought}{chr(UNTHINK)}" if thoughts and thought else ""
    text += str(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f"{chr(CALL)}{function['name']}:{function['arguments']}{chr(UNCALL)}"
    return text


def keeps(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Print every turn as it was said: with messages, too, each prompt extends the one before."""
    text = _turn("system", json.dumps(tools)) if tools else ""
    return text + "".join(_turn(m["role"], _said(m, thoughts=True)) for m in messages) + f"{chr(BEGIN)}assistant\n"


def strips(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Leaves out what was thought in earlier turns."""
    return keeps([{**m, "reasoning_content": None} for m in messages], tools)


def counts(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Numbers the turns: what stands behind an answer depends on what was said before."""
    text = "".join(_turn(f"{n}{m['role']}", _said(m, thoughts=True)) for n, m in enumerate(messages))
    return text + f"{chr(BEGIN)}assistant\n"


def tools_in_the_newest_turn(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Show the tools beside the newest message."""
    *earlier, newest = messages
    shown = {**newest, "content": f"{json.dumps(tools)} {newest.get('content') or ''}"} if tools else newest
    return keeps([*earlier, shown], None)


class TokenServer:
    """`async with TokenServer(policy) as server`: chat completions and the three routes for token ids.

    Args:
        policy: what is said, as text with the marks, for the prompt's ids and the seed.
        template: renders a conversation.
        splits_thoughts: answers what stands between the think marks apart from the content.
        absent: paths that are answered with 404.

    Attributes:
        bodies: the bodies of every path, in order of arrival.
        turns: (prompt ids, sampled ids) of each answer to a rollout, in order.
        versions: reported spans of the newest answer, or None to report none.
        before_answer: awaited before each answer of the policy.
    """

    def __init__(
        self,
        policy: Callable[[Sequence[int], int], str],
        template: Template = keeps,
        *,
        splits_thoughts: bool = True,
        absent: Sequence[str] = (),
        max_model_len: int = 100_000,
    ) -> None:
        self._policy = policy
        self._template = template
        self._splits = splits_thoughts
        self._absent = absent
        self._limit = max_model_len
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        self.versions: list[dict[str, Any]] | None = None
        self.failures: list[int] = []
        self.before_answer: Callable[[], Any] | None = None
        self.rendered_tokens = 0
        self.turns: list[tuple[list[int], list[int]]] = []
        self.url = ""

    async def __aenter__(self) -> TokenServer:
        app = web.Application(client_max_size=2**26)
        for path, handler in (
            ("/v1/chat/completions", self._chat),
            ("/tokenize", self._tokenize),
            ("/inference/v1/generate", self._generate),
            ("/v1/chat/completions/derender", self._derender),
        ):
            if path not in self._absent:
                app.router.add_post(path, handler)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("/v1"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def sent(self, path: str) -> list[dict[str, Any]]:
        return self.bodies.get(path, [])

    def _render(self, body: Mapping[str, Any]) -> list[int]:
        ids = [ord(letter) for letter in self._template(body["messages"], body.get("tools"))]
        self.rendered_tokens += len(ids)
        return ids

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.bodies.setdefault(request.path, []).append(body)
        return body

    async def _sample(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any] | web.Response:
        if self.before_answer is not None:
            await self.before_answer()
        if self.failures:
            return web.json_response({"error": {"message": "busy"}}, status=self.failures.pop(0))
        if len(prompt) >= self._limit:
            text = f"The prompt is longer than the maximum model length of {self._limit}"
            return web.json_response({"error": {"message": text}}, status=400)
        text = self._policy(prompt, sampling.get("seed") or 0)
        ids = [*map(ord, text), END]
        reason = "stop"
        for stop in sampling.get("stop") or ():
            place = text.find(stop)
            if place >= 0:
                ids = ids[: place + len(stop)]
        limit = sampling.get("max_tokens")
        if limit is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        content = [{"token": chr(token), "logprob": -((token % 13) + 1) / 10} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}}
        if self.versions is not None:
            choice["weight_versions"] = self.versions
        return choice

    def _message(self, ids: Sequence[int], stops: Sequence[str] = ()) -> dict[str, Any]:
        text = "".join(map(chr, ids)).removesuffix(chr(END))
        for stop in stops:
            text = text.partition(stop)[0]
        message: dict[str, Any] = {"role": "assistant"}
        if self._splits and text.startswith(chr(THINK)):
            thought, _, text = text[1:].partition(chr(UNTHINK))
            message["reasoning_content"] = thought
        calls = [call.partition(":") for call in _CALL.findall(text)]
        message["content"] = _CALL.sub("", text)
        if calls:
            name = hashlib.blake2b(bytes(str(ids), "utf8"), digest_size=4).hexdigest()
            message["tool_calls"] = [
                {"id": f"{name}{n}", "type": "function", "function": {"name": call[0], "arguments": call[2]}}
                for n, call in enumerate(calls)
            ]
        return message

    async def _chat(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        prompt = self._render(body)
        sampling = {**body, "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens")}
        choice = await self._sample(prompt, sampling)
        if isinstance(choice, web.Response):
            return choice
        self.turns.append((prompt, choice["token_ids"]))
        message = self._message(choice["token_ids"], body.get("stop") or ())
        if message.get("tool_calls") and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        answer = {"id": "x", "choices": [{**choice, "message": message}], "prompt_token_ids": prompt}
        return web.json_response({**answer, "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}})

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self._render(await self._read(request))
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self._limit})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        choice = await self._sample(body["token_ids"], body["sampling_params"])
        if isinstance(choice, web.Response):
            return choice
        if "seed" in body["sampling_params"]:
            self.turns.append((body["token_ids"], choice["token_ids"]))
        return web.json_response({"request_id": "x", "choices": [choice]})

    async def _derender(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        # as vLLM: of all ids, those of a stop string too
        message = self._message(body["generate_response"]["choices"][0]["token_ids"])
        return web.json_response({"choices": [{"index": 0, "message": message}]})


def digest(prompt: Sequence[int], seed: int) -> str:
    """Eight letters that depend on every id and on the seed."""
    data = json.dumps([list(prompt), seed]).encode()
    return "".join(chr(97 + byte % 26) for byte in hashlib.blake2b(data, digest_size=8).digest())


def thinks(prompt: Sequence[int], seed: int) -> str:
    """Return a thought, then an answer."""
    word = digest(prompt, seed)
    return f"{chr(THINK)}{word[:4]}{chr(UNTHINK)}{word[4:]}"


def calls(prompt: Sequence[int], seed: int) -> str:
    """Return a thought, a word, and a call of `add`."""
    word = digest(prompt, seed)
    return f'{chr(THINK)}{word[:4]}{chr(UNTHINK)}{word[4:]}{chr(CALL)}add:{{"n": {len(prompt)}}}{chr(UNCALL)}'


class Dialogue(vf.MultiTurnEnv):
    """The environment's words depend on the policy's; only contents are repeated, as many environments do."""

    def __init__(self, turns: int = TURNS, **kwargs: Any) -> None:
        rows = [{"prompt": ASK, "answer": ""}]
        super().__init__(max_turns=turns, dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 1.0]), **kwargs)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        messages[-1].pop("reasoning_content", None)
        return [{"role": "user", "content": f"{state['turn']}: {messages[-1]['content'][:3]}"}], state


def add(n: int) -> str:
    """Add seven.

    Args:
        n: the number to add to
    """
    return str(n + 7)


def tools(turns: int) -> vf.ToolEnv:
    rows = [{"prompt": ASK, "answer": ""}]
    return vf.ToolEnv(tools=[add], max_turns=turns, dataset=rows, rubric=vf.Rubric(funcs=[lambda **_: 1.0]))


@asynccontextmanager
async def client_of(server: TokenServer, mode: Generation) -> AsyncIterator[RolloutClient]:
    """Give the client of a training rollout."""
    backend = HttpBackend(Endpoint(server.url))
    token_in = TokenIn(backend, "m", mode, retry=NO_WAIT)
    yield RolloutClient(backend, model="m", seed=1, require_tokens=True, token_in=token_in)
    await backend.close()


async def play(
    server: TokenServer,
    generation: str,
    env: Any = None,
    *,
    count: int = 1,
    token_in: TokenIn | None = None,
    **options: Any,
) -> list[Rollout]:
    """Rollouts of one prompt, each with a seed of its own."""
    backend = HttpBackend(Endpoint(server.url))
    sampling = {"temperature": 1.0, **options.pop("sampling", {})}
    token_in = token_in or token_in_for(generation, backend, "m", require_tokens=True, retry=NO_WAIT)
    runner = Run(
        env or Dialogue(), backend, "m", sampling, retry=NO_WAIT, require_tokens=True, token_in=token_in, **options
    )
    try:
        requests = [RolloutRequest(RolloutKey(0, 0, n), prompt=ASK, seed=n + 1) for n in range(count)]
        return [(await runner.play([request]))[0] for request in requests]
    finally:
        await backend.close()


def extends_each_time(turns: Sequence[tuple[list[int], list[int]]]) -> bool:
    """Return True where each prompt begins with the prompt and the answer before it, id for id."""
    return all(
        after[0][: len(prompt) + len(answer)] == prompt + answer
        for (prompt, answer), after in itertools.pairwise(turns)
    )
