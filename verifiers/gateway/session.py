"""Sessions: what one agent asks under its key, answered and recorded by the client of its rollout."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, ModelError, OverlongPromptError
from verifiers.gateway.calls import AgentCall, RefusedCallError
from verifiers.inference.endpoint import TOKENIZE
from verifiers.inference.wire import plain_data
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient

__all__ = ["Budget", "Exchange", "Session", "SessionCall"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one rollout; None for no limit.

    Attributes:
        calls: of the policy.
        completion_tokens: sampled in all calls together.
    """

    calls: int | None = None
    completion_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"a budget of {name}={value!r} lets no agent begin; give at least 1, or None.")


@dataclass(frozen=True, slots=True)
class SessionCall:
    """An answered call of the policy, for reward functions and transcripts.

    Attributes:
        request: arguments of the call, in the terms of chat or text completions.
        answer: the completion, as plain data.
    """

    request: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Exchange:
    """One generation and the connections that wait for it or read it.

    Attributes:
        body: the answer in the agent's dialect, made once: a repeated call gets the same ids.
        is_delivered: the whole answer was written to a connection that was open to its end.
    """

    call: AgentCall
    task: asyncio.Task[tuple[dict[str, Any], RecordedAnswer | None]]
    body: dict[str, Any] | None = None
    readers: int = 0
    is_delivered: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """The calls of one agent.

    Args:
        client: records what the policy answers.
        model: the policy's name.
        sampling_args: of the run, sent with each call of the policy whatever the agent asks for.
        budget: calls and tokens after which the rollout is cut off.
        aliases: further names by which the agent may call the policy; "*" stands for every name.
        helpers: clients of other models by name; their answers are not trained.

    Attributes:
        key: the secret that names the session.
        is_over_budget: set when a call was refused for the budget.
        is_sealed: the rollout is over, and calls add nothing.
    """

    client: RolloutClient
    model: str
    sampling_args: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    aliases: frozenset[str] = frozenset()
    helpers: Mapping[str, RolloutClient] = field(default_factory=dict)
    key: str = field(default_factory=lambda: f"sk-vf-{secrets.token_urlsafe(32)}", repr=False)
    is_over_budget: asyncio.Event = field(default_factory=asyncio.Event)
    is_sealed: bool = False
    _exchanges: dict[bytes, list[Exchange]] = field(default_factory=lambda: defaultdict(list))
    _order: list[Exchange] = field(default_factory=list)
    _argument_texts: dict[str, str] = field(default_factory=dict)
    _conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @asynccontextmanager
    async def exchange(self, call: AgentCall, body: bytes, *, is_retry: bool) -> AsyncIterator[Exchange]:
        """Answer a call, by the generation that an earlier try of it began where there is one.

        A call repeats an earlier one where its body is the same and either its client says so, or the connection of
        the earlier one was gone before its answer was written. Then both have one answer, which is recorded once.

        Raises:
            RefusedCallError: the call cannot be answered; nothing was generated.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        found = self._repeated(digest, is_retry)
        if found is None and self._exchanges.get(digest):
            # the loop may not have been told yet that the earlier connection is gone
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            found = self._repeated(digest, is_retry)
        if found is None:
            found = self._begin(call)
            self._exchanges[digest].append(found)
            self._order.append(found)
        found.readers += 1
        try:
            yield found
        finally:
            found.readers -= 1

    def seal(self) -> None:
        """End the session: calls in flight are cancelled, and answers that nobody read are not trained."""
        if self.is_sealed:
            return
        self.is_sealed = True
        for exchange in self._order:
            if not exchange.task.done():
                exchange.task.cancel()
            elif not exchange.is_delivered and not exchange.task.cancelled() and exchange.task.exception() is None:
                _, recorded = exchange.task.result()
                if recorded is not None:
                    self.client.forget(recorded)

    async def count_tokens(self, call: AgentCall) -> int:
        """Return the number of tokens of a call's prompt, as the policy's server counts them.

        Raises:
            RefusedCallError: the server does not tell.
        """
        names = ("messages", "tools", "chat_template_kwargs")
        body = {name: call.arguments[name] for name in names if name in call.arguments}
        try:
            counted, _ = await self.client.untrained.call(TOKENIZE, {**body, "model": self.model})
        except ModelError as error:
            text = f"the policy's server does not count tokens: {error}"
            raise RefusedCallError(text, status=501, code="not_supported") from error
        return int(counted["count"])

    @property
    def calls(self) -> list[SessionCall]:
        """The policy's answers that were read, in the order in which they were asked for."""
        delivered = [exchange for exchange in self._order if exchange.is_delivered and self.is_policy(exchange.call)]
        return [SessionCall(exchange.call.arguments, exchange.task.result()[0]) for exchange in delivered]

    def is_policy(self, call: AgentCall) -> bool:
        """Return True if a call's model is the policy."""
        name = call.model
        return name == self.model or name in self.aliases or ("*" in self.aliases and name not in self.helpers)

    # -- what agents repeat to us in other words than the policy's ---------------------------------------------------

    def arguments_text(self, call_id: str, arguments: Any) -> str:
        """Return a tool call's arguments as the policy wrote them, where an agent repeats them as an object."""
        text = self._argument_texts.get(call_id)
        if text is not None and read_arguments(text) == arguments:
            return text
        return json.dumps(arguments, ensure_ascii=False)

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Return the messages up to an answer and with it, for an agent that continues by the answer's id.

        Raises:
            RefusedCallError: this session gave no such answer.
        """
        messages = self._conversations.get(response_id)
        if messages is None:
            raise RefusedCallError(
                f"the response {response_id!r} was not given in this session; send the whole conversation.",
                status=404,
                code="previous_response_not_found",
            )
        return messages

    def remember(self, call: AgentCall, answer: Mapping[str, Any], response_id: str) -> None:
        """Keep what a later call may refer to: the arguments of tool calls, and the conversation by its id."""
        message = (answer["choices"][0].get("message")) or {}
        for made in message.get("tool_calls") or ():
            self._argument_texts[made["id"]] = made["function"]["arguments"]
        self._conversations[response_id] = [*call.arguments.get("messages", ()), dict(message)]

    # -- one generation -------------------------------------------------------------------------------------------

    def _repeated(self, digest: bytes, is_retry: bool) -> Exchange | None:
        known = [exchange for exchange in self._exchanges.get(digest, ()) if not _has_failed(exchange)]
        unread = [exchange for exchange in known if not exchange.readers and not exchange.is_delivered]
        if unread:
            return unread[0]
        return known[-1] if known and is_retry else None

    def _begin(self, call: AgentCall) -> Exchange:
        if self.is_sealed:
            raise RefusedCallError("the rollout of this key is over.", status=409, code="session_ended")
        if self.is_policy(call):
            arguments = self._policy_arguments(call)
            work = self._ask(self.client, call, arguments)
        elif call.model in self.helpers:
            limit = {} if call.max_tokens is None else {"max_tokens": call.max_tokens}
            work = self._ask(
                self.helpers[call.model], call, {**call.arguments, **call.sampling, **limit, "model": call.model}
            )
        else:
            names = ", ".join([self.model, *self.helpers])
            raise RefusedCallError(
                f"there is no model {call.model!r} here; ask for {names}.", status=404, code="model_not_found"
            )
        task = asyncio.create_task(work)
        # nobody may be left to ask for its failure
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Exchange(call, task)

    def _policy_arguments(self, call: AgentCall) -> dict[str, Any]:
        begun = sum(self.is_policy(each.call) and not _has_failed(each) for each in self._order)
        left = None
        if self.budget.completion_tokens is not None:
            left = self.budget.completion_tokens - self.client.usage.completion_tokens
        if (self.budget.calls is not None and begun >= self.budget.calls) or (left is not None and left <= 0):
            self.client.is_cut_off = True
            self.is_over_budget.set()
            raise RefusedCallError(
                f"the rollout has used its budget of {self.budget.calls or 'any number of'} calls and "
                f"{self.budget.completion_tokens or 'any number of'} sampled tokens.",
                status=403,
                code="budget_exceeded",
            )
        arguments = {**call.arguments, **self.sampling_args, "model": self.model}
        limits = [arguments.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        limits = [value for value in (*limits, call.max_tokens, left) if value is not None]
        if limits:
            arguments["max_tokens"] = min(limits)
        stops = [*_listed(call.arguments.get("stop")), *_listed(self.sampling_args.get("stop"))]
        if stops:
            arguments["stop"] = list(dict.fromkeys(stops))
        return arguments

    async def _ask(
        self, client: RolloutClient, call: AgentCall, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], RecordedAnswer | None]:
        try:
            response, recorded = await client.call(call.path, arguments)
        except OverlongPromptError as error:
            raise RefusedCallError(str(error), code="context_length_exceeded") from error
        except ConfigError as error:
            raise RefusedCallError(str(error), code="unsupported_value") from error
        except ModelError as error:
            # the run's own retries are over
            raise RefusedCallError(str(error), status=502, code="upstream_error") from error
        return dict(plain_data(response)), recorded


def read_arguments(text: str) -> Any:
    """Return a tool call's arguments as an object; one that is no JSON object under the name "arguments"."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _has_failed(exchange: Exchange) -> bool:
    task = exchange.task
    return task.done() and (task.cancelled() or task.exception() is not None)


def _listed(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())
