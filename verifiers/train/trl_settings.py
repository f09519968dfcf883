"""Every field of TRL's config, in one of three tables: honoured, refused unless left alone, or without effect.

A field that TRL adds is in none of them, and a test says so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import trl

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["HARMLESS", "HONOURED", "REFUSED", "refuse_ignored_settings"]

REFUSED: dict[str, str] = {
    "generation_kwargs": (
        "give them to the environment, as its sampling_args (what OpenAI's API has no name for goes into "
        "sampling_args['extra_body'])"
    ),
    "vllm_structured_outputs_regex": (
        "give the environment sampling_args={'extra_body': {'structured_outputs': {'regex': ...}}}, and set "
        "importance_correction=False"
    ),
    "reward_weights": "give the weights to the environment's rubric, Rubric(funcs=[...], weights=[...])",
    "multi_objective_aggregation": (
        "the rubric adds up the weighted rewards, and the sum is normalised; write a rubric that combines them in "
        "another way"
    ),
    "max_tool_calling_iterations": "give max_turns to the environment",
    "pad_to_multiple_of": "rows of a pass are padded to the longest of them; bound a pass by max_tokens_per_pass",
    "use_liger_kernel": (
        "its loss weighs no rows and corrects for no sampler; bound the memory of a pass by max_tokens_per_pass"
    ),
    "label_smoothing_factor": "there are no labels in this loss; an entropy bonus is entropy_coef",
    "train_sampling_strategy": (
        "shuffle_dataset=False keeps the order of the dataset, and a curriculum chooses among its rows"
    ),
    "ignore_data_skip": "a run that is resumed always goes on with the next block of its plan",
    "enable_jit_checkpoint": "a checkpoint stands between blocks; save often enough by save_steps and resume",
    "vllm_server_timeout": "use server_wait, the seconds to wait for the rollout server",
    "use_transformers_continuous_batching": "rollouts come from a server; start vf-serve or vf-vllm",
    "transformers_continuous_batching_config": "rollouts come from a server; give options to vf-serve or vf-vllm",
    "use_transformers_paged": "rollouts come from a server; start vf-serve or vf-vllm",
    "auto_find_batch_size": "sizes are those of the batch plan; bound the memory of a pass by max_tokens_per_pass",
}
"""Fields that would change what is trained or how a run goes, and are not read here; with what to use instead."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = (
    # what a data loader does, where nothing is loaded
    _names("""
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
        label_names length_column_name
    """)
    # how transformers would batch and gather predictions: evaluations are rollouts
    | _names("""
        per_device_eval_batch_size prediction_loss_only eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval
    """)
    # how TRL's own generation runs: the rollout server has options of its own
    | _names("""
        use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size cache_implementation ds3_gather_for_generation use_cache
    """)
    # a rollout of an update counts once over all devices anyway, num_tokens is counted anyway, there are no images
    | _names("average_tokens_across_devices include_num_input_tokens_seen log_multimodal")
    # of what is refused or replaced, and for scripts that read them
    | _names("""
        liger_kernel_config do_train do_eval do_predict resume_from_checkpoint local_rank
    """)
)
"""Fields that change neither what is trained nor what is told of it."""

HONOURED = (
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


def refuse_ignored_settings(args: GRPOConfig) -> None:
    """Refuse a field of TRL's that nothing here reads, unless it is at TRL's default or empty.

    Raises:
        ConfigError: with what to use instead.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    for name, instead in REFUSED.items():
        value = getattr(args, name)
        if value not in (defaults[name], None, {}, []):
            raise ConfigError(f"{name}={value!r} of TRL has no effect in this trainer: {instead}.")
