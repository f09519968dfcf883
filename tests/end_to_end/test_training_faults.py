"""Each fault of the table costs a try, then its rollout; a server that answers nothing else is named at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
from training_faults import FAULTS, VOCABULARY, AnswerFault

from verifiers.errors import NothingScoredError
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.testing.script import response_body
from verifiers.types import Outcome, RolloutKey

ASK = [{"role": "user", "content": "2+2?"}]


def spoiled(fault: AnswerFault, body: dict[str, Any], version: Any = 0) -> Fault:
    answer = response_body(body, ["4"], weight_version=version)
    fault.spoil(answer, answer["choices"][0])
    return Fault(200, body=answer)


async def rollouts(answers: Any, tries: int) -> list[Rollout]:
    async with FakeOpenAIServer(answers) as server:
        backend = HttpBackend(Endpoint(server.url))
        runner = Run(
            tiny_world.single_turn(),
            backend,
            "m",
            {"max_tokens": 8},
            retry=RetryPolicy(max_attempts=tries, base_s=0.0),
            require_tokens=True,
            vocab_size=VOCABULARY,
        )
        group = await runner.run_group([RolloutRequest(RolloutKey(0, 0, n), prompt=ASK) for n in range(3)])
        await backend.close()
    return group.rollouts


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_a_bad_answer_is_a_failed_try_and_then_a_failed_rollout_that_says_so(fault: AnswerFault) -> None:
    first = iter([True])
    group = await rollouts(lambda body: spoiled(fault, body) if next(first, False) else "4", 2)
    assert [one.outcome for one in group] == [Outcome.COMPLETED] * 3
    assert sum(one.attempts for one in group) == 3 + (fault.named is not None)
    if fault.named is None:
        return
    first = iter([True, True])
    group = await rollouts(lambda body: spoiled(fault, body) if next(first, False) else "4", 1)
    failed = [one for one in group if one.failure is not None]
    assert [one.outcome for one in failed] == [Outcome.PROVIDER_ERROR] * 2
    assert all(fault.named in str(one.failure) for one in failed)
    assert all(math.isfinite(value) for one in group for row in one.rows for value in row.logprobs)


@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if fault.named and "version" not in fault.name][::12],
    ids=lambda fault: fault.name,
)
def test_a_server_that_answers_nothing_else_is_named_before_the_first_step(
    make_fake_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: AnswerFault
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.0)
    with FakeOpenAIServer(lambda body: spoiled(fault, body)) as server:
        trainer = make_fake_trainer(tiny_world.single_turn(), server.url)
        # the trainer's own calls have a test of their own
        monkeypatch.setattr(trainer.check, "run", lambda version, pool: None)
        with pytest.raises(NothingScoredError, match=r"http://127\.0\.0\.1:\d+/v1.* answered") as raised:
            trainer.train()
    assert str(fault.named) in str(raised.value)
    assert trainer.seen == []
