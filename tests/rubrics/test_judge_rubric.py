"""JudgeRubric: what the judge is asked, and that a judge that fails is never a reward of 0."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, GradingError
from verifiers.inference.endpoint import ClientBackend
from verifiers.keywords import warn_once
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rubrics.judge_rubric import judge_yes_no, parse_yes_no
from verifiers.testing import FakeClient, FakeOpenAIServer, Fault
from verifiers.types import State

PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "..."},
    {"role": "user", "content": [{"type": "text", "text": "What is {2+2}?"}]},
]
COMPLETION = [{"role": "assistant", "content": "It is {4}."}]
ROW: dict[str, Any] = {"prompt": PROMPT, "completion": COMPLETION, "answer": "{four}"}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.rubrics.judge_rubric._BACKOFF_S", 0.0)


def state(**extra: Any) -> State:
    return State({**ROW, **extra})


def asked(client: FakeClient) -> list[str]:
    return [request.messages[0]["content"] for request in client.requests]


async def error_of(rubric: vf.JudgeRubric, scored: State | None = None) -> str:
    """Score one rollout and return the one failed grade, which must be there, and is not a reward."""
    scored = scored if scored is not None else state()
    await rubric.score_group([scored])
    [error] = scored["grading_errors"]
    return error["error"]


async def test_a_missing_key_is_one_sentence_and_a_failed_grade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    text = await error_of(vf.JudgeRubric(funcs=[judge_yes_no]))
    assert text.startswith("ConfigError: The judge has no API key: set the environment variable OPENAI_API_KEY")
    text = await error_of(vf.JudgeRubric(funcs=[judge_yes_no], judge_base_url="http://x", judge_api_key_var="K_9"))
    assert "K_9" in text


async def test_the_template_is_filled_and_braces_in_texts_are_safe() -> None:
    client = FakeClient("yes")
    rubric = vf.JudgeRubric(judge_client=client, judge_prompt='{question}|{answer}|{response}|{{"n": 1}}')
    scored = state()
    assert await rubric.judge(PROMPT, COMPLETION, "{four}", scored) == "yes"
    expected = 'What is {2+2}?|{four}|It is {4}.|{"n": 1}'
    assert asked(client) == [expected]
    assert scored["judge_response"] == {expected: "yes"}


async def test_a_template_that_cannot_be_filled_says_what_it_may_have() -> None:
    rubric = vf.JudgeRubric(judge_client=FakeClient(), judge_prompt="{qestion} {answer}", funcs=[judge_yes_no])
    text = await error_of(rubric)
    assert "it may have {question}, {answer}, {response}" in text
    assert "KeyError: 'qestion'" in text


def test_a_template_that_hides_the_response_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    vf.JudgeRubric(judge_client=FakeClient())
    vf.RankingRubric(judge_client=FakeClient())
    assert caplog.text == ""
    vf.JudgeRubric(judge_client=FakeClient(), judge_prompt="Is it polite? Answer yes or no.")
    assert "the judge is not shown what the policy said" in caplog.text


async def test_arguments_are_sent_as_the_chat_api_wants_them() -> None:
    client = FakeClient("yes")
    given = {"max_tokens": 7, "temperature": 0.5, "top_p": None}
    rubric = vf.JudgeRubric(judge_client=client, judge_model="strict", judge_sampling_args=given)
    await rubric.judge(PROMPT, COMPLETION, "a", State())
    body = client.requests[0].body
    assert body["model"] == "strict"
    assert body["max_completion_tokens"] == 7
    assert body["temperature"] == 0.5
    assert "max_tokens" not in body
    assert "top_p" not in body
    assert given == {"max_tokens": 7, "temperature": 0.5, "top_p": None}


async def test_functions_get_the_judge_and_its_settings_by_name() -> None:
    seen: dict[str, Any] = {}

    async def graded(judge, judge_client, judge_model, judge_prompt, judge_sampling_args, parser, **kwargs):  # type: ignore[no-untyped-def]
        seen.update(client=judge_client, model=judge_model, prompt=judge_prompt, sampling=judge_sampling_args)
        answer = await judge(kwargs["prompt"], kwargs["completion"], kwargs["answer"], kwargs["state"], task="t")
        return float(answer == "good")

    client = FakeClient("good")
    rubric = vf.JudgeRubric(
        judge_client=client, judge_model="m", judge_sampling_args={"temperature": 0}, judge_prompt="{response}"
    )
    rubric.add_reward_func(graded, weight=2.0)
    scored = state()
    await rubric.score_group([scored])
    assert scored["reward"] == 2.0
    assert seen == {"client": client, "model": "m", "prompt": "{response}", "sampling": {"temperature": 0}}


@pytest.mark.parametrize("side_by_side", [False, True])
async def test_functions_that_ask_the_same_thing_ask_once(side_by_side: bool) -> None:
    async def one(judge, prompt, completion, answer, state) -> float:  # type: ignore[no-untyped-def]
        return float(await judge(prompt, completion, answer, state) == "yes")

    async def other(judge, prompt, completion, answer, state) -> float:  # type: ignore[no-untyped-def]
        return float(await judge(prompt, completion, answer, state) == "yes")

    client = FakeClient(lambda body: _after_a_while())
    rubric = vf.JudgeRubric(parallelize_scoring=side_by_side, judge_client=client, funcs=[one, other, judge_yes_no])
    states = [state(), state(answer="5")]
    await rubric.score_group(states)
    assert [scored["reward"] for scored in states] == [3.0, 3.0]
    assert len(client.requests) == 2
    await rubric.score_group(states)
    assert len(client.requests) == 2, "answers are kept in the state"


async def test_rollouts_never_share_an_answer() -> None:
    client = FakeClient(["yes", "no"])
    states = [state(), state()]
    await vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no]).score_group(states)
    assert sorted(scored["reward"] for scored in states) == [0.0, 1.0]


FAILURES = [
    (Fault(status=500, times=99), "InternalServerError", 4),
    (Fault(status=401, times=99), "AuthenticationError", 1),
    (Fault.disconnect(times=99), "APIConnectionError", 4),
    (Fault(status=200, times=99, body={"choices": []}), "without a choice", 4),
    (Fault(status=200, times=99, body={"choices": [{"message": {"content": " "}}]}), "an empty message", 4),
]


@pytest.mark.parametrize(("fault", "text", "tries"), FAILURES, ids=lambda value: str(value)[:24])
async def test_a_judge_that_fails_is_a_failed_grade_and_never_a_zero(fault: Fault, text: str, tries: int) -> None:
    client = FakeClient("yes", faults=fault)
    scored = state()
    error = await error_of(vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no]), scored)
    assert error.startswith("GradingError: The judge 'gpt-4.1-nano' gave no verdict")
    assert text in error
    assert len(client.requests) == tries
    assert not scored.get("judge_response")


async def test_what_passes_is_tried_again_and_nobody_notices() -> None:
    faults = [Fault(status=503), Fault.disconnect(), Fault.malformed()]
    client = FakeClient("yes", faults=faults)
    scored = state()
    await vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no]).score_group([scored])
    assert scored["reward"] == 1.0
    assert "grading_errors" not in scored
    assert len(client.requests) == 4


async def test_a_judge_that_hangs_is_a_failed_grade() -> None:
    client = FakeClient("yes", faults=Fault.hang(times=9))
    rubric = vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no], judge_timeout_s=0.05)
    assert "gave no answer within 0.05 s" in await error_of(rubric)


async def test_a_failure_does_not_show_the_key() -> None:
    client = FakeClient(faults=Fault(status=401, body="wrong key: sk-very-secret"), api_key="sk-very-secret")
    error = await error_of(vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no]))
    assert "***" in error
    assert "sk-very-secret" not in error


async def test_an_unreadable_verdict_is_asked_for_again() -> None:
    client = FakeClient(["perhaps", "I cannot say", "no"])
    scored = state()
    await vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no]).score_group([scored])
    assert scored["reward"] == 0.0
    assert "grading_errors" not in scored
    assert list(scored["judge_response"].values()) == ["no"]


async def test_a_verdict_that_stays_unreadable_is_a_failed_grade() -> None:
    async def scored_by(verdict, prompt, completion, answer, state) -> float:  # type: ignore[no-untyped-def]
        return await verdict(prompt, completion, answer, state, parse=lambda text: json.loads(text)["score"])

    client = FakeClient(["7", "{}", "{", '{"score": 0.5}'])
    rubric = vf.JudgeRubric(judge_client=client, funcs=[scored_by])
    error = await error_of(rubric)
    assert "no verdict that can be read in 3 attempts (JSONDecodeError" in error
    assert "the last answer was '{'" in error
    assert len(client.requests) == 3
    with pytest.raises(GradingError, match="in 1 attempts"):
        await vf.JudgeRubric(judge_client=FakeClient()).verdict(
            **ROW, state=State(), parse=lambda _: None, attempts=1
        )


@pytest.mark.parametrize("field", ["{completion}", '{"score": 1}', "{}", "{answer[0]"])
def test_a_prompt_that_cannot_be_filled_in_is_refused_before_anything_is_sampled(field: str) -> None:
    for kind, named in ((vf.JudgeRubric, "{response}"), (vf.RankingRubric, "{responses}")):
        funcs = [judge_yes_no] if kind is vf.JudgeRubric else []
        known = kind(judge_client=FakeClient(), judge_prompt=named + " {answer[0]!r:>9} {{}}", funcs=funcs)
        known.refuse_unsupplied()
        with pytest.raises(ConfigError, match=r"cannot be filled in.*write other braces twice"):
            kind(judge_client=FakeClient(), judge_prompt=named + field, funcs=funcs).refuse_unsupplied()


def test_a_prompt_that_a_function_fills_in_itself_is_its_own() -> None:
    async def filled(judge_client: Any, judge_prompt: str) -> float:
        return 1.0

    async def judged(verdict: Any) -> float:
        return 1.0

    class Own(vf.JudgeRubric):
        async def verdict(self, *args: Any, **kwargs: Any) -> Any:
            return self.judge_prompt.format(response="", rules="")

    class OwnRanking(vf.RankingRubric):
        async def ranking(self, prompts: Any, completions: Any, answers: Any, states: Any) -> list[float]:
            return [0.0 for _ in states]

    options: dict[str, Any] = {"judge_client": FakeClient(), "judge_prompt": "{response} {rules}"}
    vf.JudgeRubric(**options, funcs=[filled]).refuse_unsupplied()
    Own(**options, funcs=[judged]).refuse_unsupplied()
    OwnRanking(**options).refuse_unsupplied()
    replaced = vf.JudgeRubric(**options, funcs=[judged])
    replaced.add_class_object("verdict", filled)
    replaced.refuse_unsupplied()


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("yes", True),
        ("Yes, there is no doubt.", True),
        ("No doubt about it: yes", True),
        ("The response has no errors and matches the reference.", None),
        ("No errors found. The response is correct.", None),
        ("Is it correct? No it is not.", False),
        ("No significant issues, so yes.", True),
        ("There is no doubt. The answer is: Yes!", True),
        ("<think>yes? no.</think> yes", True),
        ("<think>There is no unit, but the number", None),
        ("The response leaves its <think> tag open. No", False),
        ("maybe", None),
        ("nothing yesterday", None),
    ],
)
def test_yes_and_no_are_read_as_words(text: str, verdict: bool | None) -> None:
    if verdict is None:
        with pytest.raises(ValueError, match="it says"):
            parse_yes_no(text)
    else:
        assert parse_yes_no(text) is verdict


async def test_each_judge_of_a_jury_is_asked_the_same_question_once() -> None:
    client = FakeClient(lambda body: "no" if body["model"] == "strict" else "yes")

    def judge(**options: Any) -> vf.JudgeRubric:
        return vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no], **options)

    jury = [judge(judge_model="kind"), judge(judge_model="strict"), judge(judge_model="strict")]
    scored = state()
    (score,) = await vf.RubricGroup(jury).score_group([scored])
    assert score.reward == 1.0
    # the third is the second again
    assert [request.body["model"] for request in client.requests] == ["kind", "strict"]
    # and what is stored is graded again without a call
    (again,) = await vf.RubricGroup(jury).score_group([vf.State(state(), judge_response=scored["judge_response"])])
    assert (again.reward, len(client.requests)) == (1.0, 2)


async def test_no_more_calls_than_the_bound_are_under_way() -> None:
    client = FakeClient(lambda body: _after_a_while())
    rubric = vf.JudgeRubric(judge_client=client, funcs=[judge_yes_no], judge_max_concurrent=3)
    states = [state() for _ in range(20)]
    await rubric.score_group(states)
    assert client.max_in_flight == 3
    assert {scored["reward"] for scored in states} == {1.0}


async def _after_a_while() -> str:
    for _ in range(5):
        await asyncio.sleep(0)
    return "yes"


async def test_a_rollouts_client_is_asked_without_recording() -> None:
    recording = RolloutClient(ClientBackend(FakeClient("yes")), model="policy", require_tokens=True)
    scored = state()
    rubric = vf.JudgeRubric(judge_client=recording, judge_model="policy", funcs=[judge_yes_no])
    await rubric.score_group([scored])
    assert scored["reward"] == 1.0
    assert (recording.turns, recording.calls, recording.usage.completion_tokens) == ([], 0, 0)


def test_the_default_client_serves_any_endpoint_on_any_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    with FakeOpenAIServer("yes", faults=[Fault(status=500)]) as server:
        rubric = vf.JudgeRubric(judge_base_url=server.url, funcs=[judge_yes_no])
        for _ in range(3):
            states = [state() for _ in range(4)]
            asyncio.run(rubric.score_group(states))
            assert [scored["reward"] for scored in states] == [1.0] * 4
    assert len(server.requests) == 13
    keys = {request.headers["authorization"] for request in server.requests}
    assert keys == {"Bearer EMPTY"}, "OpenAI's key is sent to nobody else"


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="judge_base_url='http://x' too; give one"):
        vf.JudgeRubric(judge_client=FakeClient(), judge_base_url="http://x")
    with pytest.raises(ConfigError, match="judge_tries=0"):
        vf.JudgeRubric(judge_tries=0)


async def test_a_judge_that_is_not_running_is_one_line_with_its_url(caplog: pytest.LogCaptureFixture) -> None:
    url = "http://127.0.0.1:9/v1"
    rubric = vf.JudgeRubric(judge_base_url=url, judge_tries=2, funcs=[judge_yes_no])
    caplog.set_level(logging.INFO, logger="verifiers")
    await rubric.score_group([state(answer="a"), state(answer="b"), state(answer="c")])
    (record,) = [record for record in caplog.records if record.name.startswith("verifiers")]
    assert f"gave no verdict ({url}): could not be reached" in record.message
    assert record.exc_info is None


def test_a_judge_without_a_key_is_refused_before_the_first_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    rows = [{"question": "?", "answer": "4"}]
    with FakeOpenAIServer("4") as server:
        for rubric in (vf.JudgeRubric(funcs=[judge_yes_no]), vf.JudgeRubric(judge_api_key_var="NOT_SET")):
            rubric.reward_funcs, rubric.reward_weights = [judge_yes_no], [1.0]
            with pytest.raises(ConfigError, match="The judge has no API key: set the environment variable"):
                vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric).evaluate_sync(server.url, "fake")
        assert not server.requests
        asks_nobody = vf.JudgeRubric(funcs=[lambda completion: 1.0])
        assert vf.SingleTurnEnv(eval_dataset=rows, rubric=asks_nobody).evaluate_sync(server.url, "fake").reward == [
            1.0
        ]
