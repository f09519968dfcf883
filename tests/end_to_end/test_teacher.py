"""A teacher's log-probs reach the loss exactly; a teacher that does not answer is a failed rollout, never a 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_world
import torch
from tiny_models import character_tokenizer, write_random_qwen3
from torch import Tensor

import verifiers as vf
from verifiers.cli.train import main
from verifiers.errors import ConfigError, NothingScoredError, ProviderError
from verifiers.inference.retry import RetryPolicy
from verifiers.monitoring.run_log import read_lines
from verifiers.rollouts.rollout import Rollout, TokenSequence
from verifiers.rollouts.teacher import Teacher
from verifiers.testing.fake_server import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey


@pytest.fixture(scope="module")
def teacher(other_model_dir: Path) -> Iterator[tiny_world.EmbeddedServer]:
    with tiny_world.EmbeddedServer(other_model_dir) as running:
        yield running


def all_log_probs(directory: Path, ids: list[int]) -> Tensor:
    """Return (T - 1, V) log-probs of what follows each token, by transformers alone."""
    with torch.no_grad():
        return tiny_world.plain_model(directory)(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def rows_of(trainer: Any) -> Iterator[tuple[list[int], dict[str, Tensor], int]]:
    """Yield the ids of each real row, its micro-batch and its place there."""
    for batch in trainer.seen:
        for place in range(len(batch["input_ids"])):
            if batch["sampled_tokens"][place]:
                yield batch["input_ids"][place][batch["attention_mask"][place].bool()].tolist(), batch, place


def test_the_teachers_log_probs_stand_at_the_sampled_tokens_and_make_the_advantages(
    make_trainer: Callable[..., Any], teacher: tiny_world.EmbeddedServer, other_model_dir: Path
) -> None:
    trainer = make_trainer(tiny_world.Dialogue(), teacher_url=teacher.url, teacher_coef=0.5, max_steps=1)
    trainer.train()
    kl = []
    for ids, batch, place in rows_of(trainer):
        by_teacher = all_log_probs(other_model_dir, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        mask = batch["loss_mask"][place].bool()
        expected = torch.where(mask[1 : len(ids)], by_teacher, 0.0)
        torch.testing.assert_close(batch["teacher_logps"][place][1 : len(ids)], expected, atol=1e-4, rtol=0)
        kl += (batch["sampler_logps"] - batch["teacher_logps"])[place][mask].tolist()
    assert trainer.logged("teacher_kl") == pytest.approx([sum(kl) / len(kl)], abs=1e-5)
    # on policy the objective's gradient is advantage x grad log pi: of reward and teacher together
    batch = tiny_world.loss_inputs(trainer.seen[0])
    added = dict(batch)
    both = batch["advantages"] + 0.5 * (added.pop("teacher_logps") - batch["sampler_logps"])
    added["advantages"] = torch.where(batch["loss_mask"].bool(), both, 0.0)
    (_, gradient), (_, expected) = (tiny_world.loss_and_gradient(trainer, given) for given in (batch, added))
    torch.testing.assert_close(gradient, expected)
    assert gradient.norm() > 0


@pytest.mark.parametrize("scaled", [False, True], ids=["plain head", "bias and soft cap"])
def test_the_forward_kl_over_the_teachers_likeliest_tokens_has_the_gradient_of_full_logits(
    make_trainer: Callable[..., Any], teacher: tiny_world.EmbeddedServer, other_model_dir: Path, scaled: bool
) -> None:
    options = {"teacher_top_k": 3, "teacher_coef": 2.0, "use_rewards": False, "max_steps": 1}
    trainer = make_trainer(tiny_world.Dialogue(), teacher_url=teacher.url, **options)
    trainer.train()
    model = trainer.model
    if scaled:
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, head.weight.shape[0]))
        head.register_forward_hook(lambda _, given, logits: 3.0 * (logits / 3.0).tanh())
    for ids, batch, place in rows_of(trainer):
        by_teacher = all_log_probs(other_model_dir, ids)
        for position in batch["loss_mask"][place].nonzero().flatten().tolist():
            best = by_teacher[position - 1].topk(3)
            assert batch["teacher_ids"][place, position].tolist() == best.indices.tolist()
            torch.testing.assert_close(batch["teacher_ids_logps"][place, position], best.values, atol=1e-4, rtol=0)
    batch = tiny_world.loss_inputs(trainer.seen[0])
    loss, found = tiny_world.loss_and_gradient(trainer, batch)
    model.zero_grad()
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = model.base_model(**given).last_hidden_state
    logits = model.get_output_embeddings()(states)
    log_probs_RTV = logits.log_softmax(-1)[:, :-1]
    by_teacher_RTK = batch["teacher_ids_logps"][:, 1:]
    kl_RT = (by_teacher_RTK.exp() * (by_teacher_RTK - log_probs_RTV.gather(2, batch["teacher_ids"][:, 1:]))).sum(-1)
    expected = 2.0 * (batch["token_weights"][:, None] * kl_RT * batch["loss_mask"][:, 1:]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-5, rtol=1e-5)
    wanted = torch.cat([one.grad.flatten() for one in model.parameters()])
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_policy_comes_nearer_to_its_teacher_without_rewards(
    make_trainer: Callable[..., Any], teacher: tiny_world.EmbeddedServer, top_k: int
) -> None:
    env = tiny_world.single_turn(reward=lambda **_: 0.0)
    options = {"use_rewards": False, "teacher_top_k": top_k, "max_steps": 25, "learning_rate": 3e-3}
    trainer = make_trainer(env, teacher_url=teacher.url, max_grad_norm=1.0, **options)
    trainer.train()
    kl = trainer.logged("teacher_kl")
    # what the rewards say of it does not matter
    assert min(trainer.logged("rollouts/with_advantage")) == 8
    assert sum(kl[-3:]) < 0.85 * sum(kl[:3])


WITHOUT_REWARDS = """
import verifiers as vf


def load_environment():
    return vf.SingleTurnEnv(dataset=[{"question": "abc", "answer": "e"}] * 8, rubric=vf.Rubric())
"""


@pytest.mark.slow
def test_a_run_file_serves_its_teacher_beside_the_trainer(
    tmp_path: Path, model_dir: Path, other_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("without_rewards_env.py").write_text(WITHOUT_REWARDS)
    tables = f'[teacher]\npath = "{other_model_dir}"\n'
    settings = {"output_dir": "out", "use_rewards": False, "logging_steps": 1}
    assert main([str(tiny_world.write_run(tmp_path, model_dir, tables, env="without_rewards_env", **settings))]) == 0
    assert sum("teacher_kl" in line for line in read_lines(Path("out/metrics.jsonl"))) == 2


# -- what does not answer -------------------------------------------------------------------------------------------


def one_rollout() -> Rollout:
    row = TokenSequence([1, 2], [3, 4], [1, 1], [-0.5, -0.5], [0, 0])
    return Rollout(RolloutKey(0, 0, 0), Outcome.COMPLETED, [], [], rows=[row])


def answer_of(*entries: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": list(entries)}]}


GOOD = [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}, {"4": {"logprob": -0.25}}]
BAD: dict[str, Any] = {
    "no field": {"choices": [{}]},
    "no choice": {"choices": []},
    "too few": answer_of(*GOOD[:3]),
    "another token": answer_of(*GOOD[:3], {"5": {"logprob": -1.0}}),
    "not a number": answer_of(*GOOD[:3], {"4": {"logprob": math.nan}}),
    "a text": answer_of(*GOOD[:3], {"4": {"logprob": "much"}}),
    "infinite": answer_of(*GOOD[:3], {"4": {"logprob": -math.inf}}),
    "above 0": answer_of(*GOOD[:3], {"4": {"logprob": 0.5}}),
    "nothing in a place": answer_of(*GOOD[:3], None),
}


def judged(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Rollout:
    teacher = Teacher("http://127.0.0.1:9/v1", "t", policy=RetryPolicy(max_attempts=2, base_s=0.0))
    tries = []

    async def post(path: str, body: Any) -> Any:
        tries.append((path, body))
        return answer

    monkeypatch.setattr(teacher._backend, "post", post)
    rollout = one_rollout()
    asyncio.run(teacher.judge([rollout]))
    asked = {"model": "t", "prompt": [1, 2, 3, 4], "echo": True, "max_tokens": 0, "prompt_logprobs": 0}
    assert tries[0] == ("/completions", asked)
    return rollout


def test_a_good_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = judged(monkeypatch, answer_of(*GOOD))
    assert rollout.failure is None
    assert list(rollout.rows[0].teacher_logprobs) == [-2.0, -0.25]


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_that_cannot_be_is_a_failed_rollout(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rollout = judged(monkeypatch, BAD[kind])
    assert rollout.outcome is Outcome.PROVIDER_ERROR
    assert rollout.failure is not None
    assert "the teacher: " in rollout.failure.text
    assert "(after 2 attempts)" in rollout.failure.text


@pytest.mark.parametrize("retries", [0, 1])
def test_a_rollout_that_the_teacher_does_not_answer_is_played_again_or_not_trained(
    make_trainer: Callable[..., Any],
    teacher: tiny_world.EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    retries: int,
) -> None:
    graded: list[str] = []

    def counted(completion: Any, **_: Any) -> float:
        graded.append(str(completion))
        return tiny_world.vowels(completion)

    env = tiny_world.single_turn(reward=counted)
    trainer = make_trainer(env, teacher_url=teacher.url, max_steps=1, rollout_retries=retries)
    fill = Teacher._fill
    refused: list[TokenSequence] = []

    async def fill_or_fail(self: Teacher, row: TokenSequence) -> None:
        if not refused:
            refused.append(row)
            row.completion_ids = [10**6]
        await fill(self, row)

    monkeypatch.setattr(Teacher, "_fill", fill_or_fail)
    trainer.train()
    assert trainer.logged("outcomes/provider_error") == [1.0 - retries]
    assert trainer.logged("rows/trained") == [7.0 + retries]
    assert trainer.logged("reward/denominator/completions_global") == [7.0 + retries]
    # what is graded is graded once, when the whole group can be
    assert len(graded) == 7 + retries


def test_a_worker_frees_the_rollout_that_the_teacher_did_not_answer(
    make_trainer: Callable[..., Any], teacher: tiny_world.EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Any] = []
    held = SimpleNamespace(drop=dropped.append)

    class Held(vf.SingleTurnEnv):
        async def run_rollouts(self, requests: Any, run: Any) -> Any:
            rollouts = await super().run_rollouts(requests, run)
            for rollout in rollouts:
                rollout.state.held = held, rollout.key.generation
            return rollouts

    async def refuse(self: Teacher, row: TokenSequence) -> None:
        raise ProviderError("no")

    monkeypatch.setattr(Teacher, "_fill", refuse)
    env = Held(dataset=tiny_world.rows(), rubric=vf.Rubric([tiny_world.vowels]))
    with pytest.raises(NothingScoredError, match="the teacher: no"):
        make_trainer(env, teacher_url=teacher.url, max_steps=1).train()
    assert len(dropped) == 8


# -- another vocabulary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("characters", "said"),
    [("abcdef", "7 token ids against 39"), (tiny_world.CHARACTERS[::-1], "39 token ids against 39; ")],
    ids=["fewer tokens", "other tokens"],
)
def test_another_vocabulary_is_refused_before_the_first_rollout(
    make_trainer: Callable[..., Any], tmp_path: Path, characters: str, said: str
) -> None:
    tokenizer = character_tokenizer([tiny_world.END, *characters], unknown="a", pad_token=tiny_world.END)
    write_random_qwen3(tmp_path / "other", tokenizer, seed=3, vocab_size=len(tokenizer))
    with tiny_world.EmbeddedServer(tmp_path / "other") as running:
        trainer = make_trainer(tiny_world.single_turn(), teacher_url=running.url)
        with pytest.raises(ConfigError, match=said):
            trainer.train()
    assert trainer.seen == []


def test_a_server_without_log_probs_of_prompts_is_refused(make_trainer: Callable[..., Any]) -> None:
    with FakeOpenAIServer("x") as fake:
        trainer = make_trainer(tiny_world.single_turn(), teacher_url=fake.url)
        with pytest.raises(ConfigError, match="gives no log-probs of a prompt"):
            trainer.train()
