"""The client handle that each rollout gets: it looks like AsyncOpenAI, and it records.

Every environment must pass here, also one that overrides `rollout` or calls `client.chat.completions.create`
itself. So this is where throttling, retries, sampling seeds and the token-exact trace live.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError
from verifiers.inference.answers import check_tokens, counted_tokens, version_number
from verifiers.inference.endpoint import CHAT, COMPLETIONS, DERENDER, GENERATE, Backend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy, retry
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.token_in import ChatCall, TokenIn, TokenTurns
from verifiers.inference.wire import (
    WireObject,
    given_arguments,
    neutral_where_unset,
    plain_data,
    request_body,
    sampled_tokens,
)
from verifiers.rollouts.rollout import TokenSequence, Turn
from verifiers.types import Usage, message_field

__all__ = [
    "RecordedAnswer",
    "RolloutClient",
    "refuse_non_text",
    "rows_from_turns",
    "turn_seed",
    "without_tokens",
]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAnswer:
    """One answer of the trained policy, as far as the rollout's counts and trace are concerned.

    Attributes:
        usage: tokens of the call, as the server counted them.
        turn: None where the server gave no token ids.
    """

    finish_reason: str | None
    usage: Usage
    turn: Turn | None


class RecordedResponse(WireObject):
    """An answer whose tokens are held once, in its `turn`, and made when an environment reads them here."""

    __slots__ = ("turn",)

    turn: Turn

    def __getattr__(self, name: str) -> Any:
        if name == "prompt_token_ids":
            return list(self.turn.prompt_ids)
        value = super().__getattr__(name)
        if name == "choices":
            value[0] = _RecordedChoice(plain_data(value[0]))
            value[0].turn = self.turn
        return value


class _RecordedChoice(WireObject):
    __slots__ = ("turn",)

    turn: Turn

    def __getattr__(self, name: str) -> Any:
        if name == "token_ids":
            return list(self.turn.completion_ids)
        if name == "logprobs":
            tokens = [f"token_id:{token_id}" for token_id in self.turn.completion_ids]
            logprobs = list(self.turn.logprobs)
            content = [{"token": token, "logprob": logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
            return WireObject({"content": content, "tokens": tokens, "token_logprobs": logprobs})
        return super().__getattr__(name)


def without_tokens(response: Mapping[str, Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer without the token ids and log-probs that the environment has not asked for."""
    extra = arguments.get("extra_body") or {}
    asked = any((arguments.get(name) or extra.get(name)) for name in ("logprobs", "return_token_ids"))
    if asked or "choices" not in response:
        return response
    lean = {name: value for name, value in response.items() if name not in _TOKEN_FIELDS}
    lean["choices"] = [
        {name: value for name, value in choice.items() if name not in _TOKEN_FIELDS} for choice in response["choices"]
    ]
    return lean


_TOKEN_FIELDS = ("logprobs", "prompt_token_ids", "token_ids", "weight_versions")


class PromptIds(Sequence[int]):
    """Token ids of a prompt that continues an earlier one and its answer: each id is held once.

    Args:
        before: the earlier prompt and answer; None for a prompt that continues none.
        added: the ids after them.
    """

    __slots__ = ("_added", "_before", "_length")

    def __init__(self, before: tuple[PromptIds, array[int]] | None, added: array[int]) -> None:
        self._before, self._added = before, added
        self._length = len(added) + (len(before[0]) + len(before[1]) if before is not None else 0)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        parts = [self._added]
        before = self._before
        while before is not None:
            prompt, answer = before
            parts += [answer, prompt._added]
            before = prompt._before
        return itertools.chain.from_iterable(reversed(parts))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class _GrowingIds:
    """The newest prompt and answer of a rollout, which the next prompt nearly always continues."""

    def __init__(self) -> None:
        self._newest: tuple[PromptIds, array[int]] | None = None
        self._ids = array("q")

    def append(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[PromptIds, array[int]]:
        """Return a call's prompt and answer as they are held."""
        prompt, completion = array("q", prompt_ids), array("q", completion_ids)
        held = len(self._ids)
        continues = self._newest is not None and prompt[:held] == self._ids
        self._newest = PromptIds(self._newest, prompt[held:]) if continues else PromptIds(None, prompt), completion
        self._ids = prompt + completion
        return self._newest


def turn_seed(rollout_seed: int, turn: int) -> int:
    """Return the sampling seed, of 63 bits, of one call in a rollout; turns that shared one would sample alike."""
    digest = hashlib.blake2b(f"{rollout_seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def refuse_non_text(messages: Any, whose: str) -> None:
    """Refuse messages of training that hold images, audio or files: a row of token ids has no place for them.

    Raises:
        ConfigError: with the type of the part.
    """
    for message in () if isinstance(messages, str) else messages:
        content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
        for part in content if isinstance(content, list) else ():
            kind = "text" if isinstance(part, str) else str(message_field(part, "type") or "text")
            if kind not in ("text", "refusal"):
                raise ConfigError(
                    f"{whose} has a content part of type {kind!r}, and training takes text alone; leave such rows "
                    "and replies out of training, or evaluate on them."
                )


class _Create:
    """`client.chat.completions` or `client.completions`: one method, `create`."""

    # made for each call, so that an assignment to `create` must fail instead of being lost
    __slots__ = ("_client", "_path")

    def __init__(self, client: RolloutClient, path: str) -> None:
        self._client = client
        self._path = path

    async def create(self, **arguments: Any) -> Any:
        response, _ = await self._client.call(self._path, arguments)
        return response


class _Chat:
    def __init__(self, completions: _Create) -> None:
        self.completions = completions


class RolloutClient:
    """A recording stand-in for `openai.AsyncOpenAI`, one for each rollout.

    Args:
        backend: how a call leaves the process.
        limiter: shared throttle; the caller that runs the rollout holds its slot.
        retry: the retry policy, the only one there is.
        model: name of the trained policy; calls that name another model are not trained.
        seed: the rollout's sampling seed; each call gets its own derived from it. Wins over a seed in the
            call's arguments, since two rollouts of a group must never share one. None leaves the call alone.
        require_tokens: ask for token ids and log-probs, and fail where the server sends none; sampling arguments
            that a call leaves out are sent as those of the model's own distribution (training).
        policy_version: gives the policy version now on the server, for servers that do not stamp tokens.
        token_in: how turns are sent as token ids; None sends messages.
        check_call: given the body fields of each trained call before anything is sent, where tokens are required;
            raises ConfigError where the trainer assumes another distribution.
        vocab_size: number of token ids that the policy has; None where that is not known.
        group: the same for rollouts whose prompts begin alike; of several servers, they prefer the same one.

    Attributes:
        answers: of the trained policy, in the order in which they came back.
        retries: tries that were repeated.
        last_error: what the newest trained call failed with, or None where it succeeded.
        fatal_error: the newest failure of a trained call that every other rollout would repeat.
        overlong: a call's prompt did not fit the context.
        is_cut_off: a budget of calls or tokens ended the rollout.
        trains: `group`, where the rollout is for training; else None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        limiter: Limiter | None = None,
        retry: RetryPolicy | None = None,
        model: str | None = None,
        seed: int | None = None,
        require_tokens: bool = False,
        policy_version: Callable[[], int] | None = None,
        token_in: TokenIn | None = None,
        check_call: Callable[[Mapping[str, Any]], None] | None = None,
        vocab_size: int | None = None,
        group: Hashable = None,
    ) -> None:
        # the turns of one rollout share a prefix, which one of several servers then holds
        self._backend = backend.for_rollout(group) if isinstance(backend, ServerPool) else backend
        self._limiter = limiter
        self._retry = retry or RetryPolicy()
        self._model = model
        self._seed = seed
        self._require_tokens = require_tokens
        self._policy_version = policy_version
        self._tokens = TokenTurns(token_in) if token_in is not None else None
        self._check_call = check_call
        self._vocab_size = vocab_size
        self._ids = _GrowingIds()
        self._begun = 0
        self._trained = True
        self.answers: list[RecordedAnswer] = []
        self.retries = 0
        self.last_error: Exception | None = None
        self.fatal_error: Exception | None = None
        self.overlong = False
        self.is_cut_off = False
        self.trains = group if require_tokens else None

    # made when they are asked for: as attributes they would be cycles, and rollouts would wait for the collector

    @property
    def chat(self) -> _Chat:
        return _Chat(_Create(self, CHAT))

    @property
    def completions(self) -> _Create:
        return _Create(self, COMPLETIONS)

    @property
    def base_url(self) -> str:
        return self._backend.base_url

    @property
    def api_key(self) -> str:
        return self._backend.api_key

    @property
    def turns(self) -> list[Turn]:
        """The answers with token ids."""
        return [answer.turn for answer in self.answers if answer.turn is not None]

    @property
    def calls(self) -> int:
        """Number of trained calls that got an answer."""
        return len(self.answers)

    @property
    def usage(self) -> Usage:
        """Tokens of all trained calls."""
        used = [answer.usage for answer in self.answers]
        numbers = zip(*((each.prompt_tokens, each.completion_tokens) for each in used), strict=True)
        return Usage(*(None if None in each else sum(each) for each in numbers))

    @property
    def finish_reason(self) -> str | None:
        """Of the newest trained call."""
        return self.answers[-1].finish_reason if self.answers else None

    @property
    def untrained(self) -> RolloutClient:
        """A handle on the same server for calls that are not trained: judges, user simulators, other sampling."""
        other = RolloutClient(self._backend, limiter=self._limiter, retry=self._retry)
        other._trained = False
        return other

    def record(self) -> None:
        """Put later calls into the trace; a new handle does."""
        self._trained = True

    def stop_recording(self) -> None:
        """Leave later calls out of the trace: the rollout is over, and its rewards may still ask."""
        self._trained = False

    def with_options(self, **_: Any) -> RolloutClient:
        """Return the same handle: timeouts and retries are the run's, so that one rollout cannot escape them."""
        return self

    async def close(self) -> None:
        """Do nothing: connections belong to the run."""

    async def call(self, path: str, arguments: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        """Make a call of `chat.completions` or `completions`, as `create` does.

        Returns:
            The response, and what was recorded of it; None for a call that is not trained.
        """
        if not self._trained or (self._model is not None and arguments.get("model") != self._model):
            return await self._send(path, arguments), None
        return await self._call_policy(path, arguments)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments of a trained call under which its answer could not be trained.

        Raises:
            ConfigError: with the argument.
        """
        if not self._require_tokens:
            return
        refuse_non_text(arguments.get("messages") or "", "a call of the environment")
        fields = {**arguments, **(arguments.get("extra_body") or {})}
        if isinstance(n := fields.get("n"), int) and n > 1:
            raise ConfigError(f"a training rollout asked for n={n} answers in one call; ask for one at a time.")
        if self._check_call is not None:
            self._check_call(fields)

    def forget(self, answer: RecordedAnswer) -> None:
        """Take an answer out of the trace and the counts: nobody read it."""
        self.answers.remove(answer)

    async def _call_policy(self, path: str, given: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        began = [0]
        call: ChatCall | None = None
        try:
            arguments = self._prepared(path, given)
            response = None
            if self._tokens is not None and path == CHAT:
                send = functools.partial(self._send, began=began)
                response, call = await self._tokens.ask(send, request_body(arguments))
            if response is None:
                response = await self._send(path, arguments, began)
            recorded = self._record(response, began[0], call)
            if recorded is not None and recorded.turn is not None and isinstance(response, WireObject):
                # held once, in the trace: the prompts of a long rollout add up to many times its tokens
                lean = without_tokens(plain_data(response), given)
                if lean is not plain_data(response):
                    response = RecordedResponse(lean)
                    response.turn = recorded.turn
            return response, recorded
        except OverlongPromptError:
            self.overlong = True
            raise
        except Exception as error:
            self.last_error = error
            if isinstance(error, ConfigError):
                self.fatal_error = error
            raise

    async def _send(self, path: str, arguments: Mapping[str, Any], began: list[int] | None = None) -> Any:
        """Send a call, with retries.

        Args:
            began: gets the policy version at the start of the newest try that samples; None for a call that is not
                trained.
        """
        samples = path != DERENDER

        # each try sends the same: where they are token ids, the same ids and seed
        async def attempt() -> Any:
            if began is None or not samples:
                return await self._backend.call(path, arguments)
            began[0] = self._version_now()
            answer = await self._backend.call(path, arguments)
            check_tokens(
                plain_data(answer),
                self.base_url,
                needed=self._require_tokens,
                vocab_size=self._vocab_size,
                has_prompt=path != GENERATE,
            )
            return answer

        return await retry(attempt, self._retry, self._count_retry, self._limiter, throttled=samples)

    def _version_now(self) -> int:
        return self._policy_version() if self._policy_version is not None else 0

    def _count_retry(self, _: Exception) -> None:
        self.retries += 1

    def _prepared(self, path: str, arguments: dict[str, Any]) -> dict[str, Any]:
        seed = turn_seed(self._seed, self._begun) if self._seed is not None else None
        self._begun += 1
        arguments = given_arguments(arguments)
        self.check(arguments)
        # extra_body is merged in last, so what must hold is taken out of it
        extra = dict(arguments.get("extra_body") or {})
        if seed is not None:
            arguments["seed"] = seed
            extra.pop("seed", None)
        if self._require_tokens:
            extra.pop("logprobs", None)
            if arguments.get("temperature") is None:
                # a server may have another default, from the model's generation_config.json
                arguments["temperature"] = 1.0
            arguments["logprobs"] = True if path == CHAT else arguments.get("logprobs") or 0
            extra |= neutral_where_unset(arguments, extra)
            # a keyword that the SDK does not know goes into extra_body, which every backend understands
            extra["return_token_ids"] = True
        if extra:
            arguments["extra_body"] = extra
        return arguments

    def _record(self, response: Any, version_before: int, call: ChatCall | None) -> RecordedAnswer | None:
        """Put an answer into the trace, and, where it answers a `call`, into what later turns may extend."""
        if not getattr(response, "choices", None):
            raise EmptyModelResponseError(f"{self.base_url} answered without a choice: {response!r:.300}")
        self.last_error = None
        # the plain JSON where it is ours: wrapping every token's entry would cost more than the call
        answer = plain_data(response)
        choices = answer.get("choices")
        if not choices:
            return None
        choice = choices[0]
        sampled = sampled_tokens(answer)
        counted = counted_tokens(answer)
        used = [
            counted.get(name, None if ids is None else len(ids))
            for name, ids in (("prompt_tokens", sampled.prompt_ids), ("completion_tokens", sampled.completion_ids))
        ]
        prompt_ids, completion_ids, logprobs = sampled.prompt_ids, sampled.completion_ids, sampled.logprobs
        reason = choice.get("finish_reason")
        turn = None
        if prompt_ids is not None and completion_ids is not None and logprobs is not None:
            versions, all_reported = _versions(sampled.versions, len(completion_ids), version_before)
            version_after = version_before if all_reported else self._version_now()
            # it is unknown before which token a push in between came, so both versions stand for all of them
            newest = version_after if version_after != version_before else None
            held = self._ids.append(prompt_ids, completion_ids)
            turn = Turn(*held, array("d", logprobs), versions, reason, newest)
            if self._tokens is not None and call is not None:
                self._tokens.hold(call, choice.get("message") or {}, *held)
        recorded = RecordedAnswer(reason, Usage(*used), turn)
        self.answers.append(recorded)
        return recorded


def _versions(spans: Sequence[Mapping[str, Any]], length: int, default: int) -> tuple[list[int], bool]:
    """Return each token's policy version: the server's spans where it reports them, else the version at the start.

    Returns:
        The versions, and whether the server reported all of them.
    """
    versions = [default] * length
    reported = 0
    for span in spans:
        version = version_number(span["version"])
        if version is not None:
            start, end = int(span["start"]), min(int(span["end"]), length)
            versions[start:end] = [version] * (end - start)
            reported += end - start
    return versions, reported >= length


def rows_from_turns(turns: Iterable[Turn]) -> tuple[list[TokenSequence], int]:
    """Join turns into training rows.

    Where a turn's prompt extends, id for id, what a row already holds, the new tokens are appended to that row; where
    it does not (a chat template that rewrites history, a tokenizer that merges differently), a new row starts and is
    counted as a fork. Nothing is ever re-tokenized or realigned.

    Returns:
        The rows in the order in which they began, and the number of forks: turns after the first that
        extended no row. Turns without a sampled token are left out.
    """
    rows: list[TokenSequence] = []
    forks = 0
    for turn in turns:
        if not turn.completion_ids:
            continue
        prompt_ids = list(turn.prompt_ids)
        # of several rows that a prompt extends, the longest: it leaves the fewest tokens to be given once more
        longest: tuple[TokenSequence, Sequence[int]] | None = None
        for row in reversed(rows):
            added = _added_ids(row, prompt_ids)
            if added is not None and (longest is None or len(added) < len(longest[1])):
                longest = row, added
        if longest is None:
            forks += bool(rows)
            longest = TokenSequence(prompt_ids=prompt_ids), ()
            rows.append(longest[0])
        _append_turn(*longest, turn)
    return rows, forks


def _added_ids(row: TokenSequence, prompt_ids: list[int]) -> Sequence[int] | None:
    """Return the tokens that a prompt adds to a row, or None where the prompt does not extend the row."""
    held_prompt, held = len(row.prompt_ids), len(row.prompt_ids) + len(row.completion_ids)
    if len(prompt_ids) < held:
        return None
    if prompt_ids[:held_prompt] != row.prompt_ids or prompt_ids[held_prompt:held] != row.completion_ids:
        return None
    return prompt_ids[held:]


def _append_turn(row: TokenSequence, environment_ids: Sequence[int], turn: Turn) -> None:
    """Append what the environment wrote, seen by the policy and without loss, and what the policy then sampled."""
    written, sampled = len(environment_ids), len(turn.completion_ids)
    row.completion_ids += [*environment_ids, *turn.completion_ids]
    row.loss_mask += [0] * written + [1] * sampled
    row.logprobs += [0.0] * written + list(turn.logprobs)
    row.versions += [-1] * written + list(turn.versions)
    row.is_truncated = turn.finish_reason == "length"
    if turn.newest_version is not None:
        row.unreported_version = max(turn.newest_version, row.unreported_version or 0)
