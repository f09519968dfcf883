"""Former places of names, which keep working.

Names of the last release keep working for one release, each with a DeprecationWarning that names the present one.
Names of the classic API keep working without a warning; their table is `verifiers.envs.classic.import_paths`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from itertools import islice
from types import ModuleType
from typing import Any

__all__ = ["FORMER_NAMES", "FormerNameWarning", "former_name", "moved_spec", "warn_renamed"]

FORMER_NAMES = {
    "verifiers.data.adaptive:AdaptiveRows": "verifiers.data.adaptive_curriculum:AdaptiveRows",
    "verifiers.data.adaptive:Adapts": "verifiers.data.adaptive_curriculum:CurriculumPolicy",
    "verifiers.data.curriculum:curriculum_from": "verifiers:curriculum_from",
    "verifiers.data.levels:Levels": "verifiers.data.curriculum_policies:LevelsPolicy",
    "verifiers.data.plan:make_plan": "verifiers.data.batch_plan:make_plan",
    "verifiers.data.source:BlockPart": "verifiers.data.row_source:PlannedBlock",
    "verifiers.data.staged:StagedRows": "verifiers.data.row_source:StagedRows",
    "verifiers.envs.adapters.openenv_session:SessionLimits": "verifiers.integrations.openenv_session:SessionLimits",
    "verifiers.envs.adapters.reasoning_gym_rows:Entry": "verifiers.integrations.reasoning_gym_rows:Entry",
    "verifiers.envs.adapters.reasoning_gym_rows:draw_split": "verifiers.integrations.reasoning_gym_rows:draw_split",
    "verifiers.envs.adapters.reasoning_gym_rows:gym_tasks": "verifiers.integrations.reasoning_gym_rows:gym_tasks",
    "verifiers.envs.adapters.reasoning_gym_scoring:COMPARING_TASKS": (
        "verifiers.integrations.reasoning_gym:COMPARING_TASKS"
    ),
    "verifiers.envs.remote_dataset:RemoteRLDataset": "verifiers.integrations.dataserver_trl:RemoteRLDataset",
    "verifiers.envs.remote_dataset:remote_reward": "verifiers.integrations.dataserver_trl:remote_reward",
    "verifiers.envs.remote_env:RemoteEnv": "verifiers.integrations.dataserver:RemoteEnv",
    "verifiers.envs.remote_env:load_environment": "verifiers.integrations.dataserver:load_environment",
    "verifiers.evals.endpoints:find_endpoint": "verifiers.inference.endpoint_registry:find_endpoint",
    "verifiers.evals.endpoints:load_endpoints": "verifiers.inference.endpoint_registry:load_endpoints",
    "verifiers.evals.variance:split_variance": "verifiers.evals.summary:split_variance",
    "verifiers.evals.viewer.writing:write_comparison_report": "verifiers.reports.evaluation:write_comparison_report",
    "verifiers.evals.viewer.writing:write_evaluation_report": "verifiers.reports.evaluation:write_evaluation_report",
    "verifiers.rollouts.adaptive:limiter_for": "verifiers.inference.adaptive_limiter:limiter_for",
    "verifiers.rollouts.balancing:BalancedBackend": "verifiers.inference.load_balancer:LoadBalancer",
    "verifiers.rollouts.balancing:server_pool": "verifiers.inference.server_pool:ServerPool",
    "verifiers.rollouts.endpoint:Endpoint": "verifiers.inference.endpoint:Endpoint",
    "verifiers.rollouts.endpoint:HttpBackend": "verifiers.inference.endpoint:HttpBackend",
    "verifiers.rollouts.trace:Turn": "verifiers.rollouts.rollout:Turn",
    "verifiers.rollouts.trace:rows_from_turns": "verifiers.rollouts.recording_client:rows_from_turns",
    "verifiers.rubrics.overlong:completion_tokens": "verifiers.rubrics.shaping:completion_tokens",
    "verifiers.rubrics.r1_zero:r1_zero_rubric": "verifiers.rubrics.shaping:r1_zero_rubric",
    "verifiers.sandbox.opening:open_sandbox": "verifiers.sandbox:open_sandbox",
    "verifiers.sandbox.workers:WorkerPool": "verifiers.sandbox.worker_pool:WorkerPool",
    "verifiers.train.collate:Dropped": "verifiers.train.batching.collate:Dropped",
    "verifiers.train.dealing:PassLimit": "verifiers.train.batching.packing:MicroBatchLimit",
    "verifiers.train.dealing:deal_longest_first": "verifiers.train.batching.packing:balance_by_length",
    "verifiers.train.launch:launched_server": "verifiers.train.processes.launch:launched_server",
    "verifiers.train.ledger:Ledger": "verifiers.train.checkpoint.block_log:BlockLog",
    "verifiers.train.ledger:block_record": "verifiers.train.checkpoint.block_log:block_record",
    "verifiers.train.ledger:read_ledger": "verifiers.train.checkpoint.block_log:read_block_log",
    "verifiers.train.watching.history:read_history": "verifiers.monitoring.history:read_history",
    "verifiers.train.watching.report:write_training_report": "verifiers.reports.training_run:write_training_report",
    "verifiers.train.weight_sync:HeldSync": "verifiers.train.weight_sync.in_process:InProcessSync",
}
"""Names that documentation gave, by their former place and by their present one, each as "module:name"."""


_CLASSIC = "verifiers.envs.classic.import_paths"


class FormerNameWarning(DeprecationWarning):
    """The use of a former name; commands log it."""


def warn_renamed(old: str, new: str, stacklevel: int = 1) -> None:
    """Warn that a name was renamed.

    Args:
        stacklevel: frames between the user's code and the caller of this function.
    """
    message = f"{old} is deprecated and will be removed in the next release; use {new}."
    warnings.warn(message, FormerNameWarning, stacklevel=stacklevel + 2)


def former_name(module: str, name: str) -> Any:
    """Return what a name of a module stands for now; for the module's `__getattr__`.

    One that was renamed since the last release comes with a warning, one of the classic API without.

    Raises:
        AttributeError: the module has neither.
    """
    old = f"{module}:{name}"
    if old not in FORMER_NAMES:
        return _load(f"{_CLASSIC}:classic_name")(module, name)
    found = _load(FORMER_NAMES[old])
    warn_renamed(f"{module}.{name}", FORMER_NAMES[old].replace(":", "."), stacklevel=2)
    return _ADAPTED[old](found) if old in _ADAPTED else found


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class _MovedModule:
    """The loader of a module whose names are elsewhere."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = _moved_modules().get(module.__name__, [])
        module.__dict__["__all__"] = names
        module.__getattr__ = lambda name: former_name(module.__name__, name)  # type: ignore[method-assign]


@functools.cache
def _moved_modules() -> dict[str, list[str]]:
    """Return the names of each module of both tables."""
    modules: dict[str, list[str]] = {}
    for old in (*FORMER_NAMES, *_load(f"{_CLASSIC}:CLASSIC_NAMES")):
        module, _, name = old.partition(":")
        modules.setdefault(module, []).append(name)
    return modules


def moved_spec(name: str) -> ModuleSpec | None:
    """Return how to import a module whose names are elsewhere; None for one that neither table has.

    Raises:
        ImportError: it is a part of the classic package that is not provided here.
    """
    _load(f"{_CLASSIC}:refuse_hosted")(name)
    is_package = any(module.startswith(f"{name}.") for module in _moved_modules())
    if not is_package and name not in _moved_modules():
        return None
    is_package = is_package or name in _load(f"{_CLASSIC}:HOSTED_PARENTS")
    return ModuleSpec(name, _MovedModule(), is_package=is_package)  # type: ignore[arg-type]


def _block_part(planned_block: Callable[..., Any]) -> Callable[..., Any]:
    def block_part(
        block_id: int,
        optimizer_step: int,
        start: int,
        prompts: int,
        prompts_per_block: int,
        updates_per_block: int,
        borders: tuple[int, ...] = (),
    ) -> Any:
        return planned_block(block_id, prompts, updates_per_block)

    return block_part


def _server_pool(pool: Callable[..., Any]) -> Callable[..., Any]:
    def server_pool(
        urls: Iterable[str],
        *,
        api_key: str = "EMPTY",
        timeout_s: float = 600.0,
        managed: bool = False,
        **options: Any,
    ) -> Any:
        endpoint, balancer = map(
            _load, ("verifiers.inference.endpoint:Endpoint", "verifiers.inference.load_balancer:LoadBalancer")
        )
        servers = [endpoint(url, api_key, timeout_s=timeout_s) for url in urls]
        return (pool if managed else balancer)(servers, **options)

    return server_pool


def _deal_longest_first(balance_by_length: Callable[..., Any]) -> Callable[..., Any]:
    def deal_longest_first(lengths: Sequence[int], micro_batches: int, ranks: int, limit: Any) -> Any:
        packing = balance_by_length(lengths, micro_batches, ranks, limit)
        rows = (row if row < len(lengths) else -1 for row in packing.order)
        return packing.nested([list(islice(rows, size)) for size in packing.sizes])

    return deal_longest_first


_ADAPTED: dict[str, Callable[[Any], Any]] = {
    "verifiers.data.source:BlockPart": _block_part,
    "verifiers.rollouts.balancing:server_pool": _server_pool,
    "verifiers.train.dealing:deal_longest_first": _deal_longest_first,
}
"""Former names whose arguments or results have changed too: what adapts the present one."""
