"""Every name that was renamed since the last release still works, and warns with the present one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.deprecated import FORMER_NAMES
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.sandbox.spec import SandboxBase
from verifiers.sandbox.worker_pool import WorkerPool
from verifiers.train.config import GRPOConfig

ADAPTED = {"BlockPart", "server_pool", "deal_longest_first"}


def named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("old", FORMER_NAMES)
def test_a_former_import_gives_the_present_object(old: str) -> None:
    with pytest.warns(DeprecationWarning, match="next release") as caught:
        found = named(old)
    (warning,) = caught
    assert str(warning.message) == (
        f"{old.replace(':', '.')} is deprecated and will be removed in the next release; "
        f"use {FORMER_NAMES[old].replace(':', '.')}."
    )
    assert warning.filename == __file__
    assert callable(found) or isinstance(found, frozenset)
    if old.partition(":")[2] not in ADAPTED:
        assert found is named(FORMER_NAMES[old])


class Level(SandboxBase):
    isolation = "process"

    async def _close(self) -> None: ...


def generator() -> AsyncBatchGenerator:
    made = object.__new__(AsyncBatchGenerator)
    made.submit_batch = made.get_batch = lambda *given, **_: given  # type: ignore[method-assign, assignment]
    return made


def micro_batches(directory: Path) -> Any:
    return GRPOConfig(str(directory), use_cpu=True, max_tokens_per_pass=512).max_tokens_per_micro_batch


def correction(directory: Path) -> Any:
    config = GRPOConfig(str(directory), use_cpu=True, importance_correction=False)
    return config.vllm_importance_sampling_correction


USES: dict[str, tuple[Callable[[Path], Any], Any, str]] = {
    "AsyncBatchGenerator.get": (lambda _: generator().get(3), (3, None), "get_batch"),
    "AsyncBatchGenerator.submit": (lambda _: generator().submit(3, []), None, r"submit_batch\(BatchRequest"),
    'SandboxSpec("namespaces")': (lambda _: vf.SandboxSpec("namespaces").isolation, "bubblewrap", '"bubblewrap"'),  # type: ignore[arg-type]
    "SandboxSpec(tier=)": (lambda _: vf.SandboxSpec(tier="process").isolation, "process", "isolation"),
    "WorkerPool(tier=)": (lambda _: WorkerPool(tier="process").name, "workers", "isolation"),
    "Sandbox.tier": (lambda _: Level().tier, "process", "isolation"),
    "GRPOConfig(max_tokens_per_pass=)": (micro_batches, 512, "max_tokens_per_micro_batch"),
    "GRPOConfig(importance_correction=)": (correction, False, "vllm_importance_sampling_correction"),
}


@pytest.mark.parametrize("old", USES)
def test_a_former_argument_or_method_works(old: str, tmp_path: Path) -> None:
    use, result, present = USES[old]
    with pytest.warns(DeprecationWarning, match=f"use .*{present}") as caught:
        assert use(tmp_path) == result
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_former_functions_of_other_arguments_do_what_they_did() -> None:
    part = named("verifiers.data.source:BlockPart")(1, 1, 4, prompts=4, prompts_per_block=4, updates_per_block=1)
    assert (part.block_id, part.prompts, part.optimizer_step) == (1, 4, 1)

    limit = named("verifiers.train.dealing:PassLimit")(rows=2)
    dealt = named("verifiers.train.dealing:deal_longest_first")([9, 1, 5], micro_batches=1, ranks=2, limit=limit)
    assert dealt == [[[[0, 1]], [[2, -1]]]]

    pool = named("verifiers.rollouts.balancing:server_pool")(["http://127.0.0.1:1/v1"], managed=True)
    assert pool.urls == ["http://127.0.0.1:1/v1"]


def test_a_name_that_never_was_is_no_former_one() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verifiers.data.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        named("verifiers.data.plan:nothing")
