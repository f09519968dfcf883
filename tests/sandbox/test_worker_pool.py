"""Warm workers: what calls give, what they cannot do to one another, and how they end."""

# looking at the machine from outside is the point of these tests, and nothing else runs in their event loops

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from verifiers.errors import ConfigError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.sandbox.worker_pool import WorkerPool


def test_json_goes_in_and_comes_out(pool: WorkerPool) -> None:
    answer = pool.call_blocking("pool_functions:echo", 1, "zwei", None, [1.5], timeout_s=60, key={"a": ["ü"]})
    assert answer == {"args": [1, "zwei", None, [1.5]], "kwargs": {"key": {"a": ["ü"]}}}
    assert pool.call_blocking("math:sqrt", 16) == 4
    long = "x" * 5_000_000
    assert pool.call_blocking("builtins:len", long) == 5_000_000


def test_a_function_that_raises_gives_the_name_of_its_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerCallError, match="KeyError") as raised:
        pool.call_blocking("pool_functions:fail", "what")
    assert raised.value.kind == "KeyError"


def test_errors_of_any_kind_are_told(pool: WorkerPool) -> None:
    kinds = {"recurse": "RecursionError", "deep": "RecursionError", "leave": "SystemExit", "huge": "OverflowError"}
    for function, kind in {**kinds, "eat": "MemoryError"}.items():
        with pytest.raises(WorkerCallError) as raised:
            pool.call_blocking(f"pool_functions:{function}", timeout_s=60)
        assert raised.value.kind == kind
    with pytest.raises(WorkerCallError) as raised:
        pool.call_blocking("builtins:bytearray", 10 << 30)
    assert raised.value.kind == "MemoryError"
    with pytest.raises(WorkerCallError, match="not JSON serializable"):
        pool.call_blocking("builtins:range", 3)


def test_a_process_that_dies_or_talks_nonsense_is_an_error_of_its_call_alone(pool: WorkerPool) -> None:
    for function in ("crash", "corrupt", "flood"):
        with pytest.raises(WorkerError):
            pool.call_blocking(f"pool_functions:{function}", timeout_s=4)
        assert pool.call_blocking("pool_functions:echo", 1)["args"] == [1]


def test_a_call_past_its_time_is_killed_and_the_worker_stays_warm(pool: WorkerPool) -> None:
    pool.call_blocking("math:sqrt", 1)
    (worker,) = pool._workers.all
    for function in ("hang", "burn"):
        with pytest.raises(WorkerTimeoutError, match=r"0\.3 s"):
            pool.call_blocking(f"pool_functions:{function}", timeout_s=0.3)
    assert pool.call_blocking("math:sqrt", 4) == 2
    assert set(pool._workers.all) == {worker}


def test_processes_that_a_call_leaves_are_gone_when_it_has_answered(
    pool: WorkerPool, marker: str, count_of: Callable[[str], int]
) -> None:
    assert pool.call_blocking("pool_functions:background", marker) is True
    assert count_of(marker) == 0
    with pytest.raises(WorkerTimeoutError):
        pool.call_blocking("pool_functions:hang", marker, timeout_s=0.5)
    assert count_of(marker) == 0


def test_one_call_can_do_nothing_to_the_next(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:poison") == "poisoned"
    assert pool.call_blocking("math:sqrt", 9) == 3
    assert pool.call_blocking("pool_functions:echo", 1)["args"] == [1]
    assert "POISON" not in pool.call_blocking("pool_functions:environment")
    assert [pool.call_blocking("pool_functions:count") for _ in range(3)] == [1, 1, 1]


def test_a_process_that_stays_behind_cannot_answer_later_calls(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:forge") == "left"
    for number in range(20):
        assert pool.call_blocking("pool_functions:echo", number)["args"] == [number]


def test_what_a_function_prints_is_not_its_answer(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:chatter") == "quiet"


def test_killing_the_agent_costs_one_call(pool: WorkerPool) -> None:
    if next(iter(pool._workers.all)).sandbox.isolation == "bubblewrap":
        # nobody inside can send it that signal
        assert pool.call_blocking("pool_functions:kill_parent") == "parent is alive"
    else:
        with pytest.raises(WorkerError):
            pool.call_blocking("pool_functions:kill_parent")
    assert pool.call_blocking("math:sqrt", 4) == 2


def test_a_worker_that_died_while_it_was_idle_is_replaced(pool: WorkerPool) -> None:
    pool.call_blocking("math:sqrt", 1)
    (worker,) = pool._workers.all
    worker.sandbox.process.kill()
    worker.sandbox.process.wait()
    assert pool.call_blocking("math:sqrt", 4) == 2


def test_a_call_has_neither_network_nor_files_nor_keys(
    contained: str, functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    target = tmp_path / "out"
    target.mkdir()
    target.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        WorkerPool(workers=1, isolation="bubblewrap", paths=[functions]) as pool,
    ):
        assert pool.call_blocking("pool_functions:network", server.getsockname()[1]) == "stopped"
        for path in (f"{target}/file", f"{functions}/file", "/usr/file", "/etc/passwd"):
            assert pool.call_blocking("pool_functions:write_to", path) == "stopped"
        assert "canary" not in str(pool.call_blocking("pool_functions:environment"))
        assert pool.call_blocking("os:listdir", os.path.dirname(functions)) == [os.path.basename(functions)]
    assert os.listdir(target) == []


def test_functions_and_arguments_that_cannot_be_sent_are_refused(pool: WorkerPool) -> None:
    for function in ("math", "math:", ":sqrt"):
        with pytest.raises(ConfigError, match="module:attribute"):
            pool.call_blocking(function)
    with pytest.raises(ConfigError, match="not JSON"):
        pool.call_blocking("math:sqrt", object())
    with pytest.raises(ConfigError, match="paths"):
        pool.call_blocking("module_that_is_not_there:function")
    with pytest.raises(ConfigError, match="AttributeError"):
        pool.call_blocking("math:no_such_function")
    with pytest.raises(ConfigError, match="timeout_s"):
        pool.call_blocking("math:sqrt", 1, timeout_s=0)
    with pytest.raises(ConfigError, match="at least one"):
        WorkerPool(workers=0)
    with pytest.raises(ConfigError, match="'docker'"):
        WorkerPool(isolation="docker")


def test_a_module_to_preload_that_cannot_be_imported_is_said() -> None:
    with (
        WorkerPool(workers=1, preload=["no_such_module"]) as pool,
        pytest.raises(WorkerError, match="no_such_module"),
    ):
        pool.call_blocking("math:sqrt", 1)
