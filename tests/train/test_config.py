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
from verifiers.train.conflicts import UNSUPPORTED
from verifiers.train.run_plan import training_sampling_args


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

    assert config().replacement_groups(8) == 0
    assert config(dynamic_sampling=True).replacement_groups(8) == 16
    assert config(dynamic_sampling=True, dynamic_sampling_max_groups=3).replacement_groups(8) == 3


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, 0),
        ({"server_urls": ["http://[::1]:8000/v1", "http://localhost:8001/v1"]}, 0),
        ({"rollout_device": "cpu"}, 0),
        ({"rollout_device": "cuda:1"}, 1),
        ({"server_url": "http://gpu-7:8000/v1"}, 1),
        ({"server_urls": ["http://127.0.0.1:8000/v1", "http://gpu-7:8000/v1"]}, 1),
        ({"vllm_server_host": "gpu-7"}, 1),
        ({"num_batches_ahead": 2}, 2),
    ],
    ids=str,
)
def test_trainer_and_server_take_turns_where_they_share_a_cpu_unless_told_otherwise(
    tmp_path: Path, options: dict[str, Any], ahead: int
) -> None:
    assert GRPOConfig(str(tmp_path), use_cpu=True, **options).num_batches_ahead == ahead


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
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0; give 1 or more, or None"),
        (
            {"max_tokens_per_micro_batch": 512, "top_entropy_quantile": 0.2},
            "top_entropy_quantile=0.2 is a quantile over the tokens of a micro-batch",
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
def test_token_budgets_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"importance_sampling_level": "row"},
            "importance_sampling_level is 'row'; choose one of token, sequence",
        ),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "loss_type='vespo' weighs by .* whole row"),
        ({"loss_type": "sapo", "delta": 4.0}, "delta=4.0 bounds the clipped objective, which loss_type='sapo'"),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_correction": False},
            "vllm_importance_sampling_mode='token_mask' would change the importance weights, which are off",
        ),
        ({"vllm_importance_sampling_cap": 0.5}, "vllm_importance_sampling_clip_max=0.5 leave out a ratio of 1"),
        ({"vllm_importance_sampling_clip_min": 1.01}, "clip_min=1.01 and .* leave out a ratio of 1"),
        ({"vllm_importance_sampling_clip_max": 0.5}, "vllm_importance_sampling_clip_max=0.5 leave out a ratio of 1"),
        ({"kl_estimator": "k4", "beta": 0.1}, "kl_estimator is 'k4'; choose one of k1, k2, k3"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' has no effect with beta=0"),
        ({"kl_in_reward": True}, "kl_in_reward=True has no effect with beta=0"),
        ({"kl_in_reward": True, "beta": 0.1, "kl_estimator": "k3"}, "in the reward k1 alone has the gradient"),
        ({"kl_in_reward": True, "beta": 0.1}, "'group' and scale_rewards='group': .* set scale_rewards='none'"),
        (
            {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "rloo", "dynamic_sampling": True},
            "dynamic_sampling replaces .* which kl_in_reward=True trains",
        ),
        (
            {"kl_in_reward": True, "beta": 0.1, "scale_rewards": "none", "streaming": True},
            "kl_in_reward=True needs .* the whole block",
        ),
        (
            {
                "kl_in_reward": True,
                "beta": 0.1,
                "scale_rewards": "none",
                "top_p": 0.9,
                "vllm_importance_sampling_correction": False,
                "num_batches_ahead": 0,
            },
            "the trainer samples with top_p=0.9, under which kl_in_reward is the KL of another distribution",
        ),
        ({"kl_estimator": "k1", "beta": 0.1, "use_bias_correction_kl": False}, "gradient is 0 in expectation"),
        ({"advantage_estimator": "gae"}, "advantage_estimator is 'gae'; choose one of group, rloo"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "scale_rewards='batch' has no effect with adv"),
        (
            {"advantage_estimator": "reinforce_plus_plus", "dynamic_sampling": True},
            "learns from, as it compares .* whole block",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "streaming": True},
            "'reinforce_plus_plus' needs .* whole bl",
        ),
    ],
    ids=str,
)
def test_losses_that_mean_nothing_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_the_plan_knows_the_budget_of_a_pass(tmp_path: Path) -> None:
    config = GRPOConfig(str(tmp_path), use_cpu=True, max_tokens_per_micro_batch=512)
    assert config.batch_plan(100).max_tokens_per_micro_batch == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations_eval": 4}, "num_generations_eval is 4 with eval_temperature=0: greedy answers"),
        ({"eval_max_concurrent": 0}, "eval_max_concurrent is 0; give a number above 0"),
        ({"eval_timeout": -1.0}, "eval_timeout is -1; give a number above 0"),
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


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED = (
    # data loaders: nothing is loaded
    _names("""
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
        label_names length_column_name
    """)
    # batching and gathering of predictions: evaluations are rollouts
    | _names("""
        per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
    """)
    # TRL's own generation: the rollout server has options of its own
    | _names("""
        use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size cache_implementation ds3_gather_for_generation use_cache
    """)
    # a rollout of an update counts once over all devices anyway, num_tokens is counted anyway, there are no images
    | _names("average_tokens_across_devices include_num_input_tokens_seen log_multimodal")
    # for scripts that read them, and what belongs to refused fields
    | _names("""
        liger_kernel_config do_train do_eval do_predict resume_from_checkpoint local_rank
    """)
)
"""Fields that change neither what is trained nor what is logged."""

SUPPORTED = (
    # transformers
    _names("""
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
        lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
        optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 tf32 activation_checkpointing
        activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
        torch_compile_backend torch_compile_mode neftune_noise_alpha torch_empty_cache_steps
        full_determinism seed data_seed use_cpu
    """)
    | _names("""
        logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level
        log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id
        eval_strategy eval_steps eval_delay eval_on_start save_only_model save_strategy save_steps save_on_each_node
        save_total_limit load_best_model_at_end metric_for_best_model greater_is_better
        restore_callback_states_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
        hub_always_push hub_revision debug skip_memory_metrics
    """)
    | _names("""
        accelerator_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
        ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed
    """)
    # TRL
    | _names("""
        model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
        num_generations_eval max_completion_length shuffle_dataset generation_batch_size steps_per_generation
        temperature top_p top_k min_p repetition_penalty chat_template_kwargs vllm_server_base_url vllm_server_host
        vllm_server_port log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo
    """)
    | _names("""
        beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level scale_rewards loss_type
        mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
        entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        off_policy_mask_threshold use_bias_correction_kl vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap
    """)
)
"""Fields that mean here what they mean in TRL, or are refused there."""


def test_every_setting_of_trl_is_supported_unsupported_or_ignored() -> None:
    """A setting that a new TRL brings has to be put into one of the tables."""
    placed = Counter([*SUPPORTED, *UNSUPPORTED, *IGNORED])
    assert placed == Counter(field.name for field in dataclasses.fields(trl.GRPOConfig))
    # the table on a terminal hangs on it
    assert "disable_tqdm" in SUPPORTED


UNSUPPORTED_VALUES: dict[str, Any] = {
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


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_of_trl_that_nothing_reads_is_refused_with_what_to_use(tmp_path: Path, name: str) -> None:
    given = {name: UNSUPPORTED_VALUES[name]}
    with pytest.raises(ConfigError, match=rf"^{name}=.* of TRL has no effect in this trainer: \w") as raised:
        GRPOConfig(str(tmp_path), use_cpu=True, **given)
    assert ". " not in str(raised.value)


def test_settings_of_trl_may_be_spelled_out_at_their_defaults_and_copied(tmp_path: Path) -> None:
    defaults = {
        field.name: field.default for field in dataclasses.fields(trl.GRPOConfig) if field.name in UNSUPPORTED
    }
    made = GRPOConfig(str(tmp_path), use_cpu=True, **{**defaults, "generation_kwargs": {}, "reward_weights": []})
    assert dataclasses.replace(made, generation_batch_size=None).generation_kwargs == {}


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
    with pytest.raises(
        ConfigError, match=rf"the environment samples with {name}=.*vllm_importance_sampling_correction=False"
    ):
        training_sampling_args(env, GRPOConfig(str(tmp_path), use_cpu=True))
    stale = GRPOConfig(str(tmp_path), use_cpu=True, vllm_importance_sampling_correction=False, num_batches_ahead=1)
    with pytest.raises(ConfigError, match=rf"leave {name} out, or set num_batches_ahead=0"):
        training_sampling_args(env, stale)
    on_policy = GRPOConfig(
        str(tmp_path), use_cpu=True, vllm_importance_sampling_correction=False, num_batches_ahead=0
    )
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
