"""GRPOConfig: TRL's names mean here what they mean there, and the classic defaults are the classic ones."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig, grpo_defaults
from verifiers.train.conflicts import UNSUPPORTED
from verifiers.train.models import warn_of_lost_updates
from verifiers.train.run_plan import training_sampling_args
from verifiers.train.weight_sync.publisher import dtype_of_copy


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000/v1"),
        ({"vllm_server_port": 9001}, "http://127.0.0.1:9001/v1"),
        ({"vllm_server_host": "gpu-box", "vllm_server_port": 9001}, "http://gpu-box:9001/v1"),
        ({"vllm_server_base_url": "http://gpu-box:7000/"}, "http://gpu-box:7000/v1"),
        ({"server_url": "http://there:1/v1", "vllm_server_port": 9001}, "http://there:1/v1"),
        ({"server_url": "http://there:1"}, "http://there:1/v1"),
        ({"server_urls": ["http://there:1/", "http://there:2/v1"]}, "http://there:1/v1"),
    ],
)
def test_the_rollout_server_is_where_trls_settings_say(tmp_path: Path, given: dict[str, Any], url: str) -> None:
    config = GRPOConfig(str(tmp_path), **given)
    assert config.server_url == url
    assert all(one.endswith("/v1") for one in config.server_urls or [])


def test_the_classic_defaults_mask_truncated_completions_and_can_be_resumed(tmp_path: Path) -> None:
    classic = grpo_defaults("a-run", output_dir=str(tmp_path))
    assert classic.mask_truncated_completions
    assert not classic.save_only_model
    assert classic.run_name == "a-run"
    assert not grpo_defaults(output_dir=str(tmp_path), mask_truncated_completions=False).mask_truncated_completions


def test_what_follows_from_settings_that_are_changed_later_is_worked_out_when_the_run_begins(tmp_path: Path) -> None:
    classic = grpo_defaults("a-run", output_dir=str(tmp_path))
    classic.gradient_accumulation_steps, classic.per_device_train_batch_size, classic.num_generations = 2, 8, 4
    classic.vllm_server_port = 9001
    for args in (classic, copy.deepcopy(classic), pickle.loads(pickle.dumps(classic))):
        args.settle()
        assert (args.steps_per_generation, args.generation_batch_size) == (2, 16)
        assert args.server_url == "http://127.0.0.1:9001/v1"
    classic.learning_rate = -1.0
    with pytest.raises(ConfigError, match="learning_rate is -1"):
        classic.settle()


def test_without_an_accelerator_half_precision_and_recomputation_are_off_unless_asked_for(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True)
    assert (args.use_cpu, args.bf16, args.activation_checkpointing) == (True, False, False)
    assert GRPOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=True).activation_checkpointing


def test_apples_gpu_is_not_trained_on_and_an_older_gpu_not_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    args = GRPOConfig(str(tmp_path))
    assert (args.use_cpu, args.bf16) == (True, False)

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert GRPOConfig(str(tmp_path)).bf16 is False


def test_trained_weights_of_16_bits_are_warned_of_and_frozen_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    warn_of_lost_updates(model.requires_grad_(False), 1e-6)
    warn_of_lost_updates(torch.nn.Linear(2, 2), 1e-6)
    assert not caplog.messages
    before = model.requires_grad_(True).weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    warn_of_lost_updates(model, 1e-6)
    (said,) = caplog.messages
    assert "bfloat16: a step of less than 1/512 of a weight is rounded away" in said


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
    ("device", "ranks", "shared"),
    [("cuda", 1, "GPU"), ("cuda:0", 1, "GPU"), ("cuda:1", 1, None), ("cuda:1", 2, "GPU"), (None, 1, None)],
)
def test_a_copy_on_the_gpu_of_any_rank_shares_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str | None, ranks: int, shared: str | None
) -> None:
    config = GRPOConfig(str(tmp_path), use_cpu=True, rollout_device=device)
    assert config.rollout_chunk_size == (64 if device is None else 256)
    config.use_cpu = False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert config.shared_device == shared


@pytest.mark.parametrize(
    ("settings", "has_products", "dtype"),
    [
        ({"bf16": True}, False, torch.bfloat16),
        ({"fp16": True}, False, torch.float16),
        ({}, True, None),
        ({"bf16": True, "rollout_device": "cpu"}, True, torch.bfloat16),
        ({"bf16": True, "rollout_device": "cpu"}, False, None),
        ({"fp16": True, "rollout_device": "cpu"}, True, None),
        ({"bf16": True, "old_logprobs_on_rollout_device": True}, True, None),
        ({"bf16": True, "cast_lm_head_to_fp32": True}, True, None),
    ],
    ids=str,
)
def test_the_copy_in_this_process_has_the_half_precision_that_the_trainer_computes_in(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], has_products: bool, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr("verifiers.train.weight_sync.publisher.multiplies_bfloat16", lambda: has_products)
    names = ("bf16", "fp16", "old_logprobs_on_rollout_device", "cast_lm_head_to_fp32")
    args: Any = SimpleNamespace(**{**dict.fromkeys(names, False), "rollout_device": "cuda:0", **settings})
    assert dtype_of_copy(args) is dtype


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
        (
            {"importance_sampling_level": "row"},
            "importance_sampling_level is 'row'; choose one of token, sequence",
        ),
        ({"trace": "collector:4318"}, "trace is 'collector:4318'; give a collector's address"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "loss_type='vespo' weighs by .* whole row"),
        ({"turn_discount": 1.5}, "turn_discount is 1.5; give 0.0"),
        ({"teacher_top_k": 5}, "teacher_top_k is set, which has no effect without teacher_url"),
        ({"env_ce_coef": 0.1, "streaming": True}, "env_ce_coef. needs rollouts that are not there yet"),
        ({"use_rewards": False}, "use_rewards=False leaves nothing to train on without a teacher"),
        ({"teacher_url": "u", "temperature": 0.7}, "at temperature 1, and the policy samples at temperature=0.7"),
        ({"teacher_url": "u", "dynamic_sampling": True}, "and a teacher trains these too"),
        ({"loss_type": "sapo", "delta": 4.0}, "delta=4.0 bounds the clipped objective, which loss_type='sapo'"),
        ({"delta": 0.5}, "delta=0.5 is below 1.2, .* positive advantage would lose their gradient"),
        ({"delta": 1.25, "epsilon_high": 0.28}, "delta=1.25 is below 1.28, .* give a bound above that"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg is 0.0; give a number above 0"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0; give a share above 0, up to 1.0"),
        ({"top_entropy_quantile": 20.0}, "top_entropy_quantile is 20.0; give a share above 0, up to 1.0"),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_correction": False},
            "vllm_importance_sampling_mode is set, .* without vllm_importance_sampling_correction",
        ),
        ({"vllm_importance_sampling_cap": 0.5}, "vllm_importance_sampling_clip_max=0.5 leave out a ratio of 1"),
        ({"vllm_importance_sampling_clip_min": 1.01}, "clip_min=1.01 and .* leave out a ratio of 1"),
        ({"temperature": 0.0}, "temperature is 0.0; give a number above 0, such as 1.0: at 0 all rollouts"),
        ({"repetition_penalty": 1.1}, "samples with repetition_penalty=1.1, under which.*ampling_correction=False"),
        (
            {"top_p": 0.9, "teacher_url": "u"},
            "samples with top_p=0.9, and a teacher's log-probs are those of all tok",
        ),
        ({"loss_type": "cispo"}, r"at most epsilon_high, which is None \(epsilon=0.2 is taken\).*above 1, such"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "at most epsilon_high, which is 0.28: on policy"),
        ({"disable_dropout": False}, "disable_dropout is False: the sampler .* leave it out"),
        ({"mask_env_responses": False}, "is False: tokens of the environment never .* leave it out"),
        ({"num_generations_eval": 4}, "num_generations_eval is 4 with eval_temperature=0: greedy answers"),
        ({"eval_timeout": 0}, "eval_timeout is 0; give a number above 0"),
        ({"max_tokens_per_micro_batch": 512, "top_entropy_quantile": 0.2}, "a quantile over the tokens of a micro-b"),
        ({"entropy_coef": 0.1, "top_entropy_quantile": 0.2}, "makes an entropy bonus .* set entropy_coef=0.0"),
        ({"use_adaptive_entropy": True, "top_entropy_quantile": 0.2}, "makes an entropy bonus"),
        ({"max_completion_length": None, "loss_type": "dr_grpo"}, "'dr_grpo' divides by max_completion_length"),
        ({"streaming": True, "top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 needs rollouts that are"),
        ({"streaming": True, "scale_rewards": "batch"}, "scale_rewards='batch' needs rollouts that are"),
        ({"streaming": True, "loss_type": "bnpo"}, "loss_type='bnpo' needs rollouts that are"),
        ({"streaming": True, "entropy_coef": 0.1}, "an entropy bonus .* needs rollouts that are"),
        ({"beta": -0.1}, r"beta is -0.1; give 0 \(no KL term\) or more"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"epsilon_high": float("nan")}, "epsilon_high is nan"),
        ({"entropy_coef": float("nan")}, "entropy_coef is nan"),
        ({"learning_rate": "1e-5"}, "learning_rate is '1e-5'; give 0 or more"),
        ({"server_urls": "http://127.0.0.1:9/v1"}, "server_urls is 'http://127.0.0.1:9/v1'; give a list of URLs"),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high is 0.2, below epsilon=0.3"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vLLM runs as a server here; start vf-vllm"),
        ({"kl_estimator": "k4", "beta": 0.1}, "kl_estimator is 'k4'; choose one of None, k1, k2, k3"),
        ({"kl_estimator": "k2"}, "kl_estimator is set, which has no effect without beta"),
        ({"kl_in_reward": True, "beta": 0.1, "kl_estimator": "k3"}, "in the reward k1 alone has the gradient"),
        ({"kl_in_reward": True, "beta": 0.1}, "'group' and scale_rewards='group': .* set scale_rewards='none'"),
        (
            {"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "rloo", "dynamic_sampling": True},
            "dynamic_sampling replaces .* which kl_in_reward=True trains",
        ),
        (
            {"kl_in_reward": True, "beta": 0.1, "scale_rewards": "none", "streaming": True},
            "kl_in_reward=True needs rollouts that are",
        ),
        (
            {
                "kl_in_reward": True,
                "beta": 0.1,
                "scale_rewards": "none",
                "repetition_penalty": 1.1,
                "vllm_importance_sampling_correction": False,
                "num_batches_ahead": 0,
            },
            "samples with repetition_penalty=1.1, under which kl_in_reward is the KL of another distribution",
        ),
        ({"kl_estimator": "k1", "beta": 0.1, "use_bias_correction_kl": False}, "gradient is 0 in expectation"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "scale_rewards='batch' has no effect with adv"),
        (
            {"advantage_estimator": "reinforce_plus_plus", "dynamic_sampling": True},
            "learns from, as it compares .* whole block",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "streaming": True},
            "'reinforce_plus_plus' needs rollouts that are not there yet",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_with_what_to_set(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
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


IGNORED = """
    average_tokens_across_devices batch_eval_metrics bf16_full_eval cache_implementation dataloader_drop_last
    dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor do_eval do_predict do_train ds3_gather_for_generation
    eval_accumulation_steps eval_do_concat_batches eval_use_gather_object fp16_full_eval include_for_metrics
    include_num_input_tokens_seen label_names length_column_name liger_kernel_config local_rank log_multimodal
    per_device_eval_batch_size prediction_loss_only remove_unused_columns resume_from_checkpoint use_cache use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length vllm_mode
    vllm_model_impl vllm_tensor_parallel_size
"""
"""Fields that change neither what is trained nor what is logged: nothing is loaded, gathered or generated here."""

SUPPORTED = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    beta bf16 cast_lm_head_to_fp32 chat_template_kwargs data_seed ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout
    disable_tqdm entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon
    epsilon_high eval_delay eval_on_start eval_steps eval_strategy fp16 fsdp fsdp_config full_determinism
    generation_batch_size gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    importance_sampling_level learning_rate load_best_model_at_end log_completions log_completions_hub_repo
    log_level log_level_replica log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy loss_type lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions
    max_completion_length max_grad_norm max_steps metric_for_best_model min_p model_init_kwargs
    num_completions_to_print num_generations num_generations_eval num_iterations num_train_epochs
    off_policy_mask_threshold optim optim_args optim_target_modules output_dir parallelism_config
    per_device_train_batch_size project push_to_hub ref_model_mixup_alpha ref_model_sync_steps repetition_penalty
    report_to restore_callback_states_from_checkpoint router_aux_loss_coef run_name sapo_temperature_neg
    sapo_temperature_pos save_on_each_node save_only_model save_steps save_strategy save_total_limit scale_rewards
    seed shuffle_dataset skip_memory_metrics steps_per_generation sync_ref_model temperature tf32
    top_entropy_quantile top_k top_p torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id trust_remote_code use_adaptive_entropy
    use_bias_correction_kl use_cpu vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_server_base_url vllm_server_host
    vllm_server_port warmup_steps weight_decay
"""
"""Fields that mean here what they mean in TRL, or are refused there."""


def test_every_setting_of_trl_is_supported_unsupported_or_ignored() -> None:
    """A setting that a new TRL brings has to be put into one of the tables."""
    placed = Counter([*SUPPORTED.split(), *UNSUPPORTED, *IGNORED.split()])
    assert placed == Counter(field.name for field in dataclasses.fields(trl.GRPOConfig))
    # the table on a terminal hangs on it
    assert "disable_tqdm" in SUPPORTED.split()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_setting_of_trl_that_nothing_reads_is_refused_with_what_to_use(tmp_path: Path, name: str) -> None:
    given: dict[str, Any] = {name: 987}
    with pytest.raises(ConfigError, match=rf"^{name}=987 of TRL has no effect in this trainer: \w"):
        GRPOConfig(str(tmp_path), use_cpu=True, **given)


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


CUTS: list[dict[str, Any]] = [{"extra_body": {"structured_outputs": {"regex": "a+"}}}, {"tool_choice": "required"}]


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
