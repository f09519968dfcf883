"""Training through a dataserver: by our trainer with RemoteEnv, and by TRL's own with RemoteRLDataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
from remote_world import dataserver

from verifiers.errors import ConfigError
from verifiers.integrations.dataserver import RemoteEnv
from verifiers.integrations.dataserver_trl import RemoteRLDataset, remote_reward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_world.make_model(tmp_path_factory.mktemp("models") / "policy", seed=0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[str]:
    """Stages that end at the steps 2 and 4; a completion is worth more the shorter it is, so that rewards differ."""
    directory = tmp_path / "served"
    directory.mkdir()
    short = [{"use": "length_cap", "max_chars": 1, "zero_at": 20}]
    table = {name: {"jsonl": f"{name}.jsonl", "graders": short} for name in ("easy", "hard", "eval_set")}
    with dataserver(directory, datasets=table, total_steps=6) as url:
        yield url


def run(env: Any, model_dir: Path, output: Path, url: str, stop_at: int | None = None) -> list[Any]:
    """Train, and give (block, prompts, rewards) of every block; one that is stopped has not saved its last step."""
    from transformers import TrainerCallback

    args = tiny_world.config(output, url, max_steps=6, save_strategy="steps", save_steps=1)
    seen: list[Any] = []
    trainer = tiny_world.ObservedTrainer(str(model_dir), env, args, client=tiny_world.RecordingBackend(url))

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            block = trainer.last_block
            assert block is not None
            prompts = [group.rollouts[0].prompt[-1]["content"] for group in block.groups]
            seen.append((block.block_id, prompts, [[r.reward for r in group.rollouts] for group in block.groups]))
            if state.global_step == stop_at:
                raise InterruptedError

    trainer.add_callback(AfterEachStep())
    try:
        trainer.train(resume_from_checkpoint=True)
    except InterruptedError:
        assert stop_at is not None
    finally:
        trainer.close()
    return seen


def test_our_trainer_follows_the_servers_stages_also_after_a_stop_inside_one(
    world: str, model_dir: Path, tmp_path: Path
) -> None:
    with tiny_world.EmbeddedServer(model_dir) as policy:
        whole = run(RemoteEnv(world), model_dir, tmp_path / "whole", policy.url)
        before = run(RemoteEnv(world), model_dir, tmp_path / "cut", policy.url, stop_at=4)
        after = run(RemoteEnv(world), model_dir, tmp_path / "cut", policy.url)
    assert [block for block, _, _ in whole] == [0, 1, 2, 3, 4, 5]
    names = [{prompt.split()[0] for prompt in prompts} for _, prompts, _ in whole]
    assert names == [{"easy"}, {"easy"}, {"easy", "hard"}, {"easy", "hard"}, {"hard"}, {"hard"}]
    assert [block for block, _, _ in after] == [3, 4, 5]
    assert [block for block, _, _ in before] == [0, 1, 2, 3]
    assert [prompts for _, prompts, _ in before[:3] + after] == [prompts for _, prompts, _ in whole]
    assert before[3][1] == after[0][1]
    assert len({reward for _, _, rewards in whole for group in rewards for reward in group}) > 3


class TRLRun:
    """TRL's own trainer on the served prompts; `trained` holds the sample ids by the generating step."""

    def __init__(self, url: str, model_dir: Path, output: Path, **settings: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        sizes = {
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "gradient_accumulation_steps": 2,
            "num_iterations": settings.pop("num_iterations", 1),
        }
        self.trained: dict[int, list[str]] = {}
        self.graded: list[float | None] = []
        self.grade = remote_reward(url)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=self.reward,
            args=GRPOConfig(
                output_dir=str(output),
                max_steps=6,
                max_completion_length=12,
                learning_rate=1e-3,
                shuffle_dataset=False,
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,
                report_to=[],
                logging_steps=1,
                disable_tqdm=True,
                **{"save_strategy": "no", **sizes, **settings},
            ),
            train_dataset=RemoteRLDataset(url, max_steps=6, **sizes).as_dataset(),
            processing_class=tiny_world.make_tokenizer(),
        )

    def reward(self, completions: Any, sample_id: list[str], trainer_state: Any, **columns: Any) -> Any:
        found = self.grade(completions, sample_id, trainer_state=trainer_state, **columns)
        self.trained[trainer_state.global_step] = sample_id
        self.graded.extend(found)
        return found

    def stages(self) -> list[set[str]]:
        return [{sample.split(":")[0] for sample in self.trained[step]} for step in sorted(self.trained)]


# TRL and transformers warn of each other here, and of nothing that we do
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_trls_own_trainer_trains_against_the_dataserver(world: str, model_dir: Path, tmp_path: Path) -> None:
    import torch

    run = TRLRun(world, model_dir, tmp_path / "trl")
    before = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    run.trainer.train()
    assert sorted(run.trained) == [0, 1, 2, 3, 4, 5]
    assert run.stages() == [{"easy"}, {"easy"}, {"easy", "hard"}, {"easy", "hard"}, {"hard"}, {"hard"}]
    assert all(samples.count(sample) == 4 for samples in run.trained.values() for sample in samples)
    assert None not in run.graded
    assert len(set(run.graded)) > 3
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.model.named_parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_trls_own_trainer_resumed_inside_a_block_is_refused(world: str, model_dir: Path, tmp_path: Path) -> None:
    """TRL begins a block with the first step after a resume: two passes would train steps 3 and 4 on one."""
    saving = {"save_strategy": "steps", "save_steps": 3, "num_iterations": 2}
    first = TRLRun(world, model_dir, tmp_path / "cut", **saving)
    first.trainer.args.max_steps = 3
    first.trainer.train()
    assert (sorted(first.trained), first.stages()) == ([0, 2], [{"easy"}, {"easy", "hard"}])
    second = TRLRun(world, model_dir, tmp_path / "cut", **saving)
    with pytest.raises(ConfigError, match=r"for optimizer step 3 from rows that were drawn for step 2"):
        second.trainer.train(resume_from_checkpoint=True)
