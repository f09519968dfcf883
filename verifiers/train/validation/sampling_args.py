"""Sampling arguments of training rollouts: the environment's and the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = [
    "NEUTRAL",
    "refuse_biased_call",
    "refuse_biased_sampling",
    "training_sampling_args",
    "with_template_options",
]


_FORMS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), ()),
    "tool_choice": ("auto", "none"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "top_a": (0.0,),
    "top_n_sigma": (0.0, -1.0),
    **dict.fromkeys(("tfs", "tfs_z"), (1.0,)),
    "xtc_probability": (0.0,),
    **dict.fromkeys(("mirostat", "mirostat_mode"), (0,)),
    "dynatemp_range": (0.0,),
    "repetition_penalty": (1.0,),
    "repeat_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "dry_multiplier": (0.0,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0,)),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    **_FORMS,
}
"""Sampling arguments that change the sampler's distribution, with the values under which they do not.

Left out is what does nothing by itself (`length_penalty` without beams; `xtc_threshold`, `mirostat_tau` and
`mirostat_eta` without what they belong to), and `ignore_eos`, which ends a text later and moves no probability."""


def training_sampling_args(env: Any, args: GRPOConfig) -> dict[str, Any]:
    """Return the OpenAI sampling arguments of training rollouts: the environment's, then the trainer's.

    Raises:
        ConfigError: the environment fixes a temperature that the trainer does not share, or cuts or shifts the
            sampler's distribution, which importance sampling would treat as another policy.
    """
    for member in getattr(env, "envs", None) or ():
        # a group's environments add what they were given to each call
        training_sampling_args(member, args)
    given = dict(getattr(env, "sampling_args", None) or {})
    temperature = given.get("temperature")
    if temperature is not None and temperature != args.temperature:
        raise ConfigError(
            f"the environment samples at temperature {temperature:g}, the trainer scores at {args.temperature:g}: "
            "the ratio between them would be wrong; set both to the same."
        )
    extra = dict(given.pop("extra_body", None) or {})
    refuse_biased_sampling(args, {**given, **extra})
    if args.top_k and args.top_k > 0:
        extra["top_k"] = args.top_k
    if args.min_p:
        extra["min_p"] = args.min_p
    if args.repetition_penalty != 1.0:
        extra["repetition_penalty"] = args.repetition_penalty
    if args.chat_template_kwargs:
        extra["chat_template_kwargs"] = with_template_options(extra, args)
    given.update(temperature=args.temperature, max_tokens=args.max_completion_length)
    if args.top_p < 1.0:
        given["top_p"] = args.top_p
    if extra:
        given["extra_body"] = extra
    return given


def with_template_options(extra: Mapping[str, Any], args: GRPOConfig) -> dict[str, Any]:
    """Return the options of chat templates: the environment's, then the trainer's."""
    # a string was read as JSON when the config was made
    options: Any = args.chat_template_kwargs or {}
    return {**(extra.get("chat_template_kwargs") or {}), **options}


def refuse_biased_call(args: GRPOConfig, assumed: Sequence[Mapping[str, Any]], sent: Mapping[str, Any]) -> None:
    """Refuse a call of a training rollout that samples otherwise than the trainer assumes.

    An answer in free form, or without a forced tool, is never refused: turns of one rollout may differ in that.

    Args:
        args: the run's settings.
        assumed: the fields of the sampling arguments that rollouts are given, one for each environment of a group.
        sent: the fields of the call's body. Without a temperature they stand for 1.0.

    Raises:
        ConfigError: with the argument, and how to make a call that is not trained.
    """
    untrained = "or ask client.untrained, whose calls are not trained."
    passed_on = f"pass on the sampling_args that rollout was given, {untrained}"
    temperature = sent.get("temperature")
    if temperature != args.temperature and (temperature is not None or args.temperature != 1.0):
        samples = "leaves temperature out" if temperature is None else f"samples at temperature={temperature!r}"
        raise ConfigError(
            f"a call of the environment {samples}, and the trainer scores it at temperature={args.temperature:g}; "
            f"{passed_on}"
        )
    named = set(sent).union(*assumed)
    # nearly always none: this is asked at every call
    for name in [name for name in NEUTRAL if name in named]:
        value, given = _unless_neutral(name, sent), [_unless_neutral(name, fields) for fields in assumed]
        if value in given or (value is None and name in _FORMS):
            continue
        samples = f"samples with {name}={sent[name]!r}" if sent.get(name) is not None else f"leaves {name} out"
        if None in given:
            raise ConfigError(
                f"a call of the environment {samples}, which the trainer does not assume; "
                f"leave {name} out, {untrained}"
            )
        raise ConfigError(
            f"a call of the environment {samples}, and the run samples with {name}={given[0]!r}; {passed_on}"
        )


def _unless_neutral(name: str, fields: Mapping[str, Any]) -> Any:
    """Return an argument, or None where it changes nothing."""
    value = fields.get(name)
    return None if value in NEUTRAL[name] else value


def refuse_biased_sampling(args: GRPOConfig, given: Mapping[str, Any] | None = None) -> None:
    """Refuse what makes the sampler's log-probs those of another distribution, wherever they are used.

    Args:
        args: the run's settings.
        given: sampling arguments of an environment; those of the trainer when left out.

    Raises:
        ConfigError: with what to leave out or to set.
    """
    if not args.importance_correction and not args.may_be_stale and not args.kl_in_reward:
        return
    whose = "the environment"
    if given is None:
        whose = "the trainer"
        given = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    for name in NEUTRAL:
        if (value := _unless_neutral(name, given)) is None:
            continue
        if args.kl_in_reward:
            raise ConfigError(
                f"{whose} samples with {name}={value!r}, under which kl_in_reward is the KL of another distribution "
                f"than the policy's; leave {name} out, or set kl_in_reward=False."
            )
        if args.importance_correction:
            raise ConfigError(
                f"{whose} samples with {name}={value!r}, under which importance_correction is biased, for the "
                f"sampler's log-probs are those of another distribution; leave {name} out, or "
                "set importance_correction=False."
            )
        raise ConfigError(
            f"{whose} samples with {name}={value!r} with num_batches_ahead={args.num_batches_ahead} and without "
            "importance_correction: the ratio to the sampler's log-probs is then all that tells stale tokens from "
            f"fresh ones, and they are those of another distribution; leave {name} out, or set "
            "num_batches_ahead=0."
        )
