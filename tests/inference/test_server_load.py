"""How full servers are, by their own counts."""

from __future__ import annotations

import asyncio

import pytest
from pool_world import pool_of, until

from verifiers.inference import server_pool
from verifiers.inference.server_client import ServerClient
from verifiers.inference.server_pool import ServerLoad
from verifiers.testing.faults import Fault

TWO_ENGINES = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 9.5e-01
"""


def test_engines_of_one_server_are_added_up_and_the_fullest_cache_counts() -> None:
    load = ServerLoad()
    assert load.take(TWO_ENGINES)
    assert load.take(TWO_ENGINES.replace(" 2.0", " 0.0"))
    expected = {"server/running": 7.0, "server/waiting": 1.0, "server/cache_use": 0.95, "server/full": 0.5}
    assert load.metrics() == pytest.approx(expected)


def test_an_idle_server_is_neither_full_nor_empty() -> None:
    load = ServerLoad()
    assert load.take("vf_sequences_running 0.0\nvf_sequences_waiting 0.0\n")
    assert "server/full" not in load.metrics()
    assert not load.take("python_info 1.0\n")
    assert not load.take("vf_sequences_running NaN\nvf_sequences_waiting 1.2.3\nvf_slots_used +Inf\n")
    assert ServerLoad().metrics() == {}


async def test_a_pool_reads_its_servers_and_leaves_one_alone_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_pool, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(server_pool, "LOAD_INTERVAL_S", 0.0)
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    with pool_of(2, route_faults={"/metrics": Fault(404)}) as (pool, servers):
        await asyncio.to_thread(until, lambda: not pool.replicas[1].tells_load)
        paused = ServerClient(servers[0].url)
        await paused.request("POST", "/pause")
        asked = asyncio.create_task(paused.request("POST", "/v1/chat/completions", body))
        full = 0.0
        while not full:
            await asyncio.sleep(0.02)
            full = pool.take_load().metrics().get("server/full", 0.0)
        await paused.request("POST", "/resume")
        assert (await asked)["choices"]
    assert all(replica.tells_load for replica in pool.replicas[:1])
