"""Constrained decoding: which tokens a grammar leaves, for the rows of a batch that have one.

llguidance does the parsing. It is an optional part of this package, imported when a request first asks for a
constraint; a server without it refuses such requests.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from verifiers.installation import install_hint
from verifiers_embedded.errors import ApiError
from verifiers_embedded.text.prompts import bytes_of_piece

if TYPE_CHECKING:
    import torch

COMPILE_S = 5.0
"""Longest that a request waits for its grammar."""

_STACK_BYTES = 2**28
_MOST_OVERDUE = 2
_KEPT = 64
# A completion's automaton may grow to some 2 kB a state.
_LIMITS = {"verbose_errors": False, "max_lexer_states": 50_000}
_NEEDED = '{}[]":,-.0123456789\\ntruefalsenull'
_CHECK = '{"a b": ["c . d , e ? n\'t", -1.5e3, true, null]}'
_SAMPLED = 256

_EXCERPT = re.compile(r"\s*\d+ \| ")
_PLACE = re.compile(r"^at \d+\(\d+\): ")

_T = TypeVar("_T")


class Guide:
    """The place of one completion in its grammar; used by one thread at a time.

    `words` are the 32-bit words of a mask. `failure` says why nothing more can be sampled under the grammar;
    None while all is well.
    """

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self.words = words
        self.failure: str | None = None

    def allow(self, row: np.ndarray) -> None:
        """Write which tokens may come next: a bit each, the lowest first; all where the grammar has failed."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # after a failure the library allows the end of the text, as if all were said
        if self._matcher.is_error():
            self.failure = _reason(self._matcher.get_error())
            row.fill(-1)
        elif not row.any():
            self.failure = "the tokenizer has no token that can come next"
            row.fill(-1)

    def advance(self, token: int) -> None:
        """Take the sampled token, unless it ends the text."""
        if not self._matcher.consume_token(token):
            self.failure = _reason(self._matcher.get_error())


class Grammar:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32

    def begin(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self._words)


class GrammarCompiler:
    """A compiler of grammars for one tokenizer, which keeps those used last. Used on one event loop.

    Args:
        eos_ids: ids that end a completion: they are allowed where the grammar may end, and nowhere else.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if token < vocab_size)
        self._library: Any = None
        self._vocabulary: Any = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._overdue: list[Future[Any]] = []

    async def compile(self, lark: str, param: str) -> Grammar:
        """Return the grammar, ready to be followed; `param` is the request's field that asked for it.

        Raises ApiError where llguidance is missing, the tokenizer cannot be constrained, or the grammar is refused.
        """
        # the same schema comes with every request of a block: one compiles it, the others wait
        async with self._one_at_a_time:
            if lark in self._kept:
                self._kept.move_to_end(lark)
                return self._kept[lark]
            if self._vocabulary is None:
                self._library = _library(param)
                self._vocabulary = await self._in_thread(lambda: self._read_vocabulary(param), None, param)
            grammar = await self._in_thread(lambda: self._compile(lark, param), COMPILE_S, param)
            self._kept[lark] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return grammar

    async def _in_thread(self, work: Callable[[], _T], limit_s: float | None, param: str) -> _T:
        """Run in a thread of its own.

        The thread has a large stack, since compiling recurses along references, and is a daemon, since what takes
        too long cannot be stopped.
        """
        self._overdue = [outcome for outcome in self._overdue if not outcome.done()]
        if len(self._overdue) >= _MOST_OVERDUE:
            raise ApiError(
                f"{len(self._overdue)} JSON schemas that took longer than {COMPILE_S:g} s are still being "
                "compiled; send the request again later",
                status=503,
                param=param,
            )
        outcome: Future[_T] = Future()
        thread = threading.Thread(target=_complete_with, args=(outcome, work), name="vf-grammar", daemon=True)
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        # noted at once: the caller that waits may end, too
        self._overdue.append(outcome)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(outcome), limit_s)
        except TimeoutError:
            raise ApiError(
                f"the JSON schema in {param!r} took longer than {COMPILE_S:g} s to compile; send a simpler one",
                param=param,
            ) from None

    def _compile(self, lark: str, param: str) -> Grammar:
        limits = self._library.LLParserLimits(**_LIMITS)
        matcher = self._library.LLMatcher(self._vocabulary, lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise ApiError(
                f"the JSON schema in {param!r} cannot be compiled: {_reason(matcher.get_error())}",
                param=param,
            )
        grammar = Grammar(matcher, self._vocab_size)
        # some schemas that no text fits are noticed only here
        first = grammar.begin()
        first.allow(np.zeros(first.words, np.int32))
        if first.failure is not None:
            raise ApiError(f"the JSON schema in {param!r} allows no text at all ({first.failure})", param=param)
        return grammar

    def _read_vocabulary(self, param: str) -> Any:
        if not self._eos_ids:
            raise _unfit(param, "the model names no end-of-text token, so that no answer could end")
        texts = token_bytes(self._tokenizer, self._vocab_size, param)
        silent = sorted({token for token, text in enumerate(texts) if not text} | set(self._eos_ids))
        vocabulary = _Vocabulary(texts, silent, self._eos_ids[0])
        return self._library.LLTokenizer(vocabulary, eos_token=self._eos_ids)


class _Vocabulary:
    """The interface that llguidance asks of a tokenizer that is not one of its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("grammars are followed token by token, and never tokenized")


def forbid(logits_NV: torch.Tensor, guides: Sequence[tuple[int, Guide]]) -> None:
    """Set the logits of tokens that no guide of their row allows to -inf, in place. Other rows stay."""
    import torch

    size = logits_NV.shape[1]
    allowed = np.zeros((len(guides), max((size + 31) // 32, guides[0][1].words)), np.int32)
    for words, (_, guide) in zip(allowed, guides, strict=True):
        guide.allow(words[: guide.words])
    # sent as bits: a mask of bytes would be eight times as large
    packed = torch.from_numpy(allowed.view(np.uint8)).to(logits_NV.device).int()
    most_of_byte = _most_of_byte(logits_NV.device, logits_NV.dtype)
    # One row at a time, so that what is made for it stays in the processor's cache; and without a branch a
    # token, which is what makes filling a mask several times as slow.
    for (row, _), bytes_of_row in zip(guides, packed, strict=True):
        most_V = most_of_byte.index_select(0, bytes_of_row).view(-1)[:size]
        torch.minimum(logits_NV[row], most_V, out=logits_NV[row])


@lru_cache(maxsize=4)
def _most_of_byte(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return, for each byte of a mask, the largest logits that its eight tokens may have: inf or -inf, (256, 8)."""
    import torch

    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, math.inf, -math.inf).to(device, dtype)


def token_bytes(tokenizer: Any, vocab_size: int, param: str) -> list[bytes]:
    """Return what each token adds to a text, in bytes; nothing for special tokens, which are left out of texts.

    Raises ApiError where its texts are not the tokens' texts one after the other, or it cannot write JSON.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise _unfit(param, "its tokenizer is not one of the fast ones")
    decode = tokenizer.backend_tokenizer.decode_batch
    count = min(vocab_size, len(tokenizer))
    # behind another token, since some tokenizers drop a space at the beginning of a text
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = decode([anchor], skip_special_tokens=True)[0]
    pairs = decode([[*anchor, token] for token in range(count)], skip_special_tokens=True)
    texts = [b""] * vocab_size
    for token, pair in enumerate(pairs):
        text = pair[len(before) :]
        if "\ufffd" not in text:
            texts[token] = text.encode()
        else:
            texts[token] = bytes_of_piece(tokenizer.convert_ids_to_tokens(token)) or b""
    _check_concatenation(tokenizer, texts, count, param)
    return texts


def _check_concatenation(tokenizer: Any, texts: list[bytes], count: int, param: str) -> None:
    known = set(texts)
    if missing := [letter for letter in dict.fromkeys(_NEEDED) if letter.encode() not in known]:
        raise _unfit(param, f"its tokenizer has no token for {missing[0]!r} alone, which JSON needs")
    sample = [token for token in range(0, count, max(1, count // _SAMPLED)) if _is_text(texts[token])]
    for ids in (tokenizer.encode(_CHECK, add_special_tokens=False), sample, sample[::-1]):
        joined = b"".join(texts[token] for token in ids).decode(errors="replace")
        if tokenizer.decode(ids, skip_special_tokens=True).lstrip(" ") != joined.lstrip(" "):
            cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
            remedy = " (set clean_up_tokenization_spaces to false in tokenizer_config.json)" if cleans else ""
            raise _unfit(param, f"its tokenizer changes texts where tokens meet{remedy}")


def _is_text(value: bytes) -> bool:
    try:
        return bool(value.decode())
    except UnicodeDecodeError:
        return False


def _unfit(param: str, reason: str) -> ApiError:
    return ApiError(
        f"field {param!r} cannot be obeyed for the served model: {reason}; leave it out",
        param=param,
        code="unsupported_parameter",
    )


def _library(param: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise ApiError(
            f"field {param!r} asks for constrained decoding, for which this server lacks llguidance; "
            f"{install_hint('json', of='verifiers-embedded')} and start the server again",
            param=param,
            code="unsupported_parameter",
        ) from None
    return llguidance


def _reason(error: str) -> str:
    """Return the library's reason in one line, without the place in the grammar and the excerpt that it shows."""
    lines = itertools.takewhile(lambda line: not _EXCERPT.match(line), error.splitlines())
    text = "; ".join(line.strip() for line in lines if not line.startswith("<"))
    text = _PLACE.sub("", text)
    return text if len(text) <= 300 else text[:297] + "..."


def _complete_with(outcome: Future[_T], work: Callable[[], _T]) -> None:
    outcome.set_running_or_notify_cancel()
    try:
        outcome.set_result(work())
    except Exception as error:
        outcome.set_exception(error)
    finally:
        # a panic of the library is not an Exception, and the caller that waits must get it all the same
        if not outcome.done():
            outcome.set_exception(RuntimeError("the grammar compiler crashed without an error message"))
