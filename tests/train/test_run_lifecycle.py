"""The start and the end of a run, without a trainer and without servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.data.batch_plan import make_plan
from verifiers.errors import WeightSyncError
from verifiers.train.checkpoint.checkpoint import mark_complete
from verifiers.train.checkpoint.run_directory import RunDirectory
from verifiers.train.processes.distributed import Ranks
from verifiers.train.run_lifecycle import RunLifecycle

PLAN = make_plan(per_device_train_batch_size=4, num_generations=4, max_steps=4, num_prompts=12)


class Parts:
    """Stands for the other parts of a run, and writes down what is asked of them."""

    def __init__(self, root: Path, *, servers: bool = True) -> None:
        self.events: list[str] = []
        self.began_at: int | None = None
        ranks = Ranks(SimpleNamespace(num_processes=1, process_index=0, is_main_process=True))
        args: Any = SimpleNamespace(output_dir=root, save_only_model=False, save_strategy="steps", temperature=1.0)
        directory = RunDirectory(args, PLAN, ranks, None, None, checksums=dict, blocks=tuple)
        self._servers = servers
        parts: Any = (PLAN, ranks, directory, self, self, self)
        self.lifecycle = RunLifecycle(*parts)

    # the rollout session
    generator = SimpleNamespace(activity=None)
    publisher = SimpleNamespace(servers=None)
    drains = False

    def open(self) -> Any:
        self.events.append("servers")
        if not self._servers:
            raise WeightSyncError("no server answers")
        return self

    def restore(self, blocks: list[Any]) -> None:
        self.events.append("blocks")

    def close(self) -> None:
        self.events.append("closed")

    # the evaluator
    stored = SimpleNamespace(own=set())

    # the monitor
    def begin(self, resume_step: int | None, **rest: Any) -> None:
        self.events.append("record")
        self.began_at = resume_step


def test_a_resumed_run_starts_where_its_checkpoint_stands_and_a_new_one_at_step_0(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    mark_complete(tmp_path / "checkpoint-2", PLAN, 2, {})
    parts = Parts(tmp_path)
    assert parts.lifecycle.open(True) == str(tmp_path / "checkpoint-2")
    assert parts.lifecycle.first_step == 2
    assert (parts.events, parts.began_at) == (["servers", "blocks", "record"], 2)
    parts.lifecycle.close()
    assert parts.events[3:] == ["closed"]
    again = Parts(tmp_path)
    assert again.lifecycle.open(None) is None
    assert (again.lifecycle.first_step, again.began_at) == (0, None)
    assert (tmp_path.with_name(f"{tmp_path.name}-earlier-1") / "checkpoint-2").is_dir()
    again.lifecycle.close()


def test_nothing_is_moved_for_a_run_that_finds_no_servers_and_the_next_one_may_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    failed = Parts(tmp_path, servers=False)
    with pytest.raises(WeightSyncError):
        failed.lifecycle.open(None)
    failed.lifecycle.close()
    assert (tmp_path / "checkpoint-2").is_dir()
    again = Parts(tmp_path)
    again.lifecycle.open(None)
    again.lifecycle.close()
