"""The client handle that each rollout gets: it looks like AsyncOpenAI, and it records.

Every environment must pass here, also one that overrides `rollout` or calls `client.chat.completions.create`
itself. So this is where throttling, retries, sampling seeds and the token-exact trace live.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, EmptyModelResponseError, OverlongPromptError, ProviderError
from verifiers.images import ImageStore
from verifiers.inference.endpoint import CHAT, COMPLETIONS, DERENDER, GENERATE, Backend
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy, retry
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.token_in import ChatCall, TokenIn, TokenTurns, completion_by_ids
from verifiers.inference.wire import (
    MaskSource,
    RecordedResponse,
    SampledTokens,
    WireObject,
    check_tokens,
    given_arguments,
    mask_fields,
    neutral_where_unset,
    plain_data,
    request_body,
    version_number,
    without_tokens,
)
from verifiers.rollouts.rollout import TokenSequence, Turn
from verifiers.types import Usage, message_field


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAnswer:
    """One answer of the trained policy, as far as the rollout's counts and trace are concerned.

    Attributes:
        number: of its call, in the order in which a rollout's calls began.
        usage: tokens of the call, as the server counted them.
        turn: None where the server gave no token ids.
    """

    number: int
    finish_reason: str | None
    usage: Usage
    turn: Turn | None
    refusal: str | None


class PromptIds(Sequence[int]):
    """Token ids of a prompt that continues an earlier one and its answer, if any: each id is held once."""

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

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class _GrowingIds:
    def __init__(self) -> None:
        self._newest: tuple[PromptIds, array[int]] | None = None
        self._ids = array("q")

    def append(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> tuple[PromptIds, array[int]]:
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


def refuse_non_text(messages: Any, whose: str, max_images: int = 0) -> None:
    """Refuse messages of training that hold audio, files, or more images than the run takes in a prompt."""
    images = 0
    for message in () if isinstance(messages, str) else messages:
        content = message_field(message, "content")
        for part in content if isinstance(content, list) else ():
            kind = "text" if isinstance(part, str) else str(message_field(part, "type") or "text")
            images += kind == "image_url"
            if images > max_images and kind == "image_url":
                raise ConfigError(
                    f"{whose} has more images than max_images={max_images}; set it to the most that a prompt of this "
                    "run holds, or leave such rows and replies out of training."
                )
            if kind not in ("text", "refusal", "image_url"):
                raise ConfigError(
                    f"{whose} has a content part of type {kind!r}, and training takes text and images "
                    "({'type': 'image_url'}) alone; leave such rows and replies out, or evaluate on them."
                )


_role: ContextVar[str | None] = ContextVar("role", default=None)


@contextlib.contextmanager
def as_role(name: str | None) -> Iterator[None]:
    """Train the answers to calls made meanwhile as those of a role; None for those of the rollout."""
    before = _role.set(name)
    try:
        yield
    finally:
        _role.reset(before)


def present_role() -> str | None:
    return _role.get()


class _OpenAIClient:
    # made when they are asked for: as attributes they would be cycles, and rollouts would wait for the collector

    @property
    def chat(self) -> _Chat:
        return _Chat(_Create(self, CHAT))

    @property
    def completions(self) -> _Create:
        return _Create(self, COMPLETIONS)


class RoleClient(_OpenAIClient):
    """A handle of `RolloutClient.role`: what it does not do itself, the rollout's client does."""

    def __init__(self, client: RolloutClient, name: str) -> None:
        self._client, self._name = client, name

    def with_options(self, **_: Any) -> RoleClient:
        return self

    async def call(self, path: str, arguments: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        with as_role(self._name):
            return await self._client.call(path, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _Create:
    """`client.chat.completions` or `client.completions`: one method, `create`."""

    # made for each call, so that an assignment to `create` must fail instead of being lost
    __slots__ = ("_client", "_path")

    def __init__(self, client: Any, path: str) -> None:
        self._client = client
        self._path = path

    async def create(self, **arguments: Any) -> Any:
        response, _ = await self._client.call(self._path, arguments)
        return response


@dataclass(frozen=True, slots=True)
class _Chat:
    completions: _Create


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a successful try gave; no tokens for a test double without plain data, the version when it began."""

    response: Any
    tokens: SampledTokens | None
    version: int


class RolloutClient(_OpenAIClient):
    """A recording stand-in for `openai.AsyncOpenAI`, one for each rollout.

    Args:
        limiter: shared throttle; the caller that runs the rollout holds its slot.
        model: name of the trained policy; calls that name another model are not trained.
        seed: the rollout's sampling seed; each call gets its own derived from it. Wins over a seed in the
            call's arguments, since two rollouts of a group must never share one. None leaves the call alone.
        require_tokens: ask for token ids and log-probs, and fail where the server sends none; sampling arguments
            that a call leaves out are sent as those of the model's own distribution (training).
        policy_version: gives the policy version now on the server, for servers that do not stamp tokens.
        check_call: given the body fields of each trained call before anything is sent, where tokens are required;
            raises ConfigError where the trainer assumes another distribution.
        mask_source: how the server tells which tokens were left to draw from; None where nobody needs that.
        group: the same for rollouts whose prompts begin alike; of several servers, they prefer the same one.
        images: keeps the images of trained calls; None where training takes text alone.

    Attributes:
        is_recording: calls go into the trace. It ends with the rollout: its rewards may still ask.
        last_error: what the newest trained call failed with, or None where it succeeded.
        fatal_error: the newest failure of a trained call that every other rollout would repeat.
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
        mask_source: MaskSource | None = None,
        group: Hashable = None,
        images: ImageStore | None = None,
    ) -> None:
        # the turns of one rollout share a prefix, which one of several servers then holds
        self._backend = backend.for_rollout(group) if isinstance(backend, ServerPool) else backend
        self._limiter = limiter
        self._retry = retry or RetryPolicy()
        self._model = model
        self._seed = seed
        self._require_tokens = require_tokens
        # version 0 where nothing is pushed
        self._policy_version = policy_version or int
        self._tokens = TokenTurns(token_in) if token_in is not None else None
        self._check_call = check_call
        self._vocab_size = vocab_size
        self._mask_source: MaskSource | None = mask_source
        self._images = images if require_tokens else None
        self._ids = _GrowingIds()
        self._begun = 0
        self._has_asked = False
        self.answers: list[RecordedAnswer] = []
        self.is_recording = True
        self.retries = 0
        self.last_error: Exception | None = None
        self.fatal_error: Exception | None = None
        self.overlong = False
        self.is_cut_off = False
        self.trains = group if require_tokens else None

    @property
    def base_url(self) -> str:
        return self._backend.base_url

    @property
    def api_key(self) -> str:
        return self._backend.api_key

    @property
    def turns(self) -> list[Turn]:
        return [answer.turn for answer in self.answers if answer.turn is not None]

    @property
    def calls(self) -> int:
        """Number of trained calls that got an answer."""
        return len(self.answers)

    @property
    def usage(self) -> Usage:
        used = [answer.usage for answer in self.answers]
        return Usage(_total([one.prompt_tokens for one in used]), _total([one.completion_tokens for one in used]))

    @property
    def finish_reason(self) -> str | None:
        return self.answers[-1].finish_reason if self.answers else None

    @property
    def refusal(self) -> str | None:
        return self.answers[-1].refusal if self.answers else None

    @property
    def untrained(self) -> RolloutClient:
        """A handle on the same server for calls that are not trained: judges, user simulators, other sampling."""
        other = RolloutClient(self._backend, limiter=self._limiter, retry=self._retry)
        other.is_recording, other._has_asked = False, True
        return other

    def role(self, name: str) -> RoleClient:
        """Return a handle whose answers are trained as those of a role: in rows of their own, by the role's reward.

        The rubric gives that by a function marked with `vf.role_reward`.
        """
        return RoleClient(self, name)

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
        if not self.is_recording or (self._model is not None and arguments.get("model") != self._model):
            return await self._send(path, arguments), None
        try:
            return await self._call_policy(path, arguments)
        except OverlongPromptError:
            self.overlong = True
            raise
        except TypeError:
            # what the environment gave cannot be sent: no fault of the server's
            raise
        except Exception as error:
            self.last_error = error
            if isinstance(error, ConfigError):
                self.fatal_error = error
            raise

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments of a trained call under which its answer could not be trained."""
        if not self._require_tokens:
            return
        most = self._images.max_images if self._images is not None else 0
        refuse_non_text(arguments.get("messages") or "", "a call of the environment", most)
        fields = {**arguments, **(arguments.get("extra_body") or {})}
        if isinstance(n := fields.get("n"), int) and n > 1:
            raise ConfigError(f"a training rollout asked for n={n} answers in one call; ask for one at a time.")
        if self._check_call is not None:
            self._check_call(fields)

    def forget(self, answer: RecordedAnswer) -> None:
        """Take an answer out of the trace and the counts: nobody read it."""
        self.answers.remove(answer)

    async def _call_policy(self, path: str, given: dict[str, Any]) -> tuple[Any, RecordedAnswer | None]:
        arguments, is_cut = self._prepared(path, given)
        number = self._begun
        names = [] if self._images is None else self._images.keep_all(given.get("messages") or "")
        call: ChatCall | None = None
        sampled: _Sampled | None = None
        if self._tokens is not None and path == CHAT:
            call, ids = await self._tokens.read(request_body(arguments))
            if call is not None and ids is not None:
                sampled = await self._sample_by_ids(self._tokens, call, ids, is_cut)
        if sampled is None:
            sampled = await self._sample(path, arguments, is_cut)
        response, tokens = sampled.response, sampled.tokens
        if tokens is None and not getattr(response, "choices", None):
            raise EmptyModelResponseError(f"{self.base_url} answered without a choice: {response!r:.300}")
        self.last_error = None
        if tokens is None:
            return response, None
        turn = self._turn(tokens, sampled.version, names)
        recorded = RecordedAnswer(number, tokens.finish_reason, tokens.usage, turn, tokens.refusal)
        # calls made side by side are answered in any order
        bisect.insort(self.answers, recorded, key=operator.attrgetter("number"))
        if recorded.turn is None:
            return response, recorded
        answer = plain_data(response)
        if isinstance(response, WireObject):
            # held once, in the trace: the prompts of a long rollout add up to many times its tokens
            lean = without_tokens(answer, given)
            if lean is not answer:
                response = RecordedResponse(lean, recorded.turn)
        if self._tokens is not None and call is not None:
            message = answer["choices"][0].get("message") or {}
            self._tokens.hold(call, message, recorded.turn.prompt_ids, recorded.turn.completion_ids)
        return response, recorded

    async def _sample_by_ids(
        self, turns: TokenTurns, call: ChatCall, ids: list[int], is_cut: bool
    ) -> _Sampled | None:
        """Answer a chat call by its prompt's ids; None where a failing route sends it as messages."""
        try:
            sampled = await self._sample(GENERATE, call.generate_body(ids), is_cut)
            response = await completion_by_ids(call, ids, sampled.response, self._send)
        except ProviderError as error:
            if not turns.shared.refuse_for_now(error):
                raise
            return None
        assert sampled.tokens is not None
        usage = Usage(len(ids), len(sampled.tokens.completion_ids or ()))
        reason = response.choices[0].finish_reason
        tokens = dataclasses.replace(sampled.tokens, prompt_ids=ids, finish_reason=reason, usage=usage)
        return _Sampled(response, tokens, sampled.version)

    async def _send(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Send a call that samples nothing of the policy, with retries."""

        async def attempt() -> Any:
            if path != DERENDER:
                await self._wait_for_request()
            return await self._backend.call(path, arguments)

        return await retry(attempt, self._retry, self._count_retry, self._limiter)

    async def _sample(self, path: str, arguments: Mapping[str, Any], is_cut: bool) -> _Sampled:
        """Send a call of the policy, with retries; each try has the same seed and ids."""

        async def attempt() -> _Sampled:
            await self._wait_for_request()
            version = self._policy_version()
            response = await self._backend.call(path, arguments)
            tokens = check_tokens(
                plain_data(response),
                self._backend.base_url,
                needed=self._require_tokens,
                vocab_size=self._vocab_size,
                has_prompt=path != GENERATE,
                mask_source=self._mask_source if is_cut else None,
            )
            return _Sampled(response, tokens, version)

        return await retry(attempt, self._retry, self._count_retry, self._limiter)

    async def _wait_for_request(self) -> None:
        if self._limiter is not None:
            await self._limiter.wait_for_request(begins=not self._has_asked)
            self._has_asked = True

    def _count_retry(self, _: Exception) -> None:
        self.retries += 1

    def _prepared(self, path: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the arguments that are sent, and whether they leave tokens out that the trainer has to know."""
        seed = turn_seed(self._seed, self._begun) if self._seed is not None else None
        self._begun += 1
        arguments = given_arguments(arguments)
        self.check(arguments)
        # extra_body is merged in last, so what must hold is taken out of it
        extra = dict(arguments.get("extra_body") or {})
        mask: dict[str, Any] = {}
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
            if self._mask_source is not None:
                mask = mask_fields({**arguments, **extra}, self._mask_source, self._vocab_size)
            if path != CHAT and "top_logprobs" in mask:
                mask["logprobs"] = mask.pop("top_logprobs")
            extra |= mask
        if extra:
            arguments["extra_body"] = extra
        return arguments, bool(mask)

    def _turn(self, tokens: SampledTokens, version_before: int, images: Sequence[str]) -> Turn | None:
        if tokens.prompt_ids is None or tokens.completion_ids is None or tokens.logprobs is None:
            return None
        versions = _versions(tokens.versions, len(tokens.completion_ids), version_before)
        held = self._ids.append(tokens.prompt_ids, tokens.completion_ids)
        kept: Sequence[Sequence[int]] = tokens.kept or ()
        counts, ids = array("i", map(len, kept)), array("i", itertools.chain.from_iterable(kept))
        return Turn(*held, array("d", tokens.logprobs), versions, _role.get(), counts, ids, tuple(images))


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _versions(spans: Sequence[Mapping[str, Any]], length: int, default: int) -> list[int]:
    """Return each token's policy version, the default where the server reports none."""
    versions = [default] * length
    for span in spans:
        version = version_number(span["version"])
        if version is not None:
            start, end = int(span["start"]), min(int(span["end"]), length)
            versions[start:end] = [version] * (end - start)
    return versions


def rows_from_turns(turns: Iterable[Turn]) -> tuple[list[TokenSequence], int]:
    """Join turns into training rows.

    Each role has rows of its own. Where a turn's prompt extends, id for id, what a row already holds, the new tokens
    are appended to that row; where it does not (a chat template that rewrites history, a tokenizer that merges
    differently), a new row starts and is counted as a fork. Nothing is ever re-tokenized or realigned.

    Returns:
        The rows in the order in which they began, and the number of forks: turns after the first of their role
        that extended no row. Turns without a sampled token are left out.
    """
    rows: list[TokenSequence] = []
    forks = 0
    for number, turn in enumerate(turns):
        if not turn.completion_ids:
            continue
        prompt_ids = list(turn.prompt_ids)
        # of several rows that a prompt extends, the longest: it leaves the fewest tokens to be given once more
        longest: tuple[TokenSequence, Sequence[int]] | None = None
        of_role = [row for row in rows if row.role == turn.role]
        for row in reversed(of_role):
            # the ids of two images may be the same
            is_of_row = turn.images[: len(row.images)] == row.images
            added = _added_ids(row, prompt_ids) if is_of_row else None
            if added is not None and (longest is None or len(added) < len(longest[1])):
                longest = row, added
        if longest is None:
            forks += bool(of_role)
            longest = TokenSequence(prompt_ids=prompt_ids, role=turn.role), ()
            rows.append(longest[0])
        _append_turn(*longest, turn)
        longest[0].turn_lengths[number] = len(turn.completion_ids)
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
    if turn.kept_counts or row.kept_counts:
        before = len(row.completion_ids) + written - len(row.kept_counts)
        counts = turn.kept_counts or [0] * sampled
        row.kept_counts, row.kept_ids = array("i", row.kept_counts), array("i", row.kept_ids)
        row.kept_counts.extend([*[0] * before, *counts])
        row.kept_ids.extend(turn.kept_ids)
    row.completion_ids += [*environment_ids, *turn.completion_ids]
    row.loss_mask += [0] * written + [1] * sampled
    row.logprobs += [0.0] * written + list(turn.logprobs)
    row.versions += [-1] * written + list(turn.versions)
    row.images = turn.images
