"""Settings that cannot work on several ranks, or with a sharded policy, are refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import trl
from accelerate.utils import DistributedType

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig
from verifiers.train.conflicts import refuse_adapters, refuse_processes
from verifiers.train.run_file import load_run_file
from verifiers.train.run_plan import plan_run


def settings(tmp_path: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)


def ranks(kind: DistributedType, *, is_fsdp2: bool = True, zero_stage: int = 2) -> Any:
    plugin = SimpleNamespace(zero_stage=zero_stage)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(num_processes=1, distributed_type=kind, is_fsdp2=is_fsdp2, state=state)


PLAIN, FSDP = ranks(DistributedType.MULTI_CPU), ranks(DistributedType.FSDP)
ZERO2, ZERO3 = (ranks(DistributedType.DEEPSPEED, zero_stage=stage) for stage in (2, 3))
NEEDS_HEAD = ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}, {"teacher_url": "u", "teacher_top_k": 4})


@pytest.mark.parametrize(
    ("given", "taken", "refused", "message"),
    [
        ({}, [FSDP], [ranks(DistributedType.FSDP, is_fsdp2=False)], "fsdp_version: 2"),
        # no process holds all of the policy
        ({"rollout_device": "cpu"}, [PLAIN, ZERO2], [FSDP, ZERO3], "rollout_device='cpu'"),
        # its gradients cannot be scaled after its last micro-step
        ({"streaming": True}, [PLAIN, FSDP], [ZERO2], "set streaming=False"),
        *((given, [FSDP, ZERO2], [ZERO3], "with ZeRO-3 the head is gone in the backward") for given in NEEDS_HEAD),
    ],
)
def test_what_the_processes_of_a_run_cannot_do_is_refused_for_these_alone(
    tmp_path: Path, given: dict[str, Any], taken: list[Any], refused: list[Any], message: str
) -> None:
    args = settings(tmp_path, **given)
    for accelerator in taken:
        refuse_processes(args, accelerator, experts=False)
    for accelerator in refused:
        with pytest.raises(ConfigError, match=message):
            refuse_processes(args, accelerator, experts=False)


def test_the_router_loss_of_experts_is_not_streamed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set streaming=False"):
        refuse_processes(settings(tmp_path, streaming=True), PLAIN, experts=True)


def test_an_eval_set_without_rows_is_refused_before_the_run(tmp_path: Path) -> None:
    rows = [{"question": "1?", "answer": "1"}]
    env = vf.SingleTurnEnv(dataset=rows * 8, eval_dataset=[], rubric=vf.Rubric([len]))
    args = settings(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1, save_strategy="no")
    plan_run(args, env, eval_dataset=rows)
    for given in (None, {"a": []}):
        with pytest.raises(
            ConfigError, match=r"eval_strategy is 'steps', but the eval set.* has 0 rows; give it rows"
        ):
            plan_run(args, env, eval_dataset=given)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 2040),
        ({"ddp_timeout": 60}, 2040),
        ({"drain_before_sync": True}, 2640),
        ({"weight_sync": "lora"}, 2640),
        ({"rollout_timeout": 900.0}, 2340),
        ({"eval_timeout": 3900.0}, 3900),
        ({"async_generation_timeout": float("inf")}, 30 * 86400 - 300),
        ({"async_generation_timeout": 5.0, "rollout_timeout": 5.0, "weight_sync_timeout": 5.0}, 1500),
        ({"ddp_timeout": 7200}, 6900),
    ],
    ids=str,
)
def test_other_ranks_wait_as_long_as_rank_0_may_and_longer_where_asked(
    tmp_path: Path, given: dict[str, Any], seconds: int
) -> None:
    args = settings(tmp_path, **given)
    assert args.ddp_timeout == seconds + 300
    assert args.ddp_timeout_delta.total_seconds() == seconds + 300


def test_what_people_from_trl_give_in_the_place_of_an_environment_is_named(tmp_path: Path) -> None:
    args: Any = settings(tmp_path, per_device_train_batch_size=2, num_generations=2, max_steps=1)
    for given in ([{"question": "?"}], "my-env", vf.SingleTurnEnv):
        with pytest.raises(ConfigError, match=r"give an environment, such as vf.load_environment\('my-env'\)"):
            plan_run(args, given)
    # its constructor warns of names that transformers will drop
    other: Any = trl.GRPOConfig.__new__(trl.GRPOConfig)
    with pytest.raises(ConfigError, match=r"args is a trl\..*GRPOConfig; give a verifiers.GRPOConfig"):
        plan_run(other, vf.SingleTurnEnv(dataset=[{"question": "?"}]))


def of_a_column(completion: Any, ground_truth: Any) -> float:
    return 1.0


def of_trl(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    return [1.0 for _ in completions]


def fine(completion: Any, judge: Any, extra: int = 3, **kwargs: Any) -> float:
    return 1.0


@pytest.mark.parametrize(("func", "missing"), [(of_a_column, "ground_truth"), (of_trl, "answer"), (fine, "judge")])
def test_an_argument_that_nobody_supplies_is_refused_before_anything_is_sampled(
    func: Any, missing: str, tmp_path: Path
) -> None:
    rubric = vf.Rubric([func])
    env = vf.SingleTurnEnv(dataset=[{"question": "?", "answer": "4"}] * 2, rubric=rubric)
    group = vf.EnvGroup([env, vf.SingleTurnEnv(dataset=[{"question": "?"}])], ["a", "b"])
    nested = vf.EnvGroup([group], ["c"])
    with_a_rubric = vf.EnvGroup([vf.SingleTurnEnv(dataset=[{"question": "?"}] * 2)], ["d"], rubric=rubric)
    args = settings(tmp_path, per_device_train_batch_size=2, num_generations=2, max_steps=1)
    for made in (env, group, nested, with_a_rubric):
        with pytest.raises(ConfigError, match=f"has a parameter '{missing}', which nobody supplies; there are "):
            plan_run(args, made)
        with pytest.raises(ConfigError, match=f"'{missing}'"):
            made.evaluate_sync("http://127.0.0.1:9/v1", "m")
    # the rubric of a group with one of its own is asked in place of its environments'
    plan_run(args, vf.EnvGroup([env], ["e"], rubric=vf.Rubric([lambda: 1.0])))
    rubric.add_class_object(missing, 1)
    plan_run(args, env)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kl_coef", "give beta"),
        ("lora_r", "a peft_config"),
        ("max_prompt_length", "prompts are never cut"),
        ("learnig_rate", "did you mean 'learning_rate'"),
    ],
)
def test_a_setting_of_another_trainer_is_told_what_is_meant(name: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"GRPOConfig has no setting '{name}'; .*{meant}"):
        settings(tmp_path, **{name: 1})
    file = tmp_path / "run.toml"
    file.write_text(f'environment = {{ id = "x" }}\nmodel.path = "m"\n[trainer]\n{name} = 1\n')
    with pytest.raises(ConfigError, match=rf"\[trainer\] has an unknown key '{name}'; .*{meant}"):
        load_run_file(file)


def test_arguments_of_trls_trainer_are_told_where_they_belong(tmp_path: Path) -> None:
    for name, place in (("reward_funcs", r"vf.Rubric\(funcs"), ("train_dataset", "dataset="), ("evn", "'env'")):
        given: Any = {name: []}
        with pytest.raises(ConfigError, match=f"GRPOTrainer takes no '{name}'; .*{place}"):
            vf.GRPOTrainer("m", args=settings(tmp_path), **given)
    with pytest.raises(ConfigError, match=r"env is None; give an environment"):
        plan_run(settings(tmp_path), None)


def test_a_setting_of_another_trainer_is_refused_where_it_was_assigned(tmp_path: Path) -> None:
    args: Any = settings(tmp_path)
    args.max_tokens = 16
    with pytest.raises(ConfigError, match="no setting 'max_tokens'; give max_completion_length"):
        plan_run(args, vf.SingleTurnEnv(dataset=[{"question": "?", "answer": "!"}]))


def test_a_home_directory_in_a_models_path_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('environment = { id = "x" }\nmodel.path = "~/m"\n')
    assert load_run_file(file).model.path == str(Path.home() / "m")


def test_a_run_file_is_utf_8_and_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('environment = { id = "x" }\nmodel.path = "modèle"\n', encoding="utf-8-sig")
    assert load_run_file(file).model.path == "modèle"


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "IA3"),
        (peft.LoHaConfig(target_modules=["k_proj"]), "LOHA"),
        (peft.PromptTuningConfig(num_virtual_tokens=2), "PROMPT_TUNING"),
        (peft.LoraConfig(trainable_token_indices=[1]), "trainable_token_indices"),
        (peft.LoraConfig(alora_invocation_tokens=[1], task_type="CAUSAL_LM"), "alora_invocation_tokens"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_before_anything_is_loaded(adapter: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"adapter 'default' has .*{named}.*cannot be merged"):
        refuse_adapters({"default": adapter}, 0.0)


def test_adapters_that_leave_beta_without_a_reference_are_refused() -> None:
    pissa = peft.LoraConfig(init_lora_weights="pissa")
    refuse_adapters({"default": pissa}, 0.0)
    refuse_adapters({"default": peft.LoraConfig(init_lora_weights="gaussian")}, 0.1)
    with pytest.raises(ConfigError, match=r"init_lora_weights='pissa'.*set beta=0"):
        refuse_adapters({"default": pissa}, 0.1)
    with pytest.raises(ConfigError, match=r"named 'mine'.*adapter_name='default'"):
        refuse_adapters({"mine": peft.LoraConfig()}, 0.1)
