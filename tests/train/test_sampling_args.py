"""A trained call samples as the run's rollouts do, or is refused with the argument and the way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.inference.wire import NEUTRAL, refuse_biased_call
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.train.config import GRPOConfig
from verifiers.train.run_plan import training_sampling_args

WITHOUT_CORRECTION = {"vllm_importance_sampling_correction": False, "num_batches_ahead": 0}
BIASED: dict[str, Any] = {
    "use_beam_search": True,
    "best_of": 4,
    "thinking_token_budget": 16,
    "vllm_xargs": {"processor": "x"},
    "xtc_probability": 0.5,
    "top_n_sigma": 1.0,
    "typical_p": 0.5,
    "top_a": 0.1,
    "tfs": 0.9,
    "tfs_z": 0.9,
    "mirostat": 2,
    "mirostat_mode": 2,
    "dynatemp_range": 0.2,
    "dry_multiplier": 0.8,
    "no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "repeat_penalty": 1.1,
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "logits_processors": ["x"],
    "min_tokens": 4,
    "min_new_tokens": 4,
}


def settings(tmp_path: Path, **options: Any) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, **options)


def call(env: Any, args: GRPOConfig, sent: dict[str, Any]) -> None:
    """Check a call as the generator of a run does."""
    checked: list[Any] = []

    def check(assumed: Any, sent: Any) -> None:
        checked.append(sent)
        refuse_biased_call(args.temperature, assumed, sent)

    given = training_sampling_args(env, args)
    generator = AsyncBatchGenerator(env, "http://127.0.0.1:9/v1", "m", given, check_call=check)
    generator._run_options["check_call"](sent)
    assert checked == [sent]


@pytest.mark.parametrize("options", [{}, WITHOUT_CORRECTION], ids=["corrected", "not corrected"])
def test_a_call_from_another_distribution_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    args = settings(tmp_path, **options)
    for name, value in BIASED.items():
        message = (
            rf"samples with {name}=.*; leave {name} out, or ask client\.untrained, whose calls are not trained\.$"
        )
        with pytest.raises(ConfigError, match=message):
            call(SimpleNamespace(), args, {name: value})
        for neutral in (None, *NEUTRAL[name]):
            call(SimpleNamespace(), args, {name: neutral})


def test_a_call_that_leaves_the_temperature_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leaves temperature out, and the trainer scores it at .*pass on the samp"):
        refuse_biased_call(0.6, [], {})


def test_arguments_that_do_nothing_by_themselves_are_let_through(tmp_path: Path) -> None:
    sent = {"ignore_eos": True, "length_penalty": 2.0, "xtc_threshold": 0.1, "mirostat_tau": 5.0, "mirostat_eta": 0.1}
    call(SimpleNamespace(), settings(tmp_path), sent)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"top_p": 0.5}, r"samples with top_p=0\.5, and the run samples with top_p=0\.9; pass on the sampling_args"),
        ({}, r"leaves top_p out, and the run samples with top_p=0\.9; pass on"),
        ({"top_p": 1.0}, r"samples with top_p=1\.0, and the run samples with top_p=0\.9; pass on"),
        ({"top_p": 0.9, "top_k": 3}, r"samples with top_k=3, .*leave top_k out"),
    ],
)
def test_without_a_correction_calls_are_compared_with_the_trainers_own_arguments(
    tmp_path: Path, sent: dict[str, Any], message: str
) -> None:
    args = settings(tmp_path, top_p=0.9, **WITHOUT_CORRECTION)
    call(SimpleNamespace(), args, {"top_p": 0.9})
    with pytest.raises(ConfigError, match=rf"^a call of the environment {message}"):
        call(SimpleNamespace(), args, sent)


def test_calls_sample_as_the_environment_declares(tmp_path: Path) -> None:
    declared = {"presence_penalty": 0.5, "tool_choice": "required", "extra_body": {"top_k": 20, "min_p": None}}
    env, args = SimpleNamespace(sampling_args=declared), settings(tmp_path, **WITHOUT_CORRECTION)
    call(env, args, {"presence_penalty": 0.5, "top_k": 20, "tool_choice": "required"})
    # the last turn of a rollout may need no tool
    call(env, args, {"presence_penalty": 0.5, "top_k": 20})
    with pytest.raises(ConfigError, match=r"samples with top_k=5, and the run samples with top_k=20"):
        call(env, args, {"presence_penalty": 0.5, "top_k": 5})


def test_calls_in_a_group_sample_as_one_of_its_environments_declares(tmp_path: Path) -> None:
    wide = SimpleNamespace(sampling_args={"top_p": 0.5, "extra_body": {"top_k": 20}})
    inner = SimpleNamespace(sampling_args={"extra_body": {"min_p": 0.1}}, envs=[wide, SimpleNamespace()])
    group = SimpleNamespace(envs=[inner, SimpleNamespace(sampling_args=None)])
    args = settings(tmp_path, **WITHOUT_CORRECTION)
    call(group, args, {"top_p": 0.5, "top_k": 20, "min_p": 0.1})
    call(group, args, {})
    with pytest.raises(ConfigError, match=r"samples with top_k=3, .*leave top_k out"):
        call(group, args, {"top_k": 3})
