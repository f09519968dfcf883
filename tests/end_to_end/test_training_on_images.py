"""Training on images: what reaches the loss, what is kept, what a resumed run does, and what is refused."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from peft import LoraConfig
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from verifiers_embedded.engine.loading import load_model
from verifiers_embedded.in_process_server import InProcessServer

import verifiers as vf
from verifiers.images import ImageStore, image_bytes, image_urls
from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import Turn
from verifiers.train.image_processor import Images, RowImages, read_image
from verifiers.train.tiny_model.vision_model import make_vision_model, show_answers


@pytest.fixture(scope="module")
def seeing_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    make_vision_model(directory)
    return directory


def noise(side: int) -> dict[str, Any]:
    return vf.image_part(Image.frombytes("RGB", (side, side), random.Random(side).randbytes(side * side * 3)))


def questions() -> list[dict[str, Any]]:
    shown = [[noise(8 + 8 * place), {"type": "text", "text": f"see {place}"}] for place in range(4)]
    return [{"prompt": [{"role": "user", "content": content}], "answer": ""} for content in shown]


class Showing(vf.MultiTurnEnv):
    """Two answers; the second question shows another image, and every other prompt shows none."""

    def __init__(self) -> None:
        super().__init__(dataset=questions(), rubric=vf.Rubric(funcs=[tiny_world.vowels]), max_turns=2)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": [{"type": "text", "text": "and"}, noise(40)]}]


def train(
    model: Path, out: Path, env: Any = None, *, stop_at: int | None = None, resume: bool | str = False, **options: Any
) -> tiny_world.ObservedTrainer:
    given = {"rollout_device": "cpu", "max_images": 2, "max_completion_length": 6, **options}
    adapter = given.pop("adapter", None)
    args = tiny_world.config(out, given.pop("url", ""), **given)
    trainer = tiny_world.ObservedTrainer(str(model), env or Showing(), args, peft_config=adapter)
    trainer.keeps_logps = True
    with tiny_world.closing(trainer):
        if stop_at is not None:
            tiny_world.stop(trainer, stop_at)
        else:
            trainer.train(resume_from_checkpoint=resume)
    return trainer


def moved_from(directory: Path, trainer: tiny_world.ObservedTrainer) -> set[str]:
    before = dict(Qwen3VLForConditionalGeneration.from_pretrained(directory).named_parameters())
    return {name for name, now in trainer.model.named_parameters() if not torch.equal(now, before[name])}


def test_what_is_trained_is_what_was_sampled_and_the_tower_stays(seeing_dir: Path, tmp_path: Path) -> None:
    trainer = train(seeing_dir, tmp_path / "run")
    assert trainer.largest_difference() < 1e-4
    assert max(trainer.logged("sampling/probe_difference")) < 1e-4
    names = {name for batch in trainer.seen for row in batch["images"] for name in row}
    stored = {path.name: path.read_bytes() for path in (tmp_path / "run" / "images").iterdir()}
    # each once, under the hash of its bytes
    assert {name: hashlib.sha256(image).hexdigest() for name, image in stored.items()} == {n: n for n in stored}
    assert names <= stored.keys()
    assert len(stored) <= 5
    assert 2 in {len(row) for batch in trainer.seen for row in batch["images"]}
    moved = moved_from(seeing_dir, trainer)
    assert moved
    assert not any(".visual." in name for name in moved)


@pytest.mark.slow
def test_an_image_that_a_tool_shows_is_trained_as_it_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "environments" / "color_patches"))
    model = tmp_path / "model"
    make_vision_model(model)
    env = vf.load_environment("color-patches", num_train=32, num_eval=1, by_tool=True)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    shown = []
    for row in env.get_dataset():
        # as the template writes the tool
        prompt = [{"role": "system", "content": "Tools:\nlook(): Look at the patch."}, *row["prompt"]]
        image = {"type": "image_url", "image_url": {"url": row["info"]["url"]}}
        seen = [{"role": "assistant", "content": call}, {"role": "tool", "content": [image]}]
        shown += [(prompt, call), ([*prompt, *seen], row["answer"])]
    show_answers(model, shown, steps=80, batch_size=8, learning_rate=2e-3)
    trainer = train(model, tmp_path / "run", env, max_steps=1, max_images=1, max_completion_length=64)

    plain, read = (
        Qwen3VLForConditionalGeneration.from_pretrained(model),
        Qwen2VLImageProcessorPil.from_pretrained(model),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)

    def log_probs_of(ids: list[int], image: Image.Image) -> torch.Tensor:
        """Return what transformers alone makes of each id but the first."""
        ids_1T = torch.tensor([ids])
        kinds = (ids_1T == plain.config.image_token_id).int()
        with torch.no_grad():
            logits = plain(input_ids=ids_1T, mm_token_type_ids=kinds, **read(image, return_tensors="pt")).logits
        return logits[0, :-1].log_softmax(-1)

    looked = [row for row in trainer.rows() if row[4]["images"][row[5]]]
    assert len(looked) >= 4
    for prompt_ids, ids, mask, sampled, batch, place in looked:
        (name,) = batch["images"][place]
        image = read_image((tmp_path / "run" / "images" / name).read_bytes())
        real, black = (
            log_probs_of(prompt_ids + ids, shown)[len(prompt_ids) - 1 :]
            for shown in (image, Image.new("RGB", image.size))
        )
        trained = torch.tensor(mask).bool()
        expected = real.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(expected[trained], torch.tensor(sampled)[trained], rtol=0, atol=1e-3)
        # the call comes before the image, and the answer behind it
        behind, differs = ids.index(plain.config.image_token_id), (real - black).abs().amax(1)
        assert differs[:behind].max() < 1e-4
        assert differs[behind:][trained[behind:]].max() > 1e-2
        said = tokenizer.decode([one for one, is_trained in zip(ids, mask, strict=True) if is_trained])
        assert said.startswith(f"{call}<|im_end|>")
        assert not any(text in said for text in ("<|im_start|>", "<|image_pad|>"))


@pytest.mark.slow
def test_the_tower_is_trained_where_that_is_asked_for(seeing_dir: Path, tmp_path: Path) -> None:
    trainer = train(seeing_dir, tmp_path / "run", train_vision_tower=True)
    assert trainer.largest_difference() < 1e-4
    moved = moved_from(seeing_dir, trainer)
    assert any(".visual." in name for name in moved)


# PEFT's own
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_is_trained_on_images(seeing_dir: Path, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    assert train(seeing_dir, tmp_path / "run", adapter=adapter).largest_difference() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"old_logprobs_batch_size": 3}, {"old_logprobs_on_rollout_device": True}])
def test_old_log_probs_see_the_images(seeing_dir: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = train(seeing_dir, tmp_path / "run", num_iterations=2, beta=0.1, max_steps=2, **options)
    assert trainer.logged("sampling/sampling_logp_difference/max")[0] < 1e-4
    assert trainer.logged("kl")[0] < 1e-6


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_stopped(seeing_dir: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_batches_ahead": 1,
        "drain_before_sync": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = train(seeing_dir, tmp_path / "whole", max_steps=4, **options)
    # the rows in flight name images, which lie in the run's directory
    train(seeing_dir, tmp_path / "run", max_steps=4, stop_at=3, **options)
    resumed = train(seeing_dir, tmp_path / "run", max_steps=4, resume=True, **options)
    for name, now in whole.model.named_parameters():
        # a tenth of one step: Adam makes 2e-5 of the rounding of log-probs that were sampled in other batches
        assert torch.allclose(now, dict(resumed.model.named_parameters())[name], rtol=0, atol=1e-4), name


@pytest.mark.slow
def test_a_run_takes_over_the_images_of_blocks_in_flight_from_another_directory(
    seeing_dir: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_batches_ahead": 1, "drain_before_sync": True, "max_steps": 3}
    train(seeing_dir, tmp_path / "one", stop_at=2, save_strategy="steps", save_steps=1, **options)
    other = train(seeing_dir, tmp_path / "other", resume=str(tmp_path / "one" / "checkpoint-1"), **options)
    assert other.state.global_step == 3
    held = [{path.name for path in (tmp_path / name / "images").iterdir()} for name in ("one", "other")]
    assert held[0] <= held[1]


@pytest.mark.slow
def test_a_server_of_its_own_takes_images_and_pushes(seeing_dir: Path, tmp_path: Path) -> None:
    loaded = load_model(seeing_dir, device="cpu", dtype="float32", max_model_len=None, with_images=True)
    with InProcessServer(loaded, threads=1, max_images=2) as server:
        trainer = train(seeing_dir, tmp_path / "run", rollout_device=None, url=server.url)
    assert trainer.largest_difference() < 1e-4


def test_a_server_that_takes_no_images_is_named_before_the_first_step(seeing_dir: Path, tmp_path: Path) -> None:
    loaded = load_model(seeing_dir, device="cpu", dtype="float32", max_model_len=None)
    with InProcessServer(loaded, threads=1) as server, pytest.raises(vf.Error, match="--max-images 1"):
        train(seeing_dir, tmp_path / "run", rollout_device=None, url=server.url)


def test_images_are_refused_where_the_run_takes_none(seeing_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigError, match="more images than max_images=0"):
        train(seeing_dir, tmp_path / "run", max_images=0)
    with pytest.raises(vf.ConfigError, match="more images than max_images=1"):
        train(seeing_dir, tmp_path / "run", max_images=1)


def test_a_model_without_a_processor_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(vf.ConfigError, match=r"max_images=2: model type 'qwen3' .* has no processor of images"):
        train(model_dir, tmp_path / "run", tiny_world.single_turn())


def test_a_processor_that_counts_otherwise_is_refused(tmp_path: Path) -> None:
    class Processor:
        token_id = 9

        def of_images(self, images: list[bytes]) -> Images:
            return Images({}, 2, b"")

    processor: Any = Processor()
    store = ImageStore(tmp_path, 1)
    images = RowImages(processor, store)
    name = store.keep(b"image")
    batch = {"images": [(name,)], "loss_mask": torch.tensor([[0, 0, 0, 1, 1]])}
    # the completion's own is no place of an image
    with pytest.raises(vf.ConfigError, match="has 3 tokens of images where the model's processor here makes 2"):
        images.inputs(torch.tensor([[9, 9, 9, 9, 1]]), batch)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_vision_tower": True, "max_images": 0}, "has no effect without max_images"),
        ({"env_ce_coef": 0.1}, "env_ce_coef=0.1 would train the policy to write what stands for images"),
        ({"teacher_url": "http://127.0.0.1:1/v1"}, "a teacher is asked by token ids"),
        (
            {"train_vision_tower": True, "adapter": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])},
            "the adapter has no weight there",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_settings_that_do_not_go_with_images_are_refused(
    settings: dict[str, Any], said: str, seeing_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(vf.ConfigError, match=said):
        train(seeing_dir, tmp_path / "run", **settings)


def test_rows_of_equal_ids_and_other_images_are_rows_of_their_own() -> None:
    first = Turn([1, 9, 2], [3], [0.0], [0], images=("red",))
    alike = Turn([1, 9, 2, 3, 9, 4], [5], [0.0], [0], images=("red", "blue"))
    other = Turn([1, 9, 2, 3, 9, 4, 5, 6], [7], [0.0], [0], images=("green", "blue"))
    rows, forks = rows_from_turns([first, alike, other])
    assert [row.images for row in rows] == [("red", "blue"), ("green", "blue")]
    assert forks == 1


def test_a_small_model_is_shown_answers_to_images(tmp_path: Path) -> None:
    make_vision_model(tmp_path)
    shown = [(one["prompt"], "red") for one in questions()]
    first, last = (show_answers(tmp_path, shown, steps=steps, batch_size=4) for steps in (1, 10))
    assert last < 0.8 * first


def test_an_image_part_holds_the_image_itself(tmp_path: Path) -> None:
    image = Image.frombytes("RGB", (3, 2), bytes(range(18)))
    image.save(tmp_path / "one.png")
    for given in (image, tmp_path / "one.png", (tmp_path / "one.png").read_bytes()):
        (url,) = image_urls([{"role": "user", "content": [vf.image_part(given)]}])
        assert read_image(image_bytes(url)).tobytes() == image.tobytes()


@pytest.mark.parametrize("url", ["https://example.org/red.png", "/etc/hostname", "file:///etc/hostname"])
def test_nothing_is_fetched_for_a_training_rollout(url: str, seeing_dir: Path, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    env = vf.SingleTurnEnv(
        dataset=[{"prompt": [{"role": "user", "content": [part]}], "answer": ""}] * 2,
        rubric=vf.Rubric(funcs=[tiny_world.vowels]),
    )
    with pytest.raises(vf.Error, match="nothing is fetched or read here"):
        train(seeing_dir, tmp_path / "run", env)
