"""Traces of rollouts in OpenTelemetry's conventions for generative AI, put on from outside.

`start` wraps the functions that play and score, here and in rollout workers; without it this module is not imported.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import json
import pickle
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from time import time_ns
from typing import Any

from verifiers.envs import environment
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.envs.tool_env import ToolEnv
from verifiers.errors import ConfigError
from verifiers.inference.endpoint import CHAT, COMPLETIONS, HttpBackend
from verifiers.inference.wire import plain_data
from verifiers.installation import install_hint
from verifiers.rollouts import run as rollouts_run
from verifiers.rollouts.block import BlockRun
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rollouts.run import Run
from verifiers.rubrics.scoring import RewardCall, reward_name
from verifiers.span_exporter import SpanExporter
from verifiers.workers import worker
from verifiers.workers.connection import Connection
from verifiers.workers.pool import RemoteWorkers, WorkerLink

Wrapper = Callable[..., Any]
Place = tuple[int, int, bool]
"""Numbers of a trace and of a span in it, and True where it is drawn among those that are sent."""

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion"}
_REQUESTED = {
    **{name: f"gen_ai.request.{name}" for name in ("max_tokens", "model", "seed", "temperature", "top_p")},
    "max_completion_tokens": "gen_ai.request.max_tokens",
}


@dataclass(frozen=True, slots=True)
class _Tracer:
    ended: deque[Any]
    has_content: bool
    share: float = 1.0
    run: str = ""
    is_worker: bool = False


_NONE = _Tracer(deque(maxlen=0), has_content=False)
_MOST_WAITING, _MOST_WITH_CONTENT = 50_000, 5_000

_tracer = _NONE
_wrappers: list[tuple[Any, str, Wrapper]] = []
# environments seed the module's own
_random = random.Random()
_span_ids = itertools.count(_random.getrandbits(62) + 1)


# -- spans ---------------------------------------------------------------------------------------------------------


class _Span:
    """A part of a rollout; inside of its `with` it is the parent of what begins."""

    __slots__ = ("_began", "_parent", "_token", "attributes", "is_drawn", "name", "place")

    def __init__(
        self, name: str, attributes: dict[str, Any], above: Place | None = None, is_drawn: bool = True
    ) -> None:
        self.name, self.attributes = name, attributes
        trace, self._parent, is_above_drawn = above or _place() or (_random.getrandbits(128), 0, True)
        self.is_drawn = is_drawn and is_above_drawn
        self.place = trace, next(_span_ids), self.is_drawn

    def __enter__(self) -> _Span:
        self._token, self._began = _current.set(self), time_ns()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        _current.reset(self._token)
        if self.is_drawn:
            self.note(error)
            times = self._began, time_ns()
            _tracer.ended.append((self.name, *self.place[:2], self._parent, *times, self.attributes))

    def note(self, result: Any) -> Any:
        """Note a reward, or the error that something ended with, and return it."""
        if isinstance(result, BaseException):
            self.attributes["error.type"] = type(result).__name__
            self.add_content("exception.message", str(result))
        elif isinstance(result, int | float):
            with contextlib.suppress(OverflowError):
                self.attributes["gen_ai.evaluation.score.value"] = float(result)
        return result

    def add_content(self, name: str, said: Any) -> None:
        """Add what was said, where that is traced: a text, or else what becomes JSON."""
        if said and _tracer.has_content and self.is_drawn:
            # a test double's message may be of any shape
            with contextlib.suppress(Exception):
                shown = [_parts(message) for message in said] if name.endswith(".messages") else said
                self.attributes[name] = shown if isinstance(shown, str) else json.dumps(shown, default=str)


_current: ContextVar[_Span | None] = ContextVar("span", default=None)


def _parts(message: Any) -> dict[str, Any]:
    """Return a chat message, or a text, as the conventions have it: a role and parts."""
    if isinstance(message, str):
        return {"role": "user", "parts": [{"type": "text", "content": message}]}
    message = plain_data(message)
    said, calls = message.get("content"), message.get("tool_calls") or ()
    if message["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": said}]
    else:
        parts = [{"type": "text", "content": said}] if said else []
        parts += [{"type": "tool_call", "id": call["id"], **call["function"]} for call in map(plain_data, calls)]
    return {"role": message["role"], "parts": parts}


def _place() -> Place | None:
    span = _current.get()
    return None if span is None else span.place


# -- what is wrapped; each wrapper is called with the original and its arguments -------------------------------------


def _wraps(owner: Any, name: str) -> Callable[[Wrapper], Wrapper]:
    def note(wrapper: Wrapper) -> Wrapper:
        _wrappers.append((owner, name, wrapper))
        return wrapper

    return note


@_wraps(BlockRun, "run")
async def _block(original: Wrapper, block: Any, policy_version: int) -> Any:
    with _Span("block", {"verifiers.block_id": block.block_id, "verifiers.policy_version": policy_version}):
        return await original(block, policy_version)


def _span_of(name: str, requests: Sequence[Any]) -> _Span:
    key, share = requests[0].key, _tracer.share
    ids = {"verifiers.block_id": key.block_id, "verifiers.example_id": key.example_id}
    # the same rollouts in each run of the same prompts
    is_drawn = share >= 1 or any(random.Random(str(request.key)).random() < share for request in requests)
    return _Span(name, {"verifiers.run_id": _tracer.run, **ids}, None, is_drawn)


@_wraps(BlockRun, "_rollouts")
@_wraps(Run, "run_group")
async def _group(original: Wrapper, owner: Any, requests: Sequence[Any]) -> Any:
    with _span_of("group", requests) as span:
        result = await original(owner, requests)
        rollouts = getattr(result, "rollouts", result)
        span.attributes["verifiers.rewards"] = [rollout.reward for rollout in rollouts if rollout.is_scored]
        return result


@_wraps(environment, "play")
async def _rollout(original: Wrapper, env: Any, request: Any, run: Any) -> Any:
    with _span_of("rollout", [request]) as span:
        span.attributes |= {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": request.task}
        span.attributes["verifiers.generation"] = request.key.generation
        span.attributes["verifiers.policy_version"] = run.policy_version and run.policy_version()
        rollout = await original(env, request, run)
        failed = rollout.failure and rollout.failure.kind
        span.attributes |= {"verifiers.outcome": str(rollout.outcome), "error.type": failed}
        return rollout


@_wraps(rollouts_run, "begin_state")
@_wraps(worker, "begin_state")
def _begin_state(original: Wrapper, *args: Any) -> Any:
    state = original(*args)
    # reward functions are called when the rollout is over
    state.place = _place()
    return state


@_wraps(MultiTurnEnv, "_turn")
async def _turn(original: Wrapper, *args: Any) -> Any:
    with _Span("turn", {}):
        return await original(*args)


@_wraps(RolloutClient, "call")
async def _model_call(original: Wrapper, client: Any, path: str, arguments: Mapping[str, Any]) -> Any:
    # rank 0 makes the calls of workers, and traces them
    if path not in _OPERATIONS or isinstance(client, worker.WorkerClient):
        return await original(client, path, arguments)
    known = {"gen_ai.operation.name": _OPERATIONS[path], "gen_ai.provider.name": "openai"}
    asked = {_REQUESTED[name]: value for name, value in arguments.items() if name in _REQUESTED}
    with _Span(f"{_OPERATIONS[path]} {arguments.get('model')}", known | asked) as span:
        if _tracer.has_content:
            span.add_content("gen_ai.input.messages", arguments.get("messages") or [arguments.get("prompt")])
            span.add_content("gen_ai.tool.definitions", arguments.get("tools"))
        result = await original(client, path, arguments)
        # a test double's answer may be of any shape
        with contextlib.suppress(Exception):
            _note_answer(span, plain_data(result[0]))
        return result


def _note_answer(span: _Span, answer: Mapping[str, Any]) -> None:
    choices, usage = answer["choices"], answer.get("usage") or {}
    span.attributes |= {
        "gen_ai.response.id": answer.get("id"),
        "gen_ai.response.model": answer.get("model"),
        "gen_ai.response.finish_reasons": [str(choice.get("finish_reason")) for choice in choices],
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
    }
    if _tracer.has_content:
        span.add_content(
            "gen_ai.output.messages",
            [choice.get("message") or {"role": "assistant", "content": choice.get("text")} for choice in choices],
        )


@_wraps(HttpBackend, "post")
def _post(original: Wrapper, backend: Any, path: str, body: Any, arguments: Any = None) -> Any:
    if place := _place():
        given = arguments or {}
        # as W3C's Trace Context has it
        headers = {**(given.get("extra_headers") or {}), "traceparent": "00-{:032x}-{:016x}-{:02x}".format(*place)}
        arguments = {**given, "extra_headers": headers}
    return original(backend, path, body, arguments)


@_wraps(ToolEnv, "_answer")
async def _tool_call(original: Wrapper, env: Any, call: Any, *args: Any) -> Any:
    known = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name, "gen_ai.tool.call.id": call.id}
    with _Span(f"execute_tool {call.name}", known) as span:
        span.add_content("gen_ai.tool.call.arguments", call.arguments)
        reply = await original(env, call, *args)
        span.add_content("gen_ai.tool.call.result", reply.get("content"))
        return reply


@_wraps(ToolEnv, "_failure")
def _tool_failure(original: Wrapper, env: Any, error: Exception, call_id: str) -> Any:
    if (span := _current.get()) is not None:
        span.note(error)
    return original(env, error, call_id)


@_wraps(RewardCall, "result")
def _evaluation(original: Wrapper, call: Any, values: Mapping[str, Any]) -> Any:
    name = reward_name(call.func)
    # in the rollout of its state; a function of the whole group has none
    span = _Span(f"evaluate {name}", {"gen_ai.evaluation.name": name}, getattr(values.get("state"), "place", None))

    async def awaited() -> Any:
        with span:
            value = original(call, values)
            return span.note(await value if inspect.isawaitable(value) else value)

    if call.is_async:
        return awaited()
    with span:
        return span.note(original(call, values))


# -- workers: spans that end there come with the messages to rank 0 --------------------------------------------------


@_wraps(Connection, "send")
def _send(original: Wrapper, connection: Any, message: Mapping[str, Any]) -> None:
    told, spans = {**message, "place": _place()}, list[Any]()
    if _tracer.is_worker:
        spans = [_tracer.ended.popleft() for _ in range(len(_tracer.ended))]
        told["spans"] = json.dumps(spans, default=str)
    try:
        original(connection, told)
    except Exception:
        # a message that is refused is sent again, in other words
        _tracer.ended.extendleft(reversed(spans))
        raise


@_wraps(Connection, "_receive")
def _receive(original: Wrapper, connection: Any, message: Mapping[str, Any]) -> None:
    _tracer.ended.extend(json.loads(message.get("spans", "[]")))
    original(connection, message)


@_wraps(WorkerLink, "_call")
@_wraps(worker.RolloutWorker, "on_play")
@_wraps(worker.RolloutWorker, "on_score")
async def _work(original: Wrapper, *args: Any) -> Any:
    if place := args[-1].get("place"):
        # a task of its own, in the place that its message comes from
        span = _Span("", {})
        span.place = tuple(place)
        _current.set(span)
    return await original(*args)


@_wraps(RemoteWorkers, "load_message")
def _load_message(original: Wrapper, workers: Any) -> dict[str, Any]:
    message = original(workers)
    traced = [functools.partial(_traced_environment, each, _tracer.has_content) for each in message["factories"]]
    return {**message, "factories": [base64.b64encode(pickle.dumps(each)).decode() for each in traced]}


def _traced_environment(factory: str, has_content: bool) -> Any:
    """Load an environment in a worker, and trace there."""
    global _tracer
    if not _tracer.is_worker:
        _tracer = _Tracer(deque(), has_content, is_worker=True)
        _wrap_all()
    return pickle.loads(base64.b64decode(factory))()


# -- a run's traces ------------------------------------------------------------------------------------------------


def _bound(wrapper: Wrapper, original: Wrapper) -> Wrapper:
    # a function, which a class makes a method
    return functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def _wrap_all() -> contextlib.ExitStack:
    """Wrap what is traced, and return what undoes that."""
    undo = contextlib.ExitStack()
    for owner, name, wrapper in _wrappers:
        original = getattr(owner, name)
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, _bound(wrapper, original))
    return undo


def check(settings: Any) -> None:
    """Raise ConfigError where `trace` and `trace_share` of a run cannot be met."""
    if not str(settings.trace).startswith(("http://", "https://")):
        raise ConfigError(f"trace is {settings.trace!r}; give a collector's address, such as http://127.0.0.1:4318.")
    share = settings.trace_share
    if isinstance(share, str) or not 0 < share <= 1:
        raise ConfigError(f"trace_share is {share!r}; give a share above 0 and at most 1.")
    try:
        importlib.metadata.version("opentelemetry-exporter-otlp-proto-http")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"traces need OpenTelemetry's exporter; {install_hint('otel')}.") from None


def start(settings: Any, run: str) -> Callable[[], None]:
    """Trace the rollouts of a run, and return what ends that and sends what is left.

    Args:
        settings: has `trace`, `trace_share` and `trace_content`, as `GRPOConfig`.
        run: the run's name in spans.
    """
    global _tracer
    check(settings)
    if _tracer.ended.maxlen:
        raise ConfigError(f"the run {_tracer.run!r} is traced in this process; close it before another is.")
    exporter = SpanExporter(settings.trace, _MOST_WITH_CONTENT if settings.trace_content else _MOST_WAITING)
    _tracer = _Tracer(exporter.ended, settings.trace_content, settings.trace_share, run)
    end = contextlib.ExitStack()
    end.callback(_trace_nothing)
    end.callback(exporter.close)
    end.callback(_wrap_all().close)
    return end.close


def _trace_nothing() -> None:
    global _tracer
    _tracer = _NONE
