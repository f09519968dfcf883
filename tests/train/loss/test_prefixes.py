"""Rows whose common prefix is computed once have the log-probs, losses and gradients of rows of their own."""

from __future__ import annotations

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from PIL import Image

from verifiers.images import ImageStore
from verifiers.rollouts.rollout import TokenSequence
from verifiers.train.batching.micro_batches import TrainingSample, pad_rows
from verifiers.train.image_processor import ImageProcessor, RowImages
from verifiers.train.loss.logprobs import PolicyLogprobs, fuse_head
from verifiers.train.loss.prefixes import SHARED_ROWS, can_share, share_prefixes
from verifiers.train.processes.distributed import Ranks
from verifiers.train.tiny_model.vision_model import make_vision_model

WORDS = 60
SIZE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Any] = {
    "Qwen3": lambda: hf.Qwen3Config(**SIZE, head_dim=8),
    "Llama": lambda: hf.LlamaConfig(**SIZE),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=64),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**SIZE, **EXPERTS, head_dim=8),
    "Phi 3": lambda: hf.Phi3Config(**SIZE),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**SIZE),
}
OTHERS: dict[str, Any] = {
    "linear attention": lambda: hf.Qwen3NextConfig(**SIZE, **EXPERTS, head_dim=8, linear_num_value_heads=4),
    "convolutions": lambda: hf.Lfm2Config(**SIZE, layer_types=["conv", "full_attention", "conv"]),
    "positions of its own": lambda: hf.RobertaConfig(**SIZE, is_decoder=True),
    "its own attention": lambda: hf.Gemma2Config(**SIZE, head_dim=8),
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).float()


def batch_of(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Lay rows of a prompt and a completion, all of which was sampled, out as `pad_rows` does."""
    samples = [
        TrainingSample(TokenSequence(prompt, ids, [1] * len(ids), [0.0] * len(ids), [0] * len(ids)), 0.0, 0, len(ids))
        for prompt, ids in rows
    ]
    return pad_rows(samples)


def group(prompt: int, lengths: list[int], seed: int = 0) -> list[tuple[list[int], list[int]]]:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (prompt,), generator=drawn).tolist()
    return [(ids, torch.randint(1, WORDS, (length,), generator=drawn).tolist()) for length in lengths]


def scored(
    model: Any,
    rows: list[tuple[list[int], list[int]]],
    *,
    shares: bool,
    images: RowImages | None = None,
    shown: list[tuple[str, ...]] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return log-probs and entropies, and the gradients of a loss of both."""
    accelerator: Any = Accelerator(cpu=True)
    logprobs = PolicyLogprobs(
        accelerator,
        Ranks(accelerator),
        model,
        None,
        batch_size=None,
        temperature=0.7,
        images=images,
    )
    model.zero_grad()
    batch = batch_of(rows)
    if images is not None:
        sampled = batch["loss_mask"].bool() & (batch["input_ids"] != images.processor.token_id)
        batch |= {"images": shown, "loss_mask": sampled}
    if shares:
        batch[SHARED_ROWS] = share_prefixes(batch["input_ids"], batch["attention_mask"], shown)
    found = logprobs.score(model, batch)
    weights = torch.randn(found.logps_RT.shape, generator=torch.Generator().manual_seed(3)) * batch["loss_mask"]
    ((found.logps_RT + 0.1 * found.entropy_RT) * weights).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return torch.stack([found.logps_RT, found.entropy_RT]).detach(), {n: g.clone() for n, g in gradients.items()}


ROWS = {
    "a group": group(20, [5, 9, 1, 7]),
    "two groups, and a row of its own": [
        *group(20, [5, 9, 6]),
        *group(12, [3, 4, 5], seed=1),
        *group(17, [8], seed=2),
    ],
    "turns that branch": [
        (p, c[:6] + d) for (p, c), (_, d) in zip([group(9, [8])[0]] * 4, group(9, [3, 5, 4, 6], 5), strict=True)
    ],
    "rows that are the same": [*group(15, [4]) * 4, *group(15, [4, 6])],
}


# every layout of rows in one family, and every family with the layout that has most in it
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("Qwen3", layout) for layout in ROWS),
        *((family, "two groups, and a row of its own") for family in FAMILIES if family != "Qwen3"),
    ],
)
def test_log_probs_and_gradients_are_those_of_separate_rows(family: str, layout: str) -> None:
    model, rows = made(FAMILIES[family]()), ROWS[layout]
    assert can_share(model, 64)
    # rows of any length, where no layer sees a window
    assert can_share(model, None) == can_share(model, 65) == (family != "Gemma 3")
    fuse_head(model, 0.7, outputs=("log_probs", "entropy"))
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(out.shape[:2].numel()))
    (alone, of_alone), (shared, of_shared) = (scored(model, rows, shares=one) for one in (False, True))
    assert seen[1] < 0.8 * seen[0]
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)
    assert of_alone.keys() == of_shared.keys()
    for name, gradient in of_alone.items():
        assert (of_shared[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_rows_that_show_images_share_what_shows_the_same(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    model = hf.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    model.model.visual.requires_grad_(True)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    processor = ImageProcessor.load(tmp_path, tokenizer, model.config)
    images = RowImages(processor, ImageStore(tmp_path / "images", 2), model.model)
    names = []
    for number, size in enumerate(((24, 24), (24, 24), (40, 16))):
        file = io.BytesIO()
        Image.frombytes("RGB", size, random.Random(number).randbytes(3 * size[0] * size[1])).save(file, "PNG")
        names.append(images.store.keep(file.getvalue()))
    one, other, wide = names

    def ids(text: str, *shown: str) -> list[int]:
        if not shown:
            return tokenizer.encode(text)
        return processor.read(text.replace("*", processor.token), [images.store.read(name) for name in shown])[0]

    asked, wider = ids("see * and say what", one), ids(" look *", wide)
    # the sixth and the seventh see one image before they branch, and one each behind it
    rows = [(asked, ids(said)) for said in ("red", "green", "blue", "no", "yes")]
    rows += [(asked, [*ids(said), *wider, *ids("so")]) for said in ("red", "yes")]
    rows += [(ids("no image here, but text enough"), ids(said)) for said in ("a", "bc")]
    shown = [(one,)] * 3 + [(other,)] * 2 + [(one, wide)] * 2 + [()] * 2
    assert can_share(model, None)
    fuse_head(model, 0.7, outputs=("log_probs", "entropy"))
    seen: list[int] = []
    model.model.visual.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    store, reads = images.store, Counter[str]()
    images.store = mock.Mock(read=lambda name: (reads.update([name]), store.read(name))[1])
    (alone, of_alone), (shared, of_shared) = (
        scored(model, rows, shares=each, images=images, shown=shown) for each in (False, True)
    )
    # of nine images in the rows five are left: one of each prompt, and the wide one of each branch
    patches = {"one": 36, "wide": 40}
    assert seen == [7 * patches["one"] + 2 * patches["wide"], 3 * patches["one"] + 2 * patches["wide"]]
    # each prompt's once a micro-batch, and each alone where the rows are laid out
    assert reads == {one: 2 + 2 + 1, other: 1 + 1 + 1, wide: 1 + 1 + 1}
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)
    assert of_alone.keys() == of_shared.keys()
    for name, gradient in of_alone.items():
        assert (of_shared[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_that_carries_a_state_or_attends_otherwise_computes_rows_alone(kind: str) -> None:
    assert not can_share(made(OTHERS[kind]()), 64)
    assert not can_share(made(OTHERS[kind]()).to(torch.bfloat16), 64)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_recomputed_layers_and_adapters_know_the_layout() -> None:
    model = made(FAMILIES["Llama"]())
    fuse_head(model, 0.7, outputs=("log_probs", "entropy"))
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    alone = scored(adapted, ROWS["a group"], shares=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    shared = scored(adapted.train(), ROWS["a group"], shares=True)
    torch.testing.assert_close(shared[0], alone[0], atol=1e-5, rtol=1e-5)
    for name, gradient in alone[1].items():
        assert (shared[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_half_precision_agrees_within_its_rounding() -> None:
    model = made(FAMILIES["Qwen3"]()).to(torch.bfloat16)
    assert can_share(model, None)


TREES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(rows=TREES)
def test_every_token_of_every_row_has_its_place_and_position(rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    ids_RT = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask_RT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    layout = share_prefixes(ids_RT, mask_RT, least_saved=-1.0)
    assert layout is not None
    assert len(layout.ids_N) <= sum(map(len, rows))
    for row, places in zip(rows, layout.place_RT.tolist(), strict=True):
        assert layout.ids_N[places[: len(row)]].tolist() == row
        assert layout.positions_N[places[: len(row)]].tolist() == list(range(len(row)))


def test_rows_without_much_in_common_are_left_alone() -> None:
    rows = [*group(3, [20]), *group(3, [20], seed=1), *group(3, [20], seed=2)]
    batch = batch_of(rows)
    assert share_prefixes(batch["input_ids"], batch["attention_mask"]) is None
