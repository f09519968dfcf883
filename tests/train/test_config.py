"""GRPOConfig: TRL's names mean here what they mean there, and the classic defaults are the classic ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig, grpo_defaults
from verifiers.train.settings import training_sampling_args
from verifiers.train.trl_settings import HARMLESS, HONOURED, REFUSED


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000/v1"),
        ({"vllm_server_port": 9001}, "http://127.0.0.1:9001/v1"),
        ({"vllm_server_host": "gpu-box", "vllm_server_port": 9001}, "http://gpu-box:9001/v1"),
        ({"vllm_server_base_url": "http://gpu-box:7000/"}, "http://gpu-box:7000/v1"),
        ({"server_url": "http://there:1/v1", "vllm_server_port": 9001}, "http://there:1/v1"),
    ],
)
def test_the_rollout_server_is_where_trls_settings_say(tmp_path: Path, given: dict[str, Any], url: str) -> None:
    assert GRPOConfig(str(tmp_path), **given).server_url == url


def test_the_classic_defaults_mask_truncated_completions_and_can_be_resumed(tmp_path: Path) -> None:
    classic = grpo_defaults("a-run", output_dir=str(tmp_path))
    assert classic.mask_truncated_completions
    assert not classic.save_only_model
    assert classic.run_name == "a-run"
    assert not grpo_defaults(output_dir=str(tmp_path), mask_truncated_completions=False).mask_truncated_completions


def test_without_an_accelerator_half_precision_and_recomputation_are_off_unless_asked_for(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True)
    assert (args.use_cpu, args.bf16, args.activation_checkpointing) == (True, False, False)
    assert GRPOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=True).activation_checkpointing


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_staleness", -1, "max_staleness is -1; give 0 or more"),
        ("rollout_retries", -2, "rollout_retries is -2; give 0 or more"),
        ("dynamic_sampling_max_groups", -1, "dynamic_sampling_max_groups is -1"),
        ("drop_stragglers_after", 0.0, "drop_stragglers_after is 0; give seconds above 0, or None to wait"),
        ("num_batches_ahead", -1, "num_batches_ahead is -1"),
    ],
)
def test_asynchrony_that_cannot_be_is_refused(tmp_path: Path, name: str, value: float, message: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_replacement_groups_are_bounded_and_off_unless_asked_for(tmp_path: Path) -> None:
    def config(**options: Any) -> GRPOConfig:
        return GRPOConfig(str(tmp_path), use_cpu=True, **options)

    assert config().spare_groups(8) == 0
    assert config(dynamic_sampling=True).spare_groups(8) == 16
    assert config(dynamic_sampling=True, dynamic_sampling_max_groups=3).spare_groups(8) == 3


@pytest.mark.parametrize(
    ("options", "stale"),
    [
        ({"num_batches_ahead": 0}, False),
        ({"num_batches_ahead": 1}, True),
        ({"num_batches_ahead": 0, "streaming": True}, False),
        ({"num_batches_ahead": 0, "streaming": True, "steps_per_generation": 2}, True),
        ({"num_batches_ahead": 0, "steps_per_generation": 2}, False),
    ],
    ids=str,
)
def test_it_is_known_when_tokens_may_be_older_than_the_weights_that_first_train_them(
    tmp_path: Path, options: dict[str, Any], stale: bool
) -> None:
    assert GRPOConfig(str(tmp_path), use_cpu=True, **options).may_be_stale is stale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_pass": 0}, "max_tokens_per_pass is 0; give 1 or more, or None"),
        (
            {"max_tokens_per_pass": 512, "top_entropy_quantile": 0.2},
            "top_entropy_quantile=0.2 is a quantile over the tokens of a pass",
        ),
        (
            {"entropy_coef": 0.1, "top_entropy_quantile": 0.2},
            "top_entropy_quantile=0.2 makes an entropy bonus .* set entropy_coef=0.0",
        ),
        ({"use_adaptive_entropy": True, "top_entropy_quantile": 0.2}, "makes an entropy bonus"),
        ({"streaming": True, "top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 .* or streaming=False"),
        (
            {"max_completion_length": None, "loss_type": "dr_grpo"},
            "loss_type='dr_grpo' divides by max_completion_length, which is None",
        ),
    ],
)
def test_passes_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_the_plan_knows_the_budget_of_a_pass(tmp_path: Path) -> None:
    config = GRPOConfig(str(tmp_path), use_cpu=True, max_tokens_per_pass=512)
    assert config.batch_plan(100).max_tokens_per_pass == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations_eval": 4}, "num_generations_eval is 4 with eval_temperature=0: greedy answers"),
        ({"eval_max_concurrent": 0}, "eval_max_concurrent is 0; give a number above 0"),
        ({"eval_timeout": -1.0}, "eval_timeout is -1; give a number above 0"),
        (
            {"eval_overlap": True, "eval_strategy": "steps", "save_strategy": "best"},
            "save_strategy='best' with eval_overlap=True: .* use save_strategy='steps'",
        ),
        (
            {"eval_overlap": True, "eval_strategy": "steps", "lr_scheduler_type": "reduce_lr_on_plateau"},
            "lr_scheduler_type='reduce_lr_on_plateau' with eval_overlap=True",
        ),
    ],
    ids=str,
)
def test_evaluations_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_the_reward_decides_which_checkpoint_is_best_unless_told_otherwise(tmp_path: Path) -> None:
    def metric(**options: Any) -> tuple[str | None, bool | None]:
        args = GRPOConfig(str(tmp_path), use_cpu=True, eval_strategy="steps", eval_steps=1, save_steps=1, **options)
        return args.metric_for_best_model, args.greater_is_better

    assert metric() == (None, None)
    assert metric(load_best_model_at_end=True) == ("eval_reward", True)
    assert metric(save_strategy="best") == ("eval_reward", True)
    assert metric(save_strategy="best", metric_for_best_model="failed", greater_is_better=False) == ("failed", False)


def test_every_setting_of_trl_is_honoured_refused_or_without_effect() -> None:
    """A setting that a new TRL brings has to be put into one of the tables."""
    placed = Counter([*HONOURED, *REFUSED, *HARMLESS])
    assert placed == Counter(field.name for field in dataclasses.fields(trl.GRPOConfig))
    # the table on a terminal hangs on it
    assert "disable_tqdm" in HONOURED


IGNORED: dict[str, Any] = {
    "generation_kwargs": {"top_p": 0.5},
    "vllm_structured_outputs_regex": "a+",
    "reward_weights": [0.5],
    "multi_objective_aggregation": "normalize_then_sum",
    "max_tool_calling_iterations": 3,
    "pad_to_multiple_of": 64,
    "use_liger_kernel": True,
    "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "sequential",
    "ignore_data_skip": True,
    "enable_jit_checkpoint": True,
    "vllm_server_timeout": 10.0,
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 1},
    "use_transformers_paged": True,
    "auto_find_batch_size": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_of_trl_that_nothing_reads_is_refused_with_what_to_use(tmp_path: Path, name: str) -> None:
    given = {name: IGNORED[name]}
    with pytest.raises(ConfigError, match=rf"^{name}=.* of TRL has no effect in this trainer: \w") as raised:
        GRPOConfig(str(tmp_path), use_cpu=True, **given)
    assert ". " not in str(raised.value)


def test_settings_of_trl_may_be_spelled_out_at_their_defaults_and_copied(tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig) if field.name in REFUSED}
    made = GRPOConfig(str(tmp_path), use_cpu=True, **{**defaults, "generation_kwargs": {}, "reward_weights": []})
    assert dataclasses.replace(made, generation_batch_size=None).generation_kwargs == {}


def test_trls_own_name_switches_the_correction_off(tmp_path: Path) -> None:
    assert GRPOConfig(str(tmp_path), use_cpu=True).importance_correction
    off = GRPOConfig(str(tmp_path), use_cpu=True, vllm_importance_sampling_correction=False)
    assert not off.importance_correction


def test_templates_are_rendered_with_what_trl_calls_chat_template_kwargs(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True, chat_template_kwargs={"enable_thinking": False, "date": "1 May"})
    env = SimpleNamespace(sampling_args={"extra_body": {"ignore_eos": True, "chat_template_kwargs": {"date": "x"}}})
    assert training_sampling_args(env, args)["extra_body"] == {
        "ignore_eos": True,
        "chat_template_kwargs": {"date": "1 May", "enable_thinking": False},
    }
    assert env.sampling_args["extra_body"]["chat_template_kwargs"] == {"date": "x"}


CUTS: list[dict[str, Any]] = [
    {"extra_body": {"min_tokens": 16}},
    {"extra_body": {"bad_words": ["x"]}},
    {"extra_body": {"allowed_token_ids": [1, 2]}},
    {"extra_body": {"structured_outputs": {"regex": "a+"}}},
    {"extra_body": {"guided_choice": ["a", "b"]}},
    {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"},
    {"logit_bias": {"5": -100}},
]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_an_environment_that_samples_from_another_distribution_is_refused_where_log_probs_are_compared(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    env = SimpleNamespace(sampling_args=sampling)
    (name,) = sampling.get("extra_body") or sampling
    with pytest.raises(ConfigError, match=rf"the environment samples with {name}=.*importance_correction=False"):
        training_sampling_args(env, GRPOConfig(str(tmp_path), use_cpu=True))
    stale = GRPOConfig(str(tmp_path), use_cpu=True, importance_correction=False)
    with pytest.raises(ConfigError, match=rf"leave {name} out, or set num_batches_ahead=0"):
        training_sampling_args(env, stale)
    on_policy = GRPOConfig(str(tmp_path), use_cpu=True, importance_correction=False, num_batches_ahead=0)
    assert sampling.items() <= training_sampling_args(env, on_policy).items()


def test_sampling_arguments_that_change_no_distribution_are_let_through(tmp_path: Path) -> None:
    plain = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "stop": ["x"],
        "extra_body": {"min_tokens": 0},
    }
    env = SimpleNamespace(sampling_args=plain)
    assert plain.items() <= training_sampling_args(env, GRPOConfig(str(tmp_path), use_cpu=True)).items()
