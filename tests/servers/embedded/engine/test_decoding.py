"""Passes that are recorded once and replayed give the plain logits; a push, and rows that change, record nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sequences import check, sequence
from torch.fx.experimental.proxy_tensor import make_fx
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.cache import SlotCache
from verifiers_embedded.engine.decoding import Run
from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.generation import GenerationRequest
from verifiers_embedded.engine.sampling import SamplingParameters
from verifiers_embedded.engine.weights import match_weights

CONTEXT = 256


class Recorder:
    """Records a pass as a CUDA graph does: the operations of one run on the tensors of that run, and no Python."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, run: Run, device: torch.device) -> Run:
        self.recorded += 1
        operations: Run = make_fx(run)()
        return operations


@pytest.fixture
def model(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)


@pytest.mark.slow
def test_recordings_serve_all_steps_of_their_sizes_every_push_and_idle_times(model: Any) -> None:
    recorder = Recorder()
    batch = ActiveBatch(model, 4, CONTEXT, record=recorder, cache_tokens=4096)
    recorded = []
    with torch.inference_mode():
        for dice in (random.Random(0), random.Random(0)):
            for turn in range(12):
                free = 4 - len(batch.sequences)
                lengths = [dice.choice([1, 2, 20]) for _ in range(dice.randint(1, free))] if free else []
                batch.add([sequence([dice.randrange(90) for _ in range(length)]) for length in lengths])
                check(batch, model)
                for item in batch.sequences:
                    item.tokens.append(dice.randrange(90))
                batch.keep_only([*[False] * (4 if turn == 5 else turn % 3), *[True] * 4][: len(batch.sequences)])
                if turn % 4 == 3:
                    for tensor in model.state_dict().values():
                        tensor.mul_(1.01)
                    batch.recompute()
            batch.keep_only([False] * len(batch.sequences))
            recorded.append(recorder.recorded)
        assert recorded[0] == recorded[1]
        # a longer sequence needs a wider cache, which lies elsewhere
        batch.add([sequence([7] * 150), sequence([5, 6])])
        check(batch, model)
        check(batch, model)
        assert recorder.recorded == recorded[1] + 1
        # more than an eighth of the memory is not held while idle
        batch.keep_only([False, False])
        assert batch.allocated == (0, 0)
        batch.add([sequence([8] * 9), sequence([5, 6])])
        check(batch, model)


def test_a_cache_near_its_bound_moves_seldom_while_sequences_end_and_grow() -> None:
    cache = SlotCache(["full_attention"], 256, 8192, 550_000, fixed=True)
    for rows in range(1, 257):
        cache.reserve(rows, 1200 + 3 * rows)
    grown = cache.place
    for rows in range(256, 156, -1):
        cache.reserve(rows, 2100)
    assert cache.place - grown <= 8
    rows, columns = cache.allocated
    assert rows * columns <= 550_000
    assert cache.shape_of_pass(157, 2100) == (rows, columns)


def test_a_recorded_engine_samples_the_same_tokens_before_and_after_a_push(
    model: Any, model_dir: Path, other_dir: Path, reference: Any
) -> None:
    recorder = Recorder()
    plain_model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)
    engines = [
        Engine(held, decode=lambda ids: "", slots=4, max_model_len=CONTEXT, threads=1, record=record)
        for held, record in ((model, recorder), (plain_model, None))
    ]
    requests = [
        GenerationRequest(tuple(range(5, 8 + number)), 30, SamplingParameters(seed=number)) for number in range(6)
    ]
    for engine in engines:
        engine.start()
    try:
        for directory in (None, other_dir):
            if directory is not None:
                for engine, held in zip(engines, (model, plain_model), strict=True):
                    engine.reload(match_weights(held, reference.tensors(directory))).result(10)
            futures = [[engine.submit(request) for request in requests] for engine in engines]
            ours, theirs = ([future.result(60) for future in listed] for listed in futures)
            assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    finally:
        for engine in engines:
            engine.stop()
    # at most for 1, 2 and 4 rows, and again where the cache lay elsewhere as it grew to so many
    assert recorder.recorded <= 5
