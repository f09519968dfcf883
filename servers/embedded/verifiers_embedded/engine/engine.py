"""The thread that generates: continuous batching, pauses, and changes of weights between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Literal

import torch

from verifiers.train.image_processor import ImageProcessor
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.decoding import Record
from verifiers_embedded.engine.generation import Generation, GenerationRequest, Sequence, Watcher, WeightVersion
from verifiers_embedded.engine.sampling import NoiseStream
from verifiers_embedded.engine.scoring import Prompt, PromptScore
from verifiers_embedded.engine.stopping import Decode, IsByte, StopMatcher, no_byte
from verifiers_embedded.engine.weights import Copies, copy_weights
from verifiers_embedded.errors import BrokenLogits, EngineDied, EngineStopped, GrammarFailed

log = logging.getLogger("verifiers_embedded")

PauseMode = Literal["keep", "wait", "abort"]
PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")

INITIAL_VERSION = "default"
"""vLLM's name for weights that were never updated."""

_ADMIT_WITH_ROOM = 64
"""Tokens that all sequences can grow by when one is admitted, so that it need not give up its slot at once."""

_GATHER_S = 0.001
_GATHER_MOST_S = 0.02


class Engine:
    """A generator of completions in a thread of its own. All methods may be called from any thread.

    Requests are taken in the order they came, at most `slots` at a time; a free slot is filled before the
    next step. An exception in the thread ends it: every waiting and later request is answered with
    EngineDied.

    Args:
        model: a causal language model of transformers, frozen and in eval mode, on its device.
        decode, is_byte: token ids to text without special tokens, for stop strings, and which of them are single
            bytes; called from the engine's thread.
        max_model_len: most tokens of one sequence, prompt and completion together.
        prefix_bytes: memory for keys and values of finished sequences; a prompt that begins like one of them
            is computed from there on. A reload empties it.
        record: `decoding.CudaGraphs`, or None to record no passes.
        cache_tokens: slots times longest sequence that the key-value cache may hold; further requests wait, and
            where sequences outgrow it, the shortest waits too and is computed again. None: all that may be needed.
        images: where the model has its tower, what its prompts with images were read by.
    """

    def __init__(
        self,
        model: Any,
        *,
        decode: Decode,
        is_byte: IsByte = no_byte,
        slots: int,
        max_model_len: int,
        threads: int | None = None,
        prefix_bytes: int = 0,
        record: Record | None = None,
        cache_tokens: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self._model = model
        self._decode, self._is_byte = decode, is_byte
        self.slots = slots
        self._threads = threads
        self._batch = ActiveBatch(model, slots, max_model_len, prefix_bytes, record, cache_tokens, images)
        self._wake = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._commands: deque[tuple[Callable[[Future[Any]], bool], Future[Any]]] = deque()
        self._to_score: list[tuple[Prompt, Future[PromptScore]]] = []
        self._drained: list[Future[None]] = []
        self._paused = False
        self._draining = False
        self._stopping = False
        self._version = WeightVersion(INITIAL_VERSION)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="vf-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Answer everything that waits with EngineStopped and end the thread after its current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def failure(self) -> Exception | None:
        """Error that ended generation; None while the thread works."""
        if self._failure is None and not self._thread.is_alive():
            return EngineStopped("the engine thread is not running")
        return self._failure

    @property
    def is_paused(self) -> bool:
        """True while no token is sampled until `resume`; also while a pause still waits for its slots."""
        return self._paused or self._draining

    @property
    def weight_version(self) -> str:
        return self._version.label

    @property
    def counts(self) -> dict[str, int]:
        return {"running": len(self._batch.sequences), "waiting": len(self._waiting)}

    @property
    def prefixes(self) -> dict[str, int]:
        store = self._batch.prefixes
        return {
            "held": len(store),
            "bytes": store.bytes,
            "hits": store.hits,
            "tokens_reused": store.tokens_reused,
        }

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Queue a request. Cancelling the future frees its slot at the next step."""
        return self.submit_all([(request, None)])[0]

    def submit_all(self, requests: Iterable[tuple[GenerationRequest, Watcher | None]]) -> list[Future[Generation]]:
        """Queue requests that begin together, as far as slots are free, so that an equal prompt is computed once."""
        sequences = [self._sequence(request, watcher) for request, watcher in requests]
        with self._wake:
            if self._failure is not None:
                for sequence in sequences:
                    _complete(sequence.future, error=self._failure)
            else:
                self._waiting.extend(sequences)
                self._wake.notify()
        return [sequence.future for sequence in sequences]

    def score(self, ids: list[int], alternatives: int) -> Future[PromptScore]:
        """Compute the log-probabilities of a prompt's tokens under the present weights, paused or not.

        Prompts that wait for a step to end are computed together.
        """
        done: Future[PromptScore] = Future()
        with self._wake:
            if self._failure is not None:
                _complete(done, error=self._failure)
                return done
            self._to_score.append(((ids, alternatives), done))
            if len(self._to_score) == 1:
                self._score_next()
        return done

    def _score_next(self) -> None:
        def apply(command: Future[Any]) -> bool:
            with self._wake:
                # a client that has gone away needs none
                self._to_score = [(prompt, done) for prompt, done in self._to_score if not done.cancelled()]
                asked = list(self._to_score)
            scores = self._batch.score([prompt for prompt, _ in asked]) if asked else []
            for (_, done), score in zip(asked, scores, strict=False):
                _complete(done, result=score, error=score if isinstance(score, BrokenLogits) else None)
            with self._wake:
                del self._to_score[: len(scores)]
                if self._to_score:
                    self._score_next()
            return True

        self._between_steps(apply)

    def _sequence(self, request: GenerationRequest, watcher: Watcher | None) -> Sequence:
        matcher = StopMatcher(self._decode, request.stop, self._is_byte) if request.stop else None
        noise = NoiseStream(request.sampling.seed)
        guide = None if request.grammar is None else request.grammar.begin()
        prompt = list(request.prompt_ids)
        return Sequence(request, Future(), matcher, noise, prompt, watcher=watcher, guide=guide)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; the future is done when no more tokens come.

        ``keep`` freezes sequences where they are; ``wait`` lets those that have a slot finish; ``abort`` answers
        those with what they have and finish reason ``abort``. Queued requests stay queued.
        """

        def apply(done: Future[None]) -> bool:
            if mode == "wait" and self._batch.sequences and not self._paused:
                self._draining = True
                self._drained.append(done)
                return False
            if mode == "abort":
                self._abort()
            self._become_paused()
            return True

        return self._between_steps(apply)

    def resume(self) -> Future[None]:
        """Resume sampling. A pause that still waited for its slots is called off."""

        def apply(done: Future[None]) -> bool:
            self._paused = self._draining = False
            self._release_drained()
            return True

        return self._between_steps(apply)

    def reload(self, copies: Copies) -> Future[None]:
        """Copy new weights in between two steps, paused or not.

        Sequences in the slots keep their tokens; their keys and values are computed again under the new
        weights, so every later token is exactly what the new weights give for that context.
        """

        def apply(done: Future[None]) -> bool:
            copy_weights(copies)
            base = self._version.label.removesuffix("+reload")
            self._version = WeightVersion(f"{base}+reload", named=False)
            self._batch.recompute()
            return True

        return self._between_steps(apply)

    def name_version(self, label: str) -> Future[None]:
        """Give the present weights their label, also for tokens sampled since the last reload."""

        def apply(done: Future[None]) -> bool:
            if self._version.named:
                self._version = WeightVersion(label)
            else:
                self._version.label, self._version.named = label, True
            return True

        return self._between_steps(apply)

    def _between_steps(self, apply: Callable[[Future[Any]], bool]) -> Future[Any]:
        """Queue a command for the time between two steps; it returns False where it completes its future later."""
        done: Future[Any] = Future()
        with self._wake:
            if self._failure is not None:
                _complete(done, error=self._failure)
            else:
                self._commands.append((apply, done))
                self._wake.notify()
        return done

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with torch.inference_mode():
                while self._turn():
                    pass
            self._fail(EngineStopped("the server is shutting down; send the request again when it is back"))
        except Exception as error:
            # The one place where anything is caught: a thread that ends silently would leave every request
            # hanging.
            log.exception("the engine thread ends")
            cause = EngineDied(f"the engine died of {type(error).__name__}: {error}; restart the server")
            cause.__cause__ = error
            self._fail(cause)

    def _turn(self) -> bool:
        """Wait for something to do, run the commands, then take a step; return False when the engine is to end."""
        with self._wake:
            while not (self._stopping or self._commands or self._can_step()):
                self._wake.wait()
            self._gather()
            if self._stopping:
                return False
            commands = list(self._commands)
        for apply, done in commands:
            is_done = apply(done)
            self._commands.popleft()
            if is_done:
                _complete(done, result=None)
        self._drop_cancelled()
        if not self._paused:
            if not self._draining:
                self._admit()
            if self._batch.sequences:
                self._fit()
                self._step()
            if self._draining and not self._batch.sequences:
                self._become_paused()
        return True

    def _gather(self) -> None:
        """Give the first of many requests a moment to be joined by the others.

        An idle engine that starts at once prefills one prompt, while the thread that reads the rest of a
        block's requests waits for the interpreter.
        """
        until = time.monotonic() + _GATHER_MOST_S
        seen = 0
        while (
            not (self._batch.sequences or self._commands or self._stopping)
            and seen < len(self._waiting) < self.slots
            and time.monotonic() < until
        ):
            seen = len(self._waiting)
            self._wake.wait(_GATHER_S)

    def _can_step(self) -> bool:
        return not self._paused and bool(self._waiting or self._batch.sequences)

    def _drop_cancelled(self) -> None:
        keep = [not item.future.cancelled() for item in self._batch.sequences]
        if not all(keep):
            self._batch.keep_only(keep)

    def _admit(self) -> None:
        free = self.slots - len(self._batch.sequences)
        admitted: list[Sequence] = []
        while self._waiting and len(admitted) < free:
            held = [*self._batch.sequences, *admitted]
            if held and not self._batch.fits([*held, self._waiting[0]], _ADMIT_WITH_ROOM):
                break
            sequence = self._waiting.popleft()
            if not sequence.future.cancelled():
                admitted.append(sequence)
        if admitted:
            self._batch.add(admitted)

    def _fit(self) -> None:
        """Send the shortest sequences back to the queue until the others have room for a token each."""
        while (count := len(self._batch.sequences)) > 1 and not self._batch.fits(self._batch.sequences, 0):
            sequences = self._batch.sequences
            shortest = min(range(count), key=lambda row: len(sequences[row].tokens))
            self._waiting.appendleft(sequences[shortest])
            self._batch.keep_only([row != shortest for row in range(count)])

    def _step(self) -> None:
        keep: list[bool] = []
        ended: list[bool] = []
        answers: list[tuple[Sequence, Generation | None, Exception | None]] = []
        draw = self._batch.step()
        version = self._version
        for sequence, token, log_prob, likeliest, kept in zip(
            self._batch.sequences, draw.tokens, draw.log_probs, draw.likeliest, draw.kept, strict=True
        ):
            try:
                reason = sequence.append(token, log_prob, version, likeliest, kept)
            except (BrokenLogits, GrammarFailed) as error:
                answers.append((sequence, None, error))
                keep.append(False)
                ended.append(False)
                continue
            if sequence.watcher is not None:
                sequence.watcher(sequence)
            if reason is not None:
                answers.append((sequence, sequence.finish(reason), None))
            keep.append(reason is None)
            ended.append(reason is not None)
        try:
            if answers:
                self._batch.remember(ended)
                self._batch.keep_only(keep)
        finally:
            # Last, so that who is answered has given back its slot; but answered in any case.
            for sequence, generation, broken in answers:
                _complete(sequence.future, result=generation, error=broken)

    def _abort(self) -> None:
        sequences = list(self._batch.sequences)
        try:
            self._batch.keep_only([False] * len(sequences))
        finally:
            for sequence in sequences:
                _complete(sequence.future, result=sequence.finish("abort"))

    def _become_paused(self) -> None:
        self._paused, self._draining = True, False
        self._release_drained()

    def _release_drained(self) -> None:
        for done in self._drained:
            _complete(done, result=None)
        self._drained.clear()

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failure = error
            futures: list[Future[Any]] = [item.future for item in (*self._batch.sequences, *self._waiting)]
            futures += [done for _, done in (*self._commands, *self._to_score)] + list(self._drained)
            self._waiting.clear()
            self._commands.clear()
            self._to_score.clear()
            self._drained.clear()
        for future in futures:
            _complete(future, error=error)


def _complete(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Complete a future, unless nobody waits for it any more."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass
