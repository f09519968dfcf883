"""Sessions: what one agent asks under its key, answered and recorded by the client of its rollout."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, ModelError, OverlongPromptError, ProviderError
from verifiers.gateway.calls import AgentCall, RefusedCallError, data_event
from verifiers.inference.endpoint import CHAT, TOKENIZE
from verifiers.inference.wire import UNREADABLE, plain_data, whole_characters
from verifiers.rollouts.recording_client import RecordedAnswer, RolloutClient, refuse_non_text

OVER = "the rollout of this key is over."
MAX_REQUESTS = 128
"""Requests of one session that are read or answered at a time."""

AGENTS_OWN = "unsupported_by_endpoint"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one rollout; None for no limit."""

    calls: int | None = None
    completion_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("calls", "completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"a budget of {name}={value!r} is too small: no agent could make a call; give 1 or more, or None."
                )


@dataclass(frozen=True, slots=True)
class SessionCall:
    """An answered call of the policy, for reward functions and transcripts."""

    request: Mapping[str, Any]
    answer: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class Exchange:
    """One generation and the connections that wait for it or read it.

    Attributes:
        digest: of the call's path and body.
        max_tokens: that the call may still sample; 0 where nobody counts.
        body: the answer in the agent's dialect, made once: a repeated call gets the same ids.
        is_delivered: the whole answer, or the refusal, was written to a connection that was open to its end.
    """

    call: AgentCall
    digest: bytes
    task: asyncio.Task[tuple[dict[str, Any], RecordedAnswer | None]]
    max_tokens: int = 0
    body: dict[str, Any] | None = None
    readers: int = 0
    is_delivered: bool = False
    repeats: int = 0

    @property
    def failure(self) -> BaseException | None:
        """The refusal that the generation ended with."""
        task = self.task
        return task.exception() if task.done() and not task.cancelled() else None

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True, eq=False)
class Session:
    """The calls of one agent.

    Args:
        sampling_args: of the run, sent with each call of the policy whatever the agent asks for.
        budget: calls and tokens after which the rollout is cut off.
        aliases: further names by which the agent may call the policy; "*" stands for every name.
        helpers: clients of other models by name; their answers are not trained.

    Attributes:
        is_over_budget: set when a call was refused for the budget.
        is_sealed: the rollout is over, and calls add nothing.
        newest_refusal: why a call was refused, the newest time; "" where none was.
        context: of the rollout, for its calls; the listener's is that of the rollout that opened it.
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
    newest_refusal: str = ""
    context: Context = field(default_factory=copy_context)
    _exchanges: list[Exchange] = field(default_factory=list)
    _refusal: RefusedCallError | None = None
    _argument_texts: dict[str, str] = field(default_factory=dict)
    _conversations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    _requests: int = 0

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
        if found is None and any(exchange.digest == digest for exchange in self._exchanges):
            # the loop may not have been told yet that the earlier connection is gone
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            found = self._repeated(digest, is_retry)
        if found is None and self.is_policy(call):
            await self._wait_for_tokens()
        if self.is_sealed:
            raise RefusedCallError(OVER, status=409, code="session_ended")
        if found is None:
            found = self._begin(call, digest)
            self._exchanges.append(found)
        else:
            found.repeats += 1
        found.readers += 1
        try:
            yield found
        finally:
            found.readers -= 1

    @contextmanager
    def counted_request(self) -> Iterator[None]:
        """Count a request while it is read and answered.

        Raises:
            RefusedCallError: as many as may be at once are being answered.
        """
        if self._requests >= MAX_REQUESTS:
            # an SDK that tried again would be taken for a retry of an equal call that is being answered
            text = f"{MAX_REQUESTS} requests of this rollout are being answered; wait for one of them."
            raise RefusedCallError(text, status=429, code="too_many_requests")
        self._requests += 1
        try:
            yield
        except RefusedCallError as refusal:
            self.newest_refusal = str(refusal)
            raise
        finally:
            self._requests -= 1

    def seal(self) -> None:
        """End the session: calls in flight are cancelled, and answers that nobody read are not trained."""
        if self.is_sealed:
            return
        self.is_sealed = True
        for exchange in self._exchanges:
            if not exchange.task.done():
                exchange.task.cancel()
            elif not exchange.is_delivered and not exchange.has_failed:
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
            work = self.client.untrained.call(TOKENIZE, {**body, "model": self.model})
            counted, _ = await asyncio.create_task(work, context=self.context.copy())
            return int(counted["count"])
        except (ModelError, *UNREADABLE) as error:
            text = f"the policy's server does not count tokens: {error}"
            raise RefusedCallError(text, status=501, code="not_supported") from error

    @property
    def calls(self) -> list[SessionCall]:
        """The policy's answers that were read, in the order in which they were asked for."""
        read = [exchange for exchange in self._read_by_agent() if not exchange.has_failed]
        return [SessionCall(exchange.call.arguments, exchange.task.result()[0]) for exchange in read]

    @property
    def newest_failure(self) -> BaseException | None:
        """Failure of the newest call that the agent received an answer or an error to; None where it was an answer.

        The refusal of a budget counts as one.
        """
        if self._refusal is not None:
            return self._refusal
        read = self._read_by_agent()
        return read[-1].failure if read else None

    @property
    def standing_failure(self) -> Exception | None:
        """Newest failure known to the agent that no later try repaired."""
        good = {exchange.digest for exchange in self._exchanges if exchange.body}
        failures = [each.failure for each in self._read_by_agent() if each.has_failed and each.digest not in good]
        for failure in reversed(failures):
            if isinstance(failure, RefusedCallError) and failure.code == AGENTS_OWN:
                # as where the gateway refuses it before it is asked
                continue
            if isinstance(failure, RefusedCallError) and not failure.ends_rollout:
                cause = failure.__cause__
                return cause if isinstance(cause, Exception) else failure
        return None

    def why_unanswered(self, where_nothing_was_asked: str) -> str:
        """Return why an agent has no answer of the policy, as the end of a sentence."""
        return f"a call was refused: {self.newest_refusal}" if self.newest_refusal else where_nothing_was_asked

    def _policy_calls(self) -> list[Exchange]:
        return [exchange for exchange in self._exchanges if self.is_policy(exchange.call)]

    def _read_by_agent(self) -> list[Exchange]:
        return [exchange for exchange in self._policy_calls() if exchange.is_delivered]

    def is_policy(self, call: AgentCall) -> bool:
        name = call.model
        return name == self.model or name in self.aliases or ("*" in self.aliases and name not in self.helpers)

    # -- what agents repeat to us in other words than the policy's ---------------------------------------------------

    def arguments_text(self, call_id: str, text: str) -> str:
        """Return a tool call's arguments as the policy wrote them, where an agent repeats them in other words."""
        sampled = self._argument_texts.get(call_id)
        return sampled if sampled is not None and read_arguments(sampled) == read_arguments(text) else text

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

    def remember_arguments(self, completion: Mapping[str, Any]) -> None:
        message = completion["choices"][0].get("message") or {}
        for made in message.get("tool_calls") or ():
            self._argument_texts[made["id"]] = made["function"]["arguments"]

    def remember_conversation(self, response_id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages up to an answer and with it, which a later call may continue by the answer's id."""
        self._conversations[response_id] = messages

    # -- one generation -------------------------------------------------------------------------------------------

    def _repeated(self, digest: bytes, is_retry: bool) -> Exchange | None:
        known = [each for each in self._exchanges if each.digest == digest and not each.has_failed]
        unread = [exchange for exchange in known if not exchange.readers and not exchange.is_delivered]
        if unread:
            return unread[0]
        # each retry belongs to a different one of the equal calls
        return min(known, key=lambda exchange: exchange.repeats) if known and is_retry else None

    async def _wait_for_tokens(self) -> None:
        """Wait, where tokens are counted, until the calls in flight leave some or have ended."""
        while self._tokens_left() == 0:
            running = [exchange.task for exchange in self._exchanges if not exchange.task.done()]
            if not running:
                break
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    def _tokens_left(self) -> int | None:
        if self.budget.completion_tokens is None:
            return None
        promised = sum(exchange.max_tokens for exchange in self._exchanges if not exchange.task.done())
        return max(self.budget.completion_tokens - (self.client.usage.completion_tokens or 0) - promised, 0)

    def _begin(self, call: AgentCall, digest: bytes) -> Exchange:
        max_tokens = 0
        if call.max_tokens is not None and call.max_tokens < 1:
            raise RefusedCallError(f"max_tokens is {call.max_tokens}; give 1 or more.")
        if self.is_policy(call):
            arguments = self._policy_arguments(call)
            if self.budget.completion_tokens is not None:
                max_tokens = arguments.get("max_completion_tokens") or arguments["max_tokens"]
            work = self._ask(self.client, call, arguments)
        elif call.model in self.helpers:
            limit = {} if call.max_tokens is None else {_name_of_limit(call): call.max_tokens}
            work = self._ask(
                self.helpers[call.model], call, {**call.arguments, **call.sampling, **limit, "model": call.model}
            )
        else:
            names = ", ".join([self.model, *self.helpers])
            raise RefusedCallError(
                f"there is no model {call.model!r} here; ask for {names}.", status=404, code="model_not_found"
            )
        task = asyncio.create_task(work, context=self.context.copy())
        # nobody may be left to ask for its failure
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Exchange(call, digest, task, max_tokens)

    def _policy_arguments(self, call: AgentCall) -> dict[str, Any]:
        left = self._tokens_left()
        calls = self.budget.calls
        if left == 0 or (calls is not None and calls <= sum(not each.has_failed for each in self._policy_calls())):
            self.is_over_budget.set()
            used = f"{self.budget.completion_tokens} sampled tokens" if left == 0 else f"{calls} calls"
            text = f"the rollout has used its budget of {used}."
            self._refusal = RefusedCallError(text, status=403, code="budget_exceeded")
            raise self._refusal
        given = {name: value for name, value in self.sampling_args.items() if value is not None}
        arguments = {**call.arguments, **given, "model": self.model}
        limits = [arguments.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        limits = [value for value in (*limits, call.max_tokens, left) if value is not None]
        if limits:
            arguments[_name_of_limit(call)] = min(limits)
        stops = [*_listed(call.arguments.get("stop")), *_listed(self.sampling_args.get("stop"))]
        if stops:
            arguments["stop"] = list(dict.fromkeys(stops))
        try:
            self.client.check(arguments)
        except ConfigError as error:
            if _is_refused(self.client, {**given, "model": self.model}):
                # the run's own arguments: the call itself ends the run
                return arguments
            raise RefusedCallError(str(error), code="unsupported_value") from None
        return arguments

    def _is_of_agent(self, call: AgentCall, refusal: str) -> bool:
        """Return whether an endpoint refused what this agent asked for, and not what every rollout asks."""
        if any(repr(name) in refusal for name in self.sampling_args):
            return False
        if call.path != CHAT or call.arguments.keys() - {"messages"}:
            return True
        try:
            refuse_non_text(call.arguments["messages"], "the call")
        except ConfigError:
            return True
        return False

    async def _ask(
        self, client: RolloutClient, call: AgentCall, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], RecordedAnswer | None]:
        try:
            response, recorded = await client.call(call.path, arguments)
        except OverlongPromptError as error:
            raise RefusedCallError(str(error), code="context_length_exceeded") from error
        except ConfigError as error:
            if not self._is_of_agent(call, str(error)):
                raise RefusedCallError(str(error), code="unsupported_value") from error
            # the next agent may ask for something else
            client.fatal_error = None
            raise RefusedCallError(str(error), code=AGENTS_OWN) from None
        except ModelError as error:
            # the run's own retries are over; an error about the call itself is for the agent to correct
            status = (error.status or 0) if isinstance(error, ProviderError) else 0
            kept = status if status in (400, 413, 422, 429) else 502
            raise RefusedCallError(str(error), status=kept, code="upstream_error") from error
        return dict(plain_data(response)), recorded


def _name_of_limit(call: AgentCall) -> str:
    # the name that every chat model knows; text completions have the other alone
    return "max_completion_tokens" if call.path == CHAT else "max_tokens"


def read_arguments(text: str) -> Any:
    """Return a tool call's arguments as an object; what is not a JSON object is put under the name "arguments"."""
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
        # an agent's SDK cannot send half of a surrogate pair back
        value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_refused(client: RolloutClient, arguments: Mapping[str, Any]) -> bool:
    try:
        client.check(arguments)
    except ConfigError:
        return True
    return False


def _listed(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


# -- the dialects of calls ------------------------------------------------------------------------------------------


class WireFormat(ABC):
    """One route's dialect. Refusals are told as OpenAI tells errors, where a dialect has no other way."""

    keep_alive = b": generating\n\n"
    """Sent while an answer that is to be streamed is generated."""

    @abstractmethod
    def read(self, body: Any, session: Session) -> AgentCall:
        """Return a request's body as a call.

        Raises:
            RefusedCallError: it is malformed, or asks for what cannot be had.
        """

    @abstractmethod
    def answer(self, completion: Mapping[str, Any], call: AgentCall, session: Session) -> dict[str, Any]:
        """Return a chat or text completion in the dialect."""

    @abstractmethod
    def events(self, answer: Mapping[str, Any], call: AgentCall) -> Iterator[bytes]:
        """Return a whole answer as the events of a stream."""

    def error(self, refusal: RefusedCallError) -> dict[str, Any]:
        """Return the body of a refusal."""
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}

    def error_event(self, refusal: RefusedCallError) -> bytes:
        """Return a refusal as an event, for a stream that has begun."""
        return data_event(self.error(refusal))
