"""On the CPU, every core loads new weights; for sampling the server keeps its threads."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verifiers_vllm import loading
from verifiers_vllm.loading import load_with_every_core


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(loading, "cores", lambda: 3)
    yield
    torch.set_num_threads(before)


def test_weights_are_loaded_by_every_core_and_the_threads_are_as_before_afterwards() -> None:
    loaded = load_with_every_core(lambda path, *, strict: (path, strict, torch.get_num_threads()))
    assert loaded("weights", strict=True) == ("weights", True, 3)
    assert torch.get_num_threads() == 1


def test_the_threads_are_as_before_where_loading_fails() -> None:
    def breaks() -> None:
        raise OSError("no such directory")

    with pytest.raises(OSError, match="no such directory"):
        load_with_every_core(breaks)()
    assert torch.get_num_threads() == 1


def test_a_worker_that_forbids_other_threads_to_be_set_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    # as vLLM's CPU worker does once its threads are bound
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert load_with_every_core(torch.get_num_threads)() == 3


class Info:
    """Stand-in for vLLM's record of a layer."""

    def __init__(self) -> None:
        self.load_numel = 0
        self.loaded_weights: list[str] = []
        self.is_open = False

    def can_load(self) -> bool:
        return self.is_open


class Wrapper:
    """Stands in for the class through which vLLM calls its workers."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Info]:
    infos = [Info(), Info()]
    layerwise = types.ModuleType("layerwise")
    layerwise.get_layerwise_info = lambda layer: layer  # type: ignore[attr-defined]

    def finalize(model: Any, config: Any) -> None:
        assert config == "config"
        for layer in model.modules():
            # vLLM takes what came so far for all there is
            assert layer.load_numel == len(layer.loaded_weights) == 0
            layer.is_open = False

    layerwise.finalize_layerwise_reload = finalize  # type: ignore[attr-defined]
    worker_base = types.ModuleType("worker_base")
    worker_base.WorkerWrapperBase = Wrapper  # type: ignore[attr-defined]
    reload = types.ModuleType("reload")
    reload.layerwise = layerwise  # type: ignore[attr-defined]
    names = {"vllm.model_executor.model_loader.reload": reload, "vllm.v1.worker.worker_base": worker_base}
    for name, module in names.items():
        for place in range(name.count(".")):
            parent = ".".join(name.split(".")[: place + 1])
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Wrapper, "reload_weights", None, raising=False)
    del Wrapper.reload_weights  # type: ignore[attr-defined]
    loading.wrap_reload_weights()
    loading.wrap_reload_weights()
    return infos


def wrapper_of(layers: list[Info], fails: bool) -> Any:
    def load(path: str, *, strict: bool) -> str:
        for layer in layers:
            layer.is_open = True
            layer.load_numel += 1
            layer.loaded_weights.append(path)
        if fails:
            raise OSError("the disk hiccups")
        for layer in layers:
            layer.__init__()  # type: ignore[misc]
        return f"{path} {strict}"

    model = SimpleNamespace(modules=lambda: layers)
    runner = SimpleNamespace(get_model=lambda: model, model_config="config")
    return Wrapper(SimpleNamespace(reload_weights=load, model_runner=runner))


def test_a_load_that_breaks_off_is_reported_and_forgotten(layers: list[Info]) -> None:
    with pytest.raises(OSError, match="hiccups"):
        wrapper_of(layers, fails=True).reload_weights("weights", strict=True)
    assert [(layer.is_open, layer.load_numel, layer.loaded_weights) for layer in layers] == [(False, 0, [])] * 2


def test_a_load_that_goes_well_is_the_workers_own(layers: list[Info]) -> None:
    assert wrapper_of(layers, fails=False).reload_weights("weights", strict=True) == "weights True"


class Experts:
    """Stand-in for vLLM's method of a layer of experts, which packs at the first load alone."""

    def __init__(self) -> None:
        self.moe_kernel: Any = None
        self.packed: list[str] = []

    def set_up(self, layer: str) -> None:
        if self.moe_kernel is None:
            kernel = SimpleNamespace(process_weights_after_loading=self.packed.append)
            self.moe_kernel = SimpleNamespace(fused_experts=kernel)
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def test_experts_are_packed_once_at_every_load() -> None:
    experts = Experts()
    for loads in (1, 2, 3):
        loading.pack_experts_again(Experts.set_up)(experts, "layer")
        assert experts.packed == ["layer"] * loads


def test_layers_that_share_a_weight_are_packed_after_each_load_and_others_are_not() -> None:
    packed: list[str] = []

    def layer(name: str, weight: torch.Tensor, **more: Any) -> Any:
        method = SimpleNamespace(process_weights_after_loading=lambda one: packed.append(one.name))
        return SimpleNamespace(name=name, weight=weight, quant_method=method, **more)

    shared, freed = torch.ones(2), torch.empty(0)
    layers = [
        layer("embed_tokens", shared, cpu_linear=None),
        layer("lm_head", shared, cpu_linear=None),
        layer("q_proj", torch.ones(2), cpu_linear=None),
        layer("k_proj", freed, cpu_linear=None),
        layer("v_proj", freed, cpu_linear=None),
        layer("norm", shared),
    ]
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: layers))
    worker = SimpleNamespace(model_runner=runner)
    assert loading.pack_tied_again(lambda worker, path: f"loaded {path}")(worker, "weights") == "loaded weights"
    assert packed == ["embed_tokens", "lm_head"]


def test_heads_that_stand_apart_are_turned_like_others() -> None:
    def kernel(layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None) -> Any:
        # in place, by rows
        return query.mul_(positions[:, None]), key if key is None else key.mul_(positions[:, None])

    turn, positions = loading.turn_every_head(kernel), torch.tensor([2.0, 3.0])
    query, key = turn(None, positions, torch.ones(2, 4, 8), torch.ones(2, 2, 8))
    assert (query.shape, key.shape) == ((2, 4, 8), (2, 2, 8))
    assert query[:, :, 0].tolist() == [[2.0] * 4, [3.0] * 4]
    query, key = turn(None, positions, torch.ones(2, 8))
    assert (query.shape, key) == ((2, 8), None)
