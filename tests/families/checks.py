"""What the table says of a family, each as a check, which raises where the family does not keep it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
import transformers as hf
from families import SIGHTS, Family
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.generation import Generation, GenerationRequest
from verifiers_embedded.engine.loading import LoadedModel, load_model
from verifiers_embedded.engine.sampling import SamplingParameters
from verifiers_embedded.engine.weights import match_weights, read_weights
from verifiers_embedded.errors import StartError
from verifiers_embedded.text.prompts import ChatText

import verifiers as vf
from verifiers.images import image_bytes
from verifiers.train.image_processor import ImageError
from verifiers.train.models import get_adapter
from verifiers.train.weight_sync.protocol import checkpoint_tensors, policy_tensors

TOLERANCE = 1e-4
"""Nats by which two log-probs of a token may differ."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
_PROMPT_LENGTHS = (1, 2, 9, 9, 30, 47)
_SAMPLED = 12


def trained_class(directory: Path) -> Any:
    """Return the class that the trainer loads a checkpoint with."""
    return getattr(hf, json.loads((directory / "config.json").read_text())["architectures"][0])


@contextmanager
def engine_of(loaded: LoadedModel) -> Iterator[Engine]:
    engine = Engine(
        loaded.model,
        decode=lambda ids: "",
        slots=8,
        max_model_len=256,
        prefix_bytes=2**24,
        images=loaded.images,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def generate(engine: Engine, prompts: list[list[int]]) -> list[Generation]:
    """Sample from all prompts at once, each with a seed of its own."""
    sampling = [SamplingParameters(seed=7 + place) for place in range(len(prompts))]
    requests = [GenerationRequest(tuple(ids), _SAMPLED, one) for ids, one in zip(prompts, sampling, strict=True)]
    return [future.result(60) for future in engine.submit_all((request, None) for request in requests)]


def require_agreement(model: Any, prompts: list[list[int]], answers: list[Generation]) -> None:
    """Compare sampled tokens' log-probs with those of plain forward passes of transformers, one for each sequence."""
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        plain = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        difference = (plain - torch.tensor(answer.log_probs)).abs().max().item()
        assert difference < TOLERANCE, f"log-probs differ by {difference:.2g} from transformers' own"


def prompts_of(vocabulary: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(1, vocabulary) for _ in range(length)] for length in _PROMPT_LENGTHS]


def check_embedded(family: Family, directory: Path) -> None:
    """Sample the same tokens alone and in a batch, agree with transformers, and go on from kept turns."""
    loaded = load_model(directory, device="cpu", dtype="float32", max_model_len=256)
    plain = trained_class(directory).from_pretrained(directory, dtype=torch.float32).eval()
    prompts = prompts_of(loaded.vocab_size)
    with engine_of(loaded) as engine:
        together = generate(engine, prompts)
        require_agreement(plain, prompts, together)
        for place, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
            # a seed goes with the place, and so the prompt keeps its own
            alone = generate(engine, [*[[1]] * place, prompt])[place]
            assert alone.token_ids == answer.token_ids
            gap = max(abs(one - other) for one, other in zip(alone.log_probs, answer.log_probs, strict=True))
            assert gap < TOLERANCE, f"log-probs differ by {gap:.2g} alone and in a batch"
        turns = [prompt + answer.token_ids + [5, 6, 7] for prompt, answer in zip(prompts, together, strict=True)]
        before = engine.prefixes["tokens_reused"]
        # some of them several times, and beside turns that are new
        require_agreement(plain, [*turns, *turns[-2:]], generate(engine, [*turns, *turns[-2:]]))
        assert engine.prefixes["tokens_reused"] > before


def check_pushes(family: Family, directory: Path) -> None:
    """Push other weights as the trainer names them, by a directory, to a server of the checkpoint."""
    loaded = load_model(directory, device="cpu", dtype="float32", max_model_len=256)
    prompts = prompts_of(loaded.vocab_size)
    with engine_of(loaded) as engine:
        for seed in (1, 2):
            model = nudged(trained_class(directory).from_pretrained(directory, dtype=torch.float32), seed)
            push(engine, loaded, model, directory / f"push-{seed}")
            require_agreement(model, prompts, generate(engine, prompts))


def check_lora(family: Family, directory: Path) -> None:
    """Push a policy with an adapter on all linear layers, merged; serve it and train it further once it is saved."""
    loaded = load_model(directory, device="cpu", dtype="float32", max_model_len=256)
    prompts = prompts_of(loaded.vocab_size)
    base = trained_class(directory).from_pretrained(directory, dtype=torch.float32)
    # PEFT takes no adapter on Mamba's `out_proj`
    adapter = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["out_proj"])
    model = nudged(get_peft_model(base, adapter), 3, only="lora_B")
    with engine_of(loaded) as engine:
        push(engine, loaded, model, directory / "push-lora")
        require_agreement(model, prompts, generate(engine, prompts))
    model.save_pretrained(directory / "adapter")
    with engine_of(load_model(directory / "adapter", device="cpu", dtype="float32", max_model_len=256)) as engine:
        served = generate(engine, prompts)
    for one in (model, get_adapter(str(directory / "adapter"), dtype=torch.float32).eval()):
        require_agreement(one, prompts, served)


def nudged(model: Any, seed: int, only: str = "") -> Any:
    """Change a model's weights as far as some steps of training might."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def push(engine: Engine, loaded: LoadedModel, model: Any, directory: Path) -> None:
    directory.mkdir()
    pushed = {name: one.clone() for name, one in checkpoint_tensors(model, policy_tensors(model)).items()}
    # what servers know the names of
    assert pushed.keys() == load_file(directory.parent / "model.safetensors").keys()
    save_file(pushed, directory / "model.safetensors")
    engine.reload(match_weights(loaded.model, read_weights(directory))).result(60)


class Snapshots(TrainerCallback):
    """Keeps the policy's tensors by step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights[state.global_step] = {name: one.detach().clone() for name, one in model.state_dict().items()}

    on_step_end = on_train_begin


def train(directory: Path, steps: int, *, resume: bool) -> tuple[Any, Snapshots]:
    """Train on dialogues of three turns with a frozen copy of the policy in this process."""
    kept = Snapshots()
    args = tiny_world.config(
        directory / "run", "", rollout_device="cpu", max_steps=steps, save_strategy="steps", save_steps=1
    )
    trainer = tiny_world.ObservedTrainer(str(directory), tiny_world.Dialogue(), args, callbacks=[kept])
    trainer.keeps_logps = True
    with tiny_world.closing(trainer):
        trainer.train(resume_from_checkpoint=resume)
    return trainer, kept


def check_trains(family: Family, directory: Path) -> None:
    """Train two steps: the trainer's log-probs are the sampler's, after each push, and the final model is served."""
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory / name).write_text('{"of": "the family"}')
    trainer, _ = train(directory, 2, resume=False)
    assert trainer.state.global_step == 2
    assert trainer.largest_difference() < TOLERANCE
    assert max(trainer.logged("sampling/probe_difference")) < TOLERANCE
    trainer.save_model()
    final = directory / "run"
    assert {path.name for path in directory.glob("*.json*")} <= {path.name for path in final.iterdir()}
    assert (final / "chat_template.jinja").read_text() == (directory / "chat_template.jinja").read_text()
    assert load_file(final / "model.safetensors").keys() == load_file(directory / "model.safetensors").keys()
    served = load_model(final, device="cpu", dtype="float32", max_model_len=256)
    prompts = prompts_of(served.vocab_size)
    with engine_of(served) as engine:
        answers = generate(engine, prompts)
    require_agreement(trainer.model.eval(), prompts, answers)
    require_agreement(trained_class(final).from_pretrained(final, dtype=torch.float32).eval(), prompts, answers)


def check_resume(family: Family, directory: Path) -> None:
    """Resume the run that `check_trains` has left, with every bit of its weights."""
    final = trained_class(directory).from_pretrained(directory / "run", dtype=torch.float32)
    _, resumed = train(directory, 3, resume=True)
    assert min(resumed.weights) == 2
    for name, one in final.state_dict().items():
        assert torch.equal(one, resumed.weights[2][name]), f"{name} is another after resuming"


def check_tools(family: Family, directory: Path) -> None:
    """Read a call that is written as the family's models write it, as the chat template prints it again."""
    assert family.calls_are_read, "its models write calls in a format that is not read"
    text, ids = chat_text(family), family.tokenizer().encode
    format_ = family.format
    assert text.tool_format == format_.tool_format
    sampled = ids(format_.call + (format_.call_ends or format_.special[0]), add_special_tokens=False)
    (call,) = text.read(text.decode_with_marks(sampled), text.decode(sampled), [3], TOOLS).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris", "days": 2})
    called = {"id": "abcdefghi", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    asked = {"role": "user", "content": "how will it be?"}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    prompt = text.render([asked], {}, TOOLS)
    # but for thoughts, which templates leave out of earlier turns
    written = sampled if family.format.tool_format != "openai" else sampled[-20:]
    rendered = text.render([asked, said, {"role": "tool", "tool_call_id": "abcdefghi", "content": "42"}], {}, TOOLS)
    assert rendered[: len(prompt)] == prompt
    assert contains(rendered[len(prompt) :], written)


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids)))


def check_reasoning(family: Family, directory: Path) -> None:
    """Tell a thought from the answer behind it."""
    text, format_ = chat_text(family), family.format
    sampled = family.tokenizer().encode(format_.thought + format_.special[0], add_special_tokens=False)
    answer = text.read(text.decode_with_marks(sampled), text.decode(sampled), [3], [])
    assert (answer.reasoning, answer.content) == ("it is", "noon")


def chat_text(family: Family) -> ChatText:
    return ChatText(family.tokenizer(), splits_reasoning=True)


def check_images(family: Family, directory: Path) -> None:
    """Read images in any batch as transformers does, before and after a push, and train dialogues that show them."""
    assert family.name in SIGHTS, "nobody has tried its images"
    seeing = family.write_with_images(directory / "seeing")
    loaded = load_model(seeing, device="cpu", dtype="float32", max_model_len=256, with_images=True)
    assert loaded.images is not None
    prompts = [
        # two of one length, which are read together
        loaded.images.read(SIGHTS[family.name].shown * count + "what", noise_images(count, seed))
        for count, seed in ((1, 0), (2, 0), (1, 1))
    ]
    prompts.append((prompts_of(loaded.vocab_size)[4], None))
    written = loaded.tokenizer.convert_ids_to_tokens(loaded.images.token_id)
    with pytest.raises(ImageError):
        loaded.images.read(SIGHTS[family.name].shown + f"what {written} is", noise_images(1))
    for seed in (0, 1):
        model = trained_class(seeing).from_pretrained(seeing, dtype=torch.float32).eval()
        with engine_of(loaded) as engine:
            if seed:
                push(engine, loaded, nudged(model, seed), seeing / "push")
            # alike, and alone
            asked = [*prompts, *prompts, prompts[1]]
            sampling = [SamplingParameters(seed=9 + place % len(prompts)) for place in range(len(asked))]
            requests = [
                GenerationRequest(tuple(ids), _SAMPLED, one, frozenset({loaded.images.token_id}), images=images)
                for (ids, images), one in zip(asked, sampling, strict=True)
            ]
            answers = [future.result(60) for future in engine.submit_all((one, None) for one in requests[:-1])]
            answers.append(engine.submit(requests[len(prompts) + 1]).result(60))
        for (ids, images), answer in zip(asked, answers, strict=True):
            whole = torch.tensor([ids + answer.token_ids])
            # sampled, it stands for no image
            shown = whole[:, :-1] if answer.token_ids[-1] == loaded.images.token_id else whole
            with torch.no_grad():
                given = {} if images is None else loaded.images.inputs(shown, [images], shown.device)
                logits = model(input_ids=shown, **given).logits[0, len(ids) - 1 :].log_softmax(-1)
            plain = logits[: len(answer.token_ids)].gather(1, whole[0, len(ids) :, None])[:, 0]
            assert (plain - torch.tensor(answer.log_probs)).abs().max().item() < TOLERANCE
        assert answers[1].token_ids == answers[5].token_ids == answers[8].token_ids
    args = tiny_world.config(
        seeing / "run", "", rollout_device="cpu", max_images=3, max_completion_length=6, train_vision_tower=True
    )
    trainer = tiny_world.ObservedTrainer(str(seeing), Showing(), args)
    trainer.keeps_logps = True
    with tiny_world.closing(trainer):
        trainer.train()
    assert trainer.largest_difference() < TOLERANCE
    assert max(trainer.logged("sampling/probe_difference")) < TOLERANCE
    assert {len(names) for batch in trainer.seen for names in batch.get("images", ())} >= {3}


def noise_images(count: int, seed: int = 0) -> list[bytes]:
    dice = random.Random(seed)
    noise = [
        Image.frombytes("RGB", (16, 8 + 8 * place), dice.randbytes(48 * (8 + 8 * place))) for place in range(count)
    ]
    return [image_bytes(vf.image_part(one)["image_url"]["url"]) for one in noise]


class Showing(tiny_world.Dialogue):
    """A dialogue whose prompt and each of whose replies show an image."""

    def __init__(self) -> None:
        super().__init__()
        shown = [[part_of(16), {"type": "text", "text": f"see {place}"}] for place in range(4)]
        self.dataset = vf.SingleTurnEnv(
            dataset=[{"prompt": [{"role": "user", "content": one}], "answer": ""} for one in shown],
            rubric=self.rubric,
        ).get_dataset()

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": [part_of(8 + 8 * state["turn"]), {"type": "text", "text": "now"}]}], state


def part_of(side: int) -> dict[str, Any]:
    return vf.image_part(Image.frombytes("RGB", (side, side), random.Random(side).randbytes(side * side * 3)))


CHECKS: dict[str, Callable[[Family, Path], None]] = {
    "embedded": check_embedded,
    "pushes": check_pushes,
    "lora": check_lora,
    "trains": check_trains,
    "resume": check_resume,
    "tools": check_tools,
    "reasoning": check_reasoning,
    "images": check_images,
}
NEEDED = {"pushes": "embedded", "lora": "embedded", "trains": "embedded", "resume": "trains", "images": "embedded"}
"""Checks that cannot be made where another fails; their cells are then those of the other."""


def measure(family: Family, directory: Path) -> tuple[dict[str, str], list[Exception]]:
    """Return a family's row of the table, and why cells are not "yes"."""
    family.write(directory)
    row: dict[str, str] = {"model_type": family.config().model_type}
    reasons: list[Exception] = []
    for name, check in CHECKS.items():
        row[name] = row.get(NEEDED.get(name, ""), "yes")
        if name == "images" and not family.is_multimodal:
            row[name] = ""
        if row[name] != "yes":
            continue
        try:
            check(family, directory)
        except Exception as error:
            row[name] = "refused" if isinstance(error, StartError) else "no"
            error.add_note(f"{family.name}: {name}")
            reasons.append(error)
    return row, reasons
