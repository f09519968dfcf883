"""Loading the model and its tokenizer, and proving that the slot cache serves this model exactly."""

from __future__ import annotations

import inspect
import json
import os
import sys
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from verifiers.train.image_processor import ImageError, ImageProcessor, Images, towers
from verifiers.train.models import get_tokenizer, put_adapter
from verifiers_embedded.engine.batch import ActiveBatch, layer_kinds
from verifiers_embedded.engine.generation import GenerationRequest, Sequence
from verifiers_embedded.engine.prefixes import BLOCK
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters
from verifiers_embedded.errors import StartError

_PROBE_LENGTHS = (3, 9, 6, BLOCK + 1)
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
_GROUPS = {"": ("memory.max", "anon"), "memory": ("memory.limit_in_bytes", "total_rss")}
"""A hierarchy of control groups (version 2, version 1): its file with the limit, and its name for memory in use."""


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model, its tokenizer, and what the server needs to know of them."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    num_parameters: int
    cache_bytes_per_token: int
    cache_tokens: int
    state_bytes: int
    """Memory of the recurrent and convolutional states of one sequence, however long it is."""
    can_be_recorded: bool = False
    """A pass of one token a sequence waits for nothing, and leaves no state that a second one would go on from."""
    images: ImageProcessor | None = None
    """Reads prompts with images; None where the model was loaded without its tower."""

    def cache_tokens_beside(self, slots: int) -> int:
        """Return how many tokens' keys and values may be held beside the states of so many sequences.

        At least those of the longest sequence, which may come alone.
        """
        states = -(-slots * self.state_bytes // self.cache_bytes_per_token)
        return max(self.cache_tokens - states, self.max_model_len)


def model_class(config: Any, *, with_images: bool = False) -> Any:
    """Return the class of transformers that makes or loads the model of a config, with a head for text.

    Some multimodal models have a class for their text side alone, which is taken where no image comes.

    Raises StartError, which names the model type, where there is none, or this server cannot run it.
    """
    import transformers

    layer_kinds(config)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise StartError(
            f"model type {config.model_type!r} is an encoder, for its config does not set is_decoder; serve a "
            "decoder-only model"
        )
    makers: tuple[tuple[Any, Any], ...] = (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
        (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.AutoModelForImageTextToText),
    )
    for mapping, kind in makers[1 if with_images else 0 :]:
        if type(config) in mapping:
            if "position_ids" not in inspect.signature(mapping[type(config)].forward).parameters:
                raise StartError(
                    f"model type {config.model_type!r} takes no position_ids, so this server cannot run sequences of "
                    "different lengths of it at once; serve it with vLLM"
                )
            return kind
    if with_images:
        raise StartError(f"model type {config.model_type!r} takes no images; leave --max-images out")
    raise StartError(f"model type {config.model_type!r} does not generate text; serve a causal language model")


def drop_towers(model: Any) -> None:
    """Take out of a multimodal model what images and sound pass through: text alone comes here."""
    for name in towers(model):
        setattr(model.base_model, name, None)


def load_model(
    directory: Path,
    *,
    device: str,
    dtype: str,
    max_model_len: int | None,
    cache_bytes: int | None = None,
    with_images: bool = False,
) -> LoadedModel:
    """Load a Hugging Face model directory, freeze it and check the cached against the plain forward pass.

    Args:
        directory: holds config.json, weights and tokenizer files; or a LoRA adapter, which is merged into the base
            model that its adapter_config.json names.
        device: ``cpu``, ``cuda`` or ``auto`` (cuda where there is one).
        dtype: ``float32``, ``bfloat16`` or ``auto``: bfloat16 on cuda for a checkpoint in 16 bits, else
            float32.
        max_model_len: context in tokens; None takes the model's own, as far as its keys and values have room.
        cache_bytes: most memory of the key-value cache; None takes half of what is free once the model is loaded.
        with_images: load the tower of a multimodal model too.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    if not directory.is_dir():
        raise StartError(f"--model {str(directory)!r} is not a directory; give the folder that holds config.json")
    adapter = directory / "adapter_config.json"
    if not (adapter.is_file() or (directory / "config.json").is_file()):
        raise StartError(
            f"--model {str(directory)!r} holds no config.json and no adapter; save the model there first"
        )
    place = _device(device)
    base: Any = directory
    try:
        base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else directory
        config = transformers.AutoConfig.from_pretrained(base)
        kind = model_class(config, with_images=with_images)
        is_whole = (directory / "tokenizer_config.json").is_file()
        tokenizer = get_tokenizer(str(directory if is_whole else base))
        number = _dtype(dtype, place, config)
        found: dict[str, Any] = {}

        def load(kind: Any) -> Any:
            loaded, report = kind.from_pretrained(base, dtype=number, output_loading_info=True)
            found.update(report)
            return loaded

        if adapter.is_file():
            model = put_adapter(str(directory), config, load, kind).merge_and_unload()
        else:
            model = load(kind)
    except StartError:
        raise
    except Exception as error:
        # transformers raises dozens of kinds here; all mean that this directory cannot be served.
        of = f", an adapter of {base!r}" if base != directory else ""
        raise StartError(f"cannot load --model {str(directory)!r}{of}: {type(error).__name__}: {error}", 1) from error
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise StartError(
            f"--model {str(directory)!r} lacks {', '.join(missing[:4])}{more}, which would be random numbers; give a "
            "directory that was saved whole",
            1,
        )
    images = None
    if with_images:
        try:
            images = ImageProcessor.load(base, tokenizer, config)
        except ImageError as error:
            raise StartError(f"--max-images: {error}; leave it out to serve text") from error
    else:
        drop_towers(model)
    return prepared(model.to(place), tokenizer, max_model_len=max_model_len, cache_bytes=cache_bytes, images=images)


def prepared(
    model: Any,
    tokenizer: Any,
    *,
    max_model_len: int | None,
    cache_bytes: int | None = None,
    images: ImageProcessor | None = None,
) -> LoadedModel:
    """Freeze a model that is on its device, and check the cached against the plain forward pass; as `load_model`."""
    model = model.eval().requires_grad_(False)
    context = _context(model.config.get_text_config(), max_model_len)
    token_bytes, state_bytes, can_be_recorded = _checked_cache(model, context, images)
    room = available_bytes(model.device) // 2 if cache_bytes is None else cache_bytes
    if room < (needed := token_bytes * (max_model_len or 1) + state_bytes):
        raise StartError(
            f"the keys and values of one sequence of {max_model_len or 1} tokens take "
            f"{needed / 2**20:,.1f} MiB, and the key-value cache may take "
            f"{room / 2**20:,.1f} MiB (--kv-cache-mib, or half of the free memory); give a shorter "
            "--max-model-len or a larger --kv-cache-mib",
            1,
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        device=model.device,
        dtype=model.dtype,
        max_model_len=min(context, (room - state_bytes) // token_bytes),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        # nothing can follow what stands for an image and is none
        eos_ids=_eos_ids(model, tokenizer) | (frozenset() if images is None else {images.token_id}),
        num_parameters=model.num_parameters(),
        cache_bytes_per_token=token_bytes,
        cache_tokens=room // token_bytes,
        state_bytes=state_bytes,
        can_be_recorded=can_be_recorded,
        images=images,
    )


def check_cache(model: Any, max_model_len: int, images: ImageProcessor | None = None) -> tuple[int, int, bool]:
    """Compare logits of the cached path with those of plain passes.

    Returns:
        A token's and a sequence's bytes in the cache, and whether passes of one token can be recorded.

    Raises StartError where they differ, so this model reads its cache, mask or positions in a way of its own.
    """
    vocabulary = model.config.get_text_config().vocab_size
    lengths = [length for length in _PROBE_LENGTHS if length + 2 <= max_model_len] or [1]
    texts = [tuple((7 * place + 3 * length) % vocabulary for place in range(length)) for length in lengths]
    probes = [_probe(text) for text in texts]
    if images is not None:
        ids, read = images.gray()
        if len(ids) + 5 > max_model_len:
            raise StartError(
                f"a small image takes {len(ids)} tokens, and the context is {max_model_len}; give a longer "
                "--max-model-len"
            )
        # the last of a prompt is computed as sampled tokens are
        probes.append(_probe((*ids, 1, 1, 1), read))
    batch = ActiveBatch(model, 2 * len(probes), max_model_len, sys.maxsize, images=images)
    with torch.inference_mode():
        batch.add(probes)
        can_be_recorded = batch.can_be_recorded()
        found: list[float] = []
        for step in range(min(3, max_model_len)):
            if step == 2:
                # a next turn goes on by several tokens from what is kept
                batch.remember([True] * len(batch.sequences))
                ended = [item.tokens for item in batch.sequences if item.request.images is None]
                batch.add([_probe((*ids, 1, 1)) for ids in ended if BLOCK < len(ids) < max_model_len - 1])
            logits = batch.logits().float()
            for row, sequence in enumerate(batch.sequences):
                ids_1T = torch.tensor([sequence.tokens], device=model.device)
                held = sequence.request.images
                given = {} if images is None or held is None else images.inputs(ids_1T, [held], model.device)
                plain = model(input_ids=ids_1T, **given).logits[0, -1].float()
                found.append(((logits[row] - plain).abs().max() / (1.0 + plain.abs().max())).item())
                sequence.tokens.append((sequence.tokens[-1] + 1) % vocabulary)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
    if wrong := [value for value in found if not value <= tolerance]:
        raise StartError(
            f"the cached logits of model type {model.config.model_type!r} differ from the plain ones by a "
            f"relative {max(wrong):.2g}; this server cannot serve it exactly, so use vLLM for it",
            1,
        )
    return max(1, batch.bytes_per_token), batch.bytes_per_row, can_be_recorded


def _checked_cache(model: Any, max_model_len: int, images: ImageProcessor | None) -> tuple[int, int, bool]:
    try:
        return check_cache(model, max_model_len, images)
    except StartError:
        raise
    except Exception as error:
        # Models that read a cache or mask of their own kind fail here, each in its own way.
        raise StartError(
            f"model type {model.config.model_type!r} cannot be run by this server, use vLLM for it "
            f"({type(error).__name__}: {error})",
            1,
        ) from error


def _probe(text: tuple[int, ...], images: Images | None = None) -> Sequence:
    request = GenerationRequest(text, 4, SamplingParameters(seed=0), images=images)
    return Sequence(request, Future(), None, NoiseStream(0), list(text))


def _device(name: str) -> torch.device:
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise StartError(
            "--device cuda: torch sees no CUDA device; use --device cpu or install a CUDA build of torch"
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def _dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    stored = getattr(config, "dtype", None)
    return torch.bfloat16 if device.type == "cuda" and stored in (torch.bfloat16, torch.float16) else torch.float32


def _context(config: Any, wanted: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    reason = ""
    if short := [one["original_max_position_embeddings"] for one in kinds if one.get("rope_type") == "longrope"]:
        limit = min(*short, limit)
        reason = ": one longer sequence would change the positions (longrope) of all that are computed with it"
    if "local" in getattr(config, "attention_layers", ()):
        # GPT-Neo's own mask takes every row for the longest
        limit = min(limit, config.window_size)
        reason = ": one longer sequence would move the window of all that are shorter"
    if wanted is None:
        if limit is None:
            raise StartError("the model's config names no context length; give --max-model-len")
        return int(limit)
    if limit is not None and wanted > limit:
        raise StartError(
            f"--max-model-len {wanted} is more than the model's {limit} positions{reason}; give at most {limit}"
        )
    return wanted


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends a text: a base model's config and its chat tokenizer often name different ones."""
    generation = getattr(model, "generation_config", None)
    named = [getattr(of, "eos_token_id", None) for of in (generation, model.config.get_text_config())]
    named.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


# -- memory that this process may still take -----------------------------------------------------------------------


def available_bytes(device: torch.device) -> int:
    """Return the memory that is free on the device; on the CPU, what its control groups leave of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, cgroup_bytes())


def cgroup_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the control groups of this process leave it; page cache counts as free."""
    left = sys.maxsize
    try:
        entries = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for entry in entries:
        _, hierarchy, path = entry.split(":", 2)
        if hierarchy not in _GROUPS:
            continue
        limit, used = _GROUPS[hierarchy]
        group = PurePosixPath(path.lstrip("/"))
        # in a container the group is the root of what is mounted, whatever its path
        for folder in (groups / hierarchy / each for each in (group, *group.parents)):
            try:
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left = min(left, int((folder / limit).read_text()) - int(counts[used]))
            except (OSError, KeyError, ValueError):
                # no such group here, or no limit ("max")
                continue
    return max(left, 0)
