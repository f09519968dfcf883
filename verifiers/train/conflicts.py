"""Settings that are wrong by themselves or contradict each other, each with the sentence that refuses them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from verifiers.errors import ConfigError
from verifiers.inference.wire import CUTS, NEUTRAL, unless_neutral
from verifiers.train.loss.policy_loss import LOSS_TYPES, clip_range

CHOICES: dict[str, Collection[Any]] = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "kl_estimator": (None, "k1", "k2", "k3"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "advantage_estimator": ("group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    "weight_sync": ("auto", "directory", "nccl", "lora"),
}
"""The values of settings that name one of several."""

_BOUNDS = {
    "num_batches_ahead": (0, "0 (on policy) or more"),
    "max_staleness": (0, "0 or more"),
    "probe_every": (0, "0 (after the first two pushes none) or more"),
    "rollout_retries": (0, "0 or more"),
    "dynamic_sampling_max_groups": (0, "0 or more"),
    "rollout_chunk_size": (1, "1 or more, or leave it out"),
    "max_tokens_per_micro_batch": (1, "1 or more, or None"),
    "old_logprobs_batch_size": (1, "1 or more, or leave it out"),
    "eval_temperature": (0, "0 (greedy) or more"),
    "max_seq_len": (1, "1 or more tokens, or leave it out"),
    **dict.fromkeys(
        ("rollout_timeout", "grading_timeout", "async_generation_timeout"),
        (math.ulp(0.0), "a number above 0"),
    ),
    "beta": (0, "0 (no KL term) or more"),
    "epsilon": (0, "0 or more"),
    "epsilon_high": (0, "a number not below epsilon, or leave it out"),
    "entropy_coef": (-math.inf, "a number"),
    "learning_rate": (0, "0 or more"),
    "weight_decay": (0, "0 or more"),
    "max_grad_norm": (0, "0 (no clipping) or more"),
    "max_completion_length": (1, "1 or more tokens"),
    "delta": (0, "a bound above 1 + epsilon, or leave it out"),
    "temperature": (math.ulp(0.0), "a number above 0, such as 1.0: at 0 all rollouts of a group are the same"),
    "max_images": (0, "the most images of a prompt, or 0 for text alone"),
    "teacher_top_k": (0, "0 (the sampled tokens alone) or more"),
    "top_entropy_quantile": (math.ulp(0.0), "a share above 0, up to 1.0 (all tokens)"),
    **dict.fromkeys(
        ("teacher_coef", "demonstrations_share", "sapo_temperature_pos", "sapo_temperature_neg"),
        (math.ulp(0.0), "a number above 0"),
    ),
    **dict.fromkeys(("demonstrations_coef", "env_ce_coef"), (0, "0 or more")),
    "eval_max_concurrent": (1, "1 or more, or leave it out"),
    "eval_timeout": (math.ulp(0.0), "a number above 0, or leave it out"),
}

_FINITE = ("teacher_coef", "demonstrations_share", "demonstrations_coef", "env_ce_coef")

_NEEDED = {
    "teacher_url": ("teacher_model", "teacher_coef", "teacher_top_k"),
    "demonstrations": ("demonstrations_share", "demonstrations_coef"),
    "trace": ("trace_share", "trace_content"),
    "dynamic_sampling": ("dynamic_sampling_max_groups",),
    "max_images": ("train_vision_tower",),
    "rollout_device": ("old_logprobs_on_rollout_device",),
    "beta": ("kl_estimator", "kl_in_reward"),
    "vllm_importance_sampling_correction": (
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_cap",
    ),
}
"""Settings that have no effect without another."""

UNSUPPORTED: dict[str, str] = {
    "generation_kwargs": (
        "give them to the environment, as its sampling_args (what OpenAI's API has no name for goes into "
        "sampling_args['extra_body'])"
    ),
    "vllm_structured_outputs_regex": (
        "give the environment sampling_args={'extra_body': {'structured_outputs': {'regex': ...}}}, and set "
        "vllm_importance_sampling_correction=False"
    ),
    "reward_weights": "give the weights to the environment's rubric, Rubric(funcs=[...], weights=[...])",
    "multi_objective_aggregation": (
        "the rubric adds up the weighted rewards, and the sum is normalised; write a rubric that combines them in "
        "another way"
    ),
    "max_tool_calling_iterations": "give max_turns to the environment",
    "pad_to_multiple_of": "rows are padded to the longest of a micro-batch; bound that by max_tokens_per_micro_batch",
    "use_liger_kernel": (
        "its loss weighs no rows and corrects for no sampler; bound memory by max_tokens_per_micro_batch"
    ),
    "label_smoothing_factor": "there are no labels in this loss; an entropy bonus is entropy_coef",
    "train_sampling_strategy": (
        "shuffle_dataset=False keeps the order of the dataset, and a curriculum chooses among its rows"
    ),
    "ignore_data_skip": "a run that is resumed always resumes with the next block of its plan",
    "enable_jit_checkpoint": "a checkpoint stands between blocks; save often enough by save_steps and resume",
    "vllm_server_timeout": "use server_wait, the seconds to wait for the rollout server",
    "use_transformers_continuous_batching": "rollouts come from a server; start vf-serve or vf-vllm",
    "transformers_continuous_batching_config": "rollouts come from a server; give options to vf-serve or vf-vllm",
    "use_transformers_paged": "rollouts come from a server; start vf-serve or vf-vllm",
    "neftune_noise_alpha": (
        "its noise would be in the trained pass alone, which would be another policy's than the sampler's; "
        "regularize by beta or weight_decay"
    ),
    "auto_find_batch_size": "sizes are those of the batch plan; bound memory by max_tokens_per_micro_batch",
}
"""Fields of TRL's config that would change what is trained or how a run goes, with what to use instead."""

MEANT = {
    "kl_coef": "beta",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length"), "max_completion_length"),
    **dict.fromkeys(("n", "group_size", "num_return_sequences"), "num_generations"),
    **dict.fromkeys(("clip_range", "cliprange", "clip_eps"), "epsilon"),
    **dict.fromkeys(("lora_r", "lora_rank", "use_peft"), "GRPOTrainer a peft_config, or a run file [lora]"),
    "model": "it to GRPOTrainer, or a run file model",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "gamma": "turn_discount",
    "batch_size": "per_device_train_batch_size",
    "dtype": "model_init_kwargs, such as {'dtype': 'bfloat16'}",
    "torch_dtype": "model_init_kwargs, such as {'dtype': 'bfloat16'}",
    "max_prompt_length": "max_seq_len, which drops longer rows: prompts are never cut",
    "warmup_ratio": "warmup_steps, of which one below 1 is a share of the run",
    "reward_funcs": "the environment's rubric, vf.Rubric(funcs=[...])",
    "train_dataset": "the environment's dataset=",
    "tokenizer": "processing_class",
}
"""What settings of other trainers, and of TRL's GRPOTrainer, are here."""

_NEVER_MERGED = ("trainable_token_indices", "alora_invocation_tokens", "layer_replication")

_MARGIN_S, _LONGEST_S = 300.0, 30 * 86400.0


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """Return what an unknown setting probably means, for the end of a sentence."""
    names = sorted(known)
    if name in MEANT:
        return f"give {MEANT[name]}."
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    more = f" and {len(names) - 12} more (docs/reference/run-file.md)" if len(names) > 12 else ""
    return f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(names[:12])}{more}."


_Refusals = Iterator[tuple[bool, str]]
"""Conditions, each with the sentence that refuses it."""


def refuse_conflicts(args: Any) -> None:
    """Refuse the settings of a `GRPOConfig` as they were given."""
    for parts in (_values, _rollouts, _loss, _kl, _advantages, _streaming, _unsupported):
        _refuse(parts(args))


def _refuse(refusals: Iterable[tuple[bool, str]]) -> None:
    for is_set, sentence in refusals:
        if is_set:
            raise ConfigError(sentence)


def _values(args: Any) -> _Refusals:
    for name, choices in CHOICES.items():
        value = getattr(args, name)
        yield value not in choices, f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}."
    for name, (least, wanted) in _BOUNDS.items():
        if (value := getattr(args, name)) is not None:
            # not a number is less than nothing, and at least nothing either
            is_out = isinstance(value, str) or not value >= least or (name in _FINITE and value == math.inf)
            yield is_out, f"{name} is {value!r}; give {wanted}."
    for needed, names in _NEEDED.items():
        for name in names:
            value, default = getattr(args, name), type(args).__dataclass_fields__[name].default
            text = f"{name} is set, which has no effect without {needed}; give that too, or leave it out."
            yield not getattr(args, needed) and bool(value) and value != default, text


def _rollouts(args: Any) -> _Refusals:
    yield (
        args.max_steps < -1 or args.max_steps == 0,
        f"max_steps is {args.max_steps}; give 1 or more, or -1 for num_train_epochs.",
    )
    yield (
        args.disable_dropout is False,
        "disable_dropout is False: the sampler and the old log-probs have no dropout, so the trained pass would be "
        "another policy's; leave it out, and regularize by beta or weight_decay.",
    )
    yield (
        args.mask_env_responses is False,
        "mask_env_responses is False: tokens of the environment never carry loss, as the policy did not sample "
        "them; leave it out.",
    )
    yield (
        (args.num_generations_eval or 1) > 1 and args.eval_temperature == 0,
        f"num_generations_eval is {args.num_generations_eval} with eval_temperature=0: greedy answers of a prompt "
        "are all the same; give a temperature above 0, or num_generations_eval=1.",
    )
    yield (
        args.max_images > 0 and args.env_ce_coef > 0,
        f"env_ce_coef={args.env_ce_coef:g} would train the policy to write what stands for images, and max_images is "
        f"{args.max_images}; leave one of the two out.",
    )
    yield (
        args.old_logprobs_on_rollout_device and args.cast_lm_head_to_fp32,
        "old_logprobs_on_rollout_device and cast_lm_head_to_fp32 do not go together: the copy has numbers of one "
        "kind, so its log-probs would not be the policy's; leave one of the two out.",
    )
    yield (
        args.rollout_cuda_graphs and not str(args.rollout_device).startswith("cuda"),
        f"rollout_cuda_graphs needs a GPU as rollout_device, such as 'cuda:1'; it is {args.rollout_device!r}.",
    )


def _loss(args: Any) -> _Refusals:
    name, loss_type = args.loss_type, LOSS_TYPES[args.loss_type]
    yield (
        name == "cispo" and (args.epsilon_high is None or args.epsilon_high <= 1.0),
        f"loss_type='cispo' cuts the ratio itself to at most epsilon_high, which is {args.epsilon_high}"
        f"{f' (epsilon={args.epsilon:g} is taken)' if args.epsilon_high is None else ''}: on policy, where the "
        "ratio is 1, that would scale every gradient down; set epsilon_high above 1, such as 5.0.",
    )
    yield (
        args.max_completion_length is None and name == "dr_grpo",
        "loss_type='dr_grpo' divides by max_completion_length, which is None; give it a number of tokens, or use "
        "'dapo'.",
    )
    yield (
        args.epsilon_high is not None and args.epsilon_high < args.epsilon and name != "cispo",
        f"epsilon_high is {args.epsilon_high}, below epsilon={args.epsilon}: ratios would be cut sooner upwards than "
        "downwards; give epsilon or more, or leave it out.",
    )
    discount = args.turn_discount
    yield (
        discount is not None and not 0 <= discount <= 1,
        f"turn_discount is {discount}; give 0.0 (a turn's own reward) to 1.0 (all later ones with it), or leave it "
        "out.",
    )
    teacher = args.teacher_url
    yield (
        not teacher and not args.use_rewards,
        "use_rewards=False leaves nothing to train on without a teacher; give teacher_url, or leave it out.",
    )
    yield (
        bool(teacher) and args.temperature != 1.0,
        f"a teacher's log-probs are at temperature 1, and the policy samples at temperature={args.temperature}; set "
        "temperature=1.0.",
    )
    yield (
        bool(teacher) and args.max_images > 0,
        f"a teacher is asked by token ids, which hold no image, and max_images is {args.max_images}; leave one of "
        "the two out.",
    )
    yield (
        bool(teacher) and args.dynamic_sampling,
        "dynamic_sampling replaces groups whose rewards are all equal, and a teacher trains these too; leave one of "
        "the two out.",
    )
    level, mode = args.importance_sampling_level, args.vllm_importance_sampling_mode
    yield (
        loss_type.multiplies_ratios and level != "token",
        f"loss_type={name!r} weighs by the ratio of the whole row at every level, so "
        f"importance_sampling_level={level!r} would change its metrics alone; leave it out.",
    )
    yield (
        args.delta is not None and not loss_type.is_clipped,
        f"delta={args.delta} bounds the clipped objective, which loss_type={name!r} does not have; leave it out.",
    )
    highest = clip_range(args)[1]
    yield (
        args.delta is not None and args.delta < highest,
        f"delta={args.delta} is below {highest:g}, up to which clipping leaves ratios alone, so tokens of a positive "
        "advantage would lose their gradient (below 1 on policy, too); give a bound above that, or leave it out.",
    )
    yield (
        loss_type.multiplies_ratios and mode.startswith("sequence"),
        f"loss_type={name!r} multiplies the tokens' ratios itself, so vllm_importance_sampling_mode={mode!r} counts "
        "a row's ratio once a token; use 'token_truncate'.",
    )
    # TRL copies the deprecated cap to clip_max later
    low, cap = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_cap
    high = args.vllm_importance_sampling_clip_max if cap is None else cap
    yield (
        (low is not None and not 0 <= low <= 1) or (high is not None and not high >= 1),
        f"vllm_importance_sampling_clip_min={low} and vllm_importance_sampling_clip_max={high} leave out a ratio of "
        "1, which is that of every token on policy; give a minimum of 0 to 1, and a maximum of 1 or more.",
    )
    yield (
        args.top_entropy_quantile > 1.0,
        f"top_entropy_quantile is {args.top_entropy_quantile}; give a share above 0, up to 1.0 (all tokens).",
    )
    yield (
        args.top_entropy_quantile < 1.0 and _has_entropy_bonus(args),
        f"top_entropy_quantile={args.top_entropy_quantile:g} makes an entropy bonus a mean over some tokens of each "
        "micro-batch, which weighs micro-batches and not tokens; set entropy_coef=0.0, or leave it at 1.0.",
    )
    yield (
        args.top_entropy_quantile < 1.0 and args.max_tokens_per_micro_batch is not None,
        f"top_entropy_quantile={args.top_entropy_quantile:g} is a quantile over the tokens of a micro-batch, so "
        "max_tokens_per_micro_batch would change what is trained; leave one of them out.",
    )


def _kl(args: Any) -> _Refusals:
    in_reward, estimator = args.kl_in_reward, args.kl_estimator
    yield (
        in_reward and estimator not in (None, "k1"),
        f"kl_estimator={estimator!r} with kl_in_reward=True: in the reward k1 alone has the gradient of the KL; "
        "leave kl_estimator out, or set kl_in_reward=False.",
    )
    yield (
        in_reward and args.advantage_estimator == "group" and args.scale_rewards not in ("none", False),
        f"kl_in_reward=True with advantage_estimator='group' and scale_rewards={args.scale_rewards!r}: where rewards "
        "are equal, the division by their deviation scales the KL up to advantages of size 1; set "
        "scale_rewards='none', or advantage_estimator='rloo'.",
    )
    yield (
        in_reward and args.dynamic_sampling,
        "dynamic_sampling replaces groups whose rewards are all equal, which kl_in_reward=True trains by their KL; "
        "set one of them to False.",
    )
    yield (
        estimator == "k1" and not in_reward and not args.use_bias_correction_kl,
        "kl_estimator='k1' with use_bias_correction_kl=False is a term whose gradient is 0 in expectation; set "
        "use_bias_correction_kl=True, kl_estimator='k2', or kl_in_reward=True.",
    )


def _advantages(args: Any) -> _Refusals:
    estimator = args.advantage_estimator
    yield (
        estimator != "group" and args.scale_rewards not in ("group", True),
        f"scale_rewards={args.scale_rewards!r} has no effect with advantage_estimator={estimator!r}, which has a "
        "scale of its own; leave one of them out.",
    )
    yield (
        estimator == "reinforce_plus_plus" and args.dynamic_sampling,
        "dynamic_sampling replaces groups whose rewards are all equal, which advantage_estimator="
        "'reinforce_plus_plus' learns from, as it compares with the whole block; set dynamic_sampling=False, or "
        "'reinforce_plus_plus_baseline', where such a group has one advantage for all, 0 if lengths are equal.",
    )


def _streaming(args: Any) -> _Refusals:
    if not args.streaming:
        return
    needs_all = {
        "kl_in_reward=True": args.kl_in_reward,
        f"advantage_estimator={args.advantage_estimator!r}": args.advantage_estimator.startswith("reinforce"),
        "scale_rewards='batch'": args.scale_rewards == "batch",
        f"loss_type={args.loss_type!r}": LOSS_TYPES[args.loss_type].depends_on_micro_steps,
        f"top_entropy_quantile={args.top_entropy_quantile:g}": args.top_entropy_quantile < 1.0,
        "an entropy bonus (entropy_coef, use_adaptive_entropy)": _has_entropy_bonus(args),
        "cross-entropy (demonstrations, env_ce_coef)": args.demonstrations is not None or args.env_ce_coef > 0,
    }
    for name, is_set in needs_all.items():
        text = f"{name} needs rollouts that are not there yet when streaming trains the first; set streaming=False."
        yield is_set, text


def _unsupported(args: Any) -> _Refusals:
    import trl

    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    yield (
        args.use_vllm and args.vllm_mode != "server",
        f"use_vllm=True with vllm_mode={args.vllm_mode!r}: vLLM runs as a server here; start vf-vllm, give "
        "server_url, and leave both out.",
    )
    for name, instead in UNSUPPORTED.items():
        value = getattr(args, name)
        yield (
            value not in (defaults[name], None, {}, []),
            f"{name}={value!r} of TRL has no effect in this trainer: {instead}.",
        )


def _has_entropy_bonus(args: Any) -> bool:
    return bool(args.entropy_coef != 0.0 or args.use_adaptive_entropy)


def refuse_biased_sampling(args: Any, whose: str, given: Mapping[str, Any]) -> None:
    """Refuse what makes the sampler's log-probs those of another distribution, wherever they are used."""
    cut = [name for name in CUTS if unless_neutral(name, given) is not None]
    if cut and args.teacher_url:
        raise ConfigError(
            f"{whose} samples with {cut[0]}={given[cut[0]]!r}, and a teacher's log-probs are those of all tokens; "
            f"leave {cut[0]} out."
        )
    if args.kl_in_reward:
        biased, without = "kl_in_reward is the KL of another distribution than the policy's", "kl_in_reward=False"
    elif args.vllm_importance_sampling_correction:
        biased, without = "importance weights are biased", "vllm_importance_sampling_correction=False"
    elif args.may_be_stale:
        biased, without = "stale tokens cannot be told from fresh ones", "num_batches_ahead=0"
    else:
        return
    # of what is cut the trainer normalises over the same tokens
    for name in (name for name in NEUTRAL if name not in CUTS):
        if (value := unless_neutral(name, given)) is not None:
            raise ConfigError(
                f"{whose} samples with {name}={value!r}, under which {biased}, for the sampler's log-probs are those "
                f"of another distribution; leave {name} out, or set {without}."
            )


def refuse_adapters(adapters: Mapping[str, Any], beta: float) -> None:
    """Refuse adapters, by name, that cannot be merged into what servers get, or leave `beta` without a reference."""
    for name, config in adapters.items():
        kind, start = getattr(config, "peft_type", None), getattr(config, "init_lora_weights", True)
        found = [option for option in _NEVER_MERGED if getattr(config, option, None)]
        if kind != "LORA" or found:
            what = ", ".join(found) or f"peft_type {getattr(kind, 'value', kind)}"
            raise ConfigError(
                f"the adapter {name!r} has {what}, which cannot be merged into the weights that rollout "
                "servers get; give a LoraConfig without it (modules_to_save trains whole embeddings)."
            )
        if beta > 0 and isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
            raise ConfigError(
                f"the adapter {name!r} has init_lora_weights={start!r}, which changes the weights below it, so beta "
                "would compare with another model than the policy's start; set beta=0 or init_lora_weights=True."
            )
    if beta > 0 and adapters and "default" not in adapters:
        raise ConfigError(
            f"the policy's adapter is named {', '.join(map(repr, adapters))}, and the reference of beta is a copy of "
            "one named 'default'; load it with adapter_name='default', or set beta=0."
        )


def refuse_processes(args: Any, accelerator: Any, *, experts: bool) -> None:
    """Refuse settings that the processes of a run, or its model, cannot follow.

    Args:
        experts: the loss has the router's term of a mixture of experts.
    """
    kind, is_cut = accelerator.distributed_type, any(unless_neutral(name, vars(args)) is not None for name in CUTS)
    plugin = accelerator.state.deepspeed_plugin if kind == "DEEPSPEED" else None
    splits_parameters = kind == "FSDP" or (plugin is not None and plugin.zero_stage == 3)
    _refuse(
        [
            (
                kind == "FSDP" and not accelerator.is_fsdp2,
                "FSDP's first version is on its way out of transformers and is not supported; set fsdp_version: 2 in "
                "the file that accelerate launch reads (examples/accelerate/fsdp.yaml).",
            ),
            (
                args.rollout_device is not None and splits_parameters,
                f"rollout_device={args.rollout_device!r} copies weights inside of one process, and here each holds a "
                "part of them; leave it out and start a rollout server (vf-vllm, vf-serve).",
            ),
            (
                kind == "DEEPSPEED" and splits_parameters and (args.teacher_top_k > 0 or is_cut),
                "with ZeRO-3 the head is gone in the backward pass, where teacher_top_k, top_p, top_k and min_p need "
                "it; leave them out, or use FSDP or ZeRO-2.",
            ),
            (
                args.streaming and experts,
                "the router loss of a mixture-of-experts model is a mean over each micro-batch, which streaming "
                "would scale with it; set streaming=False.",
            ),
            (
                args.streaming and kind == "DEEPSPEED",
                "DeepSpeed keeps gradients to itself, and streaming has to scale them; set streaming=False, or use "
                "FSDP.",
            ),
        ]
    )


def longest_wait_s(args: Any) -> int:
    """Return the seconds for which the other ranks may wait for rank 0 in one collective, with a margin.

    A block is the longest wait: the server, rollouts that end before the push, the update of another server, servers
    that are away, the push, its probe, and the block itself.
    """
    generation_s, push_s = args.async_generation_timeout, args.weight_sync_timeout
    # an adapter has a new name with each push, so requests in flight must end before it
    drains = args.drain_before_sync or (args.drain_before_sync is None and args.weight_sync == "lora")
    drain_s, probe_s = generation_s if drains else 0.0, max(generation_s, args.rollout_timeout, push_s)
    block_s = args.server_wait + drain_s + push_s + args.server_restart_timeout + push_s + probe_s + generation_s
    waited_s = max(block_s, args.eval_timeout or generation_s)
    # writing weights and environments' own code have no deadline and take seconds; torch counts no further
    return int(min(waited_s + _MARGIN_S, _LONGEST_S))
