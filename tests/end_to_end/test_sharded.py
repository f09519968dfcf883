"""FSDP, DeepSpeed and LoRA over two ranks: they train and push what one process does, and resume exactly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_sharded
import sharded_world
import tiny_world
import torch
from transformers import AutoModelForCausalLM

from verifiers.train.checkpoint.checkpoint import TENSORS, extra_state
from verifiers.train.checkpoint.weights import checksum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "run_sharded.py"
PLAIN_DESCENT = {
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 1.0,
    "max_steps": 3,
    "loss_type": "dapo",
    "drain_before_sync": True,
}
"""Adam would blow rounding of gradients near 0 up to whole steps."""
SAVING = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1}
"""Adam has a state that a resumed run needs."""

DEEPSPEED_PYTHON = os.environ.get("VERIFIERS_DEEPSPEED_PYTHON")

Results = list[dict[str, Any]]


@pytest.fixture
def given(model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the script's settings of one run."""

    def tell(name: str, ranks: int = 2, *, lora: bool = False, **told: Any) -> dict[str, Any]:
        sizes = {"per_device_train_batch_size": 4 // ranks}
        settings = {**PLAIN_DESCENT, **sizes, **told.pop("settings", {})}
        where = {"model": str(model_dir), "url": server.url, "output_dir": str(tmp_path / name)}
        return {**where, "lora": lora, "settings": settings, **told}

    return tell


@pytest.fixture
def launch() -> Callable[..., list[Results]]:
    """Run trainings one after another on two ranks; return the ranks' results of each."""

    def run(runs: list[dict[str, Any]], python: str = sys.executable) -> list[Results]:
        sharded_world.torchrun([str(SCRIPT), json.dumps(runs)], timeout_s=170, python=python)
        return [[torch.load(Path(one["output_dir"]) / f"final-{rank}.pt") for rank in range(2)] for one in runs]

    return run


@pytest.fixture
def one_process(given: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def train(name: str, **told: Any) -> dict[str, Any]:
        return run_sharded.train(given(name, 1, **told))

    return train


def assert_same_training(ranks: Results, one: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Assert the same pushes, sent by rank 0 alone, the same weights on every rank, and the same losses."""
    zero = ranks[0]
    assert [len(rank["sent"]) for rank in ranks] == [len(one["sent"]), 0]
    for ours, wanted in zip(zero["sent"], one["sent"], strict=True):
        assert_same_tensors(ours, wanted, tolerance)
    # the first push is of weights that nothing has touched
    assert all(torch.equal(zero["sent"][0][name], tensor) for name, tensor in one["sent"][0].items())
    for rank in ranks:
        assert_same_tensors(rank["weights"], one["weights"], tolerance)
    first, last = one["sent"][0], one["sent"][-1]
    moved = max(float((last[name] - tensor).abs().max()) for name, tensor in first.items())
    assert moved > 100 * tolerance
    for name in ("loss", "reward", "grad_norm", "sampling/probe_difference"):
        logged = [[entry[name] for entry in result["log"] if name in entry] for result in (zero, one)]
        assert logged[0] == pytest.approx(logged[1], abs=1e-3), name
        assert logged[0], name


def resumed_from(whole: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the run that resumes from the second checkpoint of another."""
    return {**given, "resume": str(whole / "checkpoint-2")}


def assert_exactly_resumed(whole: Results, resumed: Results) -> None:
    # how many sequences a server computes together moves its log-probs by rounding, and Adam magnifies that; without
    # its state the step would differ by a thousandth
    for one, other in zip(whole, resumed, strict=True):
        assert_same_tensors(other["weights"], one["weights"])
    start, second = whole[0]["sent"][0], resumed[0]["sent"][0]
    assert any(not torch.equal(second[name], tensor) for name, tensor in start.items())


def assert_same_tensors(ours: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert set(ours) == set(wanted)
    for name, tensor in wanted.items():
        assert ours[name].shape == tensor.shape
        assert ours[name].dtype == tensor.dtype
        assert torch.allclose(ours[name], tensor, atol=tolerance), name


def test_two_ranks_under_fsdp_train_push_and_resume_as_one_process(
    given: Callable[..., dict[str, Any]],
    launch: Callable[..., list[Results]],
    one_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    fsdp = sharded_world.launcher_environment("fsdp")
    in_shards = {**fsdp, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    two_updates = {"num_iterations": 2, "beta": 0.1}
    saved = tmp_path / "saved"
    streamed, passes, whole, resumed = launch(
        [
            given("streamed", environment=fsdp, settings={"streaming": True}),
            given("passes", environment=in_shards, settings={**two_updates, "max_tokens_per_micro_batch": 200}),
            given("whole", environment=in_shards, settings=SAVING, save=str(saved)),
            resumed_from(tmp_path / "whole", given("resumed", environment=in_shards, settings=SAVING)),
        ]
    )
    assert all(rank["sharded"] for ranks in (whole, resumed, streamed, passes) for rank in ranks)
    assert_same_training(streamed, one_process("one"))
    assert_same_training(passes, one_process("one-twice", settings=two_updates))
    assert_exactly_resumed(whole, resumed)
    # shards are gathered for the checksums that the resumed run was compared with
    checksums = {name: checksum(tensor) for name, tensor in whole[0]["weights"].items()}
    assert extra_state(tmp_path / "whole" / "checkpoint-3")[TENSORS] == checksums
    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert_same_tensors(dict(loaded), whole[0]["weights"], 0.0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_two_ranks_train_and_push_an_adapter_as_one_process_whole_or_under_fsdp(
    given: Callable[..., dict[str, Any]],
    launch: Callable[..., list[Results]],
    one_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    fsdp = sharded_world.launcher_environment("fsdp")
    replicated, whole, resumed, sharded = launch(
        [
            given("replicated", lora=True),
            given("whole", lora=True, settings=SAVING),
            resumed_from(tmp_path / "whole", given("resumed", lora=True, settings=SAVING)),
            given("sharded", lora=True, environment=fsdp),
        ]
    )
    one = one_process("one", lora=True)
    for ranks in (replicated, sharded):
        assert_same_training(ranks, one)
        assert_same_tensors(ranks[0]["adapter"], one["adapter"])
    assert sharded[0]["sharded"]
    assert not replicated[0]["sharded"]
    assert len(one["adapter"]) > 0
    assert_exactly_resumed(whole, resumed)


@pytest.mark.skipif(DEEPSPEED_PYTHON is None, reason="VERIFIERS_DEEPSPEED_PYTHON names no interpreter with deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_under_deepspeed_train_push_and_resume_as_one_process(
    stage: int,
    given: Callable[..., dict[str, Any]],
    launch: Callable[..., list[Results]],
    one_process: Callable[..., Any],
    tmp_path: Path,
) -> None:
    environment = {**sharded_world.launcher_environment(f"zero{stage}"), "DS_ACCELERATOR": "cpu"}
    plain, whole, resumed = launch(
        [
            given("plain", environment=environment),
            given("whole", environment=environment, settings=SAVING),
            resumed_from(tmp_path / "whole", given("resumed", environment=environment, settings=SAVING)),
        ],
        python=str(DEEPSPEED_PYTHON),
    )
    assert [rank["sharded"] for rank in plain] == [stage == 3] * 2
    assert_same_training(plain, one_process("one"))
    assert_exactly_resumed(whole, resumed)
