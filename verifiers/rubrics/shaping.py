"""Ready-made rewards: a penalty for length, the R1-Zero format, the sum of step rewards, and those of TRL's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.errors import ConfigError, GradingError
from verifiers.inference.wire import plain_data, sampled_tokens
from verifiers.loop_thread import run_blocking
from verifiers.parsers.parser import Parser, extract_boxed_answer
from verifiers.rubrics.math_equality import MAX_ANSWER_CHARS, TIMEOUT_S, MathVerdict, math_verdict
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import reward_name, signature_of
from verifiers.types import RewardFunc, State, message_field, message_text


def from_trl(func: Callable[..., Any]) -> RewardFunc:
    """Return a reward function of TRL's form, as a rubric calls functions.

    TRL gives lists, one item a completion: `prompts`, `completions`, and each column of the dataset under its own
    name. Here these are the row's `answer` and `task` and the keys of its `info`; without a required one the grade
    fails. It returns a list of numbers, or is async.
    """
    signature = signature_of(func)

    def of_group(prompts: Any, completions: Any, answers: Any, tasks: Any, infos: Any) -> Any:
        columns = {key: [info.get(key) for info in infos] for key in dict.fromkeys(k for info in infos for k in info)}
        given = {**columns, "prompts": prompts, "completions": completions, "answer": answers, "task": tasks}
        missing = [name for name in signature.required if name not in given]
        if missing:
            raise GradingError(f"has a parameter {missing[0]!r}, which the row's info has not; put a column there")
        named = given if signature.takes_everything else {k: given[k] for k in signature.names if k in given}
        return func(**named)

    of_group.__name__ = reward_name(func)
    return of_group


def overlong_penalty(*, max_tokens: int, buffer_tokens: int) -> Callable[..., float]:
    """Return a reward function that punishes length softly before the limit cuts it off: from 0 down to -1.

    0 up to `max_tokens - buffer_tokens` tokens, then linearly down to -1 at `max_tokens`, and -1 beyond. It is the
    soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4, equation 13), where the two are
    called L_max and L_cache. Tokens are counted as `completion_tokens` does.

    They are tokens of all the policy's answers in a rollout; for one turn `max_tokens` is the sampling argument.

    Raises:
        ConfigError: not 0 < buffer_tokens <= max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ConfigError(
            f"An overlong penalty needs 0 < buffer_tokens <= max_tokens, but buffer_tokens={buffer_tokens!r} and "
            f"max_tokens={max_tokens!r}."
        )

    def overlong_penalty(state: State, **_: Any) -> float:
        over = completion_tokens(state) - (max_tokens - buffer_tokens)
        return -min(1.0, max(0.0, over / buffer_tokens))

    overlong_penalty.reward_bounds = (-1.0, 0.0)  # type: ignore[attr-defined]
    return overlong_penalty


def completion_tokens(state: State, **_: Any) -> float:
    """Return the tokens that the policy sampled in a rollout, over all its answers; a metric, or part of a reward.

    Counted from an answer's token ids where the server sent them, else from its log-probs, else from its `usage`.

    Raises:
        GradingError: the state has no answers, or one of unknown length.
    """
    responses = state.get("responses") or [message_field(step, "response") for step in state.get("trajectory") or ()]
    if not responses:
        raise GradingError("the state has no responses, so the completion's length in tokens is unknown")
    steps = list(state.get("trajectory") or ())
    aligned = steps if len(steps) == len(responses) else [None] * len(responses)
    return float(sum(_tokens_of(response, step) for response, step in zip(responses, aligned, strict=True)))


def _tokens_of(response: Any, step: Any) -> int:
    answer = plain_data(response)
    choices = answer.get("choices") or [{}]
    try:
        sampled = sampled_tokens({**answer, "choices": choices})
    except (AttributeError, LookupError, TypeError) as error:
        raise GradingError(f"a response is not one of OpenAI's, so its length is unknown: {error!r}") from error
    if sampled.completion_ids is not None:
        return len(sampled.completion_ids)
    ids = message_field(message_field(step, "tokens"), "completion_ids")
    if isinstance(ids, (list, tuple)):
        return len(ids)
    if sampled.logprobs is not None:
        return len(sampled.logprobs)
    reported = message_field(answer.get("usage"), "completion_tokens")
    # usage counts all choices of a response together
    if isinstance(reported, int) and len(choices) == 1:
        return reported
    raise GradingError(
        "a response has neither token ids, log-probs nor usage.completion_tokens, so its length is unknown"
    )


_ANSWER_BEGINS = "</think> <answer>"
_ANSWER_ENDS = "</answer>"


def r1_zero_reward(
    response: str,
    ground_truth: Any,
    *,
    timeout_s: float = TIMEOUT_S,
    max_answer_chars: int = MAX_ANSWER_CHARS,
) -> dict[str, float]:
    r"""Score one response, outside of a rubric and without an event loop.

    The format asks for `</think> <answer>` (with exactly one space) and a `</answer>` after it. The answer is what
    stands between them, of the last such pair, or the last `\boxed{}` in it; it is compared as `MathRubric` does.

    `ground_truth` may be a list of answers each of which is right. A comparison that takes longer than `timeout_s`
    seconds is wrong; an answer of more than `max_answer_chars` is right only where it is the right one character by
    character.

    Returns:
        {"format", "answer", "reward"}, each 0.0 or 1.0: unformatted 0, 0, 0; formatted but wrong 1, 0, 0; right
        1, 1, 1.

    Raises:
        GradingError: the workers that compare answers do not run.
    """
    right, formatted = run_blocking(lambda: _r1_zero(response, ground_truth, timeout_s, max_answer_chars))
    return {"format": formatted, "answer": right, "reward": right}


def r1_zero_rubric(
    *, timeout_s: float = TIMEOUT_S, max_answer_chars: int = MAX_ANSWER_CHARS, **kwargs: Any
) -> Rubric:
    """Return a rubric that scores by `r1_zero_reward`: its answer is the reward, its format a metric."""

    async def r1_zero_answer(completion: Any, answer: Any, parser: Parser) -> float:
        return (await _r1_zero(_text_of(completion, parser), answer, timeout_s, max_answer_chars))[0]

    def r1_zero_format(completion: Any, parser: Parser) -> float:
        return float(_answer_in(_text_of(completion, parser)) is not None)

    return Rubric(funcs=[r1_zero_answer, r1_zero_format], weights=[1.0, 0.0], **kwargs)


async def _r1_zero(response: str, truth: Any, timeout_s: float, max_chars: int) -> tuple[float, float]:
    given = _answer_in(response)
    if given is None:
        return 0.0, 0.0
    for one in truth if isinstance(truth, (list, tuple)) else [truth]:
        if await math_verdict(one, given, timeout_s=timeout_s, max_chars=max_chars) is MathVerdict.RIGHT:
            return 1.0, 1.0
    return 0.0, 1.0


def _answer_in(response: str) -> str | None:
    """Return the answer of a response that keeps the format, else None."""
    end = response.rfind(_ANSWER_ENDS)
    start = response.rfind(_ANSWER_BEGINS, 0, max(end, 0))
    if start < 0:
        return None
    return extract_boxed_answer(response[start + len(_ANSWER_BEGINS) : end]).strip()


def _text_of(completion: Any, parser: Parser) -> str:
    messages = parser.get_assistant_messages(completion)
    return message_text(messages[-1]) if messages else ""


class EpisodicSumRubric(Rubric):
    """The sum of `step["reward"]` over `state["trajectory"]`, for environments that reward each step.

    `weight` is the sum's; `weights` are those of the further functions, `funcs`, 1.0 each when left out.
    """

    def __init__(
        self,
        weight: float = 1.0,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        further = list(funcs or [])
        further_weights = weights if weights is not None else [1.0] * len(further)
        super().__init__(funcs=[sum_step_rewards, *further], weights=[weight, *further_weights], **kwargs)


def sum_step_rewards(state: State, **_: Any) -> float:
    """Return the sum of the steps' rewards; a step without one counts 0."""
    rewards = [message_field(step, "reward") for step in state.get("trajectory") or ()]
    return float(sum(reward for reward in rewards if reward is not None))
