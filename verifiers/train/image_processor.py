"""What a model with a tower reads of images: their features, and the places of their tokens in a prompt.

The family's own processor of transformers computes both, on the server and for the trainer alike, so that both see
the same numbers. Its part for videos is left out: it needs torchvision, and no video comes here.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import itertools
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers.images import ImageStore

MOST_PIXELS = 2**24
"""Pixels of an image that is decoded; read off its header, so that a small file cannot take much memory."""

_KEPT_BYTES = 2**26
"""Of prompts with images that are kept as they were read."""

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")


class ImageError(ValueError):
    """An image cannot be read, or not by this model."""


def read_image(image: bytes) -> Any:
    """Return the first frame of an encoded image as PIL reads it, in RGB; raise ImageError for what is none."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened: Any = Image.open(io.BytesIO(image), formats=FORMATS)
            if opened.width * opened.height > MOST_PIXELS:
                raise ImageError(
                    f"an image of {opened.width} x {opened.height} pixels is larger than {MOST_PIXELS:,}; scale it "
                    "down"
                )
            # turned as transformers' own loader turns it, and laid on white
            ImageOps.exif_transpose(opened, in_place=True)
            if not opened.has_transparency_data:
                return opened.convert("RGB")
            opened = opened.convert("RGBA")
            laid = Image.new("RGB", opened.size, "white")
            laid.paste(opened, mask=opened.getchannel("A"))
            return laid
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        size = str(error).partition(" exceeds")[0]
        raise ImageError(f"an image is larger than {MOST_PIXELS:,} pixels; scale it down ({size})") from error
    except Exception as error:
        # decoders raise anything; of an unknown format, PIL shows the object that it was read from
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ImageError(
            f"{len(image):,} bytes that begin with {image[:8]!r} are no whole image{why}; give one of the formats "
            + ", ".join(FORMATS)
        ) from error


@dataclass(frozen=True, eq=False)
class Images:
    """The images of one prompt as a model reads them.

    Attributes:
        features: the processor's tensors, whose first dimension goes over images or their patches.
        tokens: how many of the prompt's tokens stand for them.
        digest: equal for equal images.
    """

    features: dict[str, Tensor]
    tokens: int
    digest: bytes

    @property
    def size(self) -> int:
        """Bytes of the features."""
        return sum(one.nbytes for one in self.features.values())


class ImageProcessor:
    """The processor of a model, for texts and images.

    Attributes:
        token: what stands for an image in a rendered prompt.
        token_id: the id that stands for each part of an image in a prompt's ids.
    """

    def __init__(self, processor: Any, token_id: int) -> None:
        self.processor, self.token_id = processor, token_id
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bytes], tuple[list[int], Images]] = {}
        self.token: str = processor.image_token
        probe = self._call(self.token * 2, [_gray()] * 2)
        shape = probe["input_ids"].shape
        self._by_token = [
            name for name, one in probe.items() if one.shape == shape and name not in ("input_ids", "attention_mask")
        ]
        # some models read one list of images a prompt; they are laid out in one list for all
        self._in_lists = {name for name, one in probe.items() if one.shape[0] == 1}

    @property
    def reader(self) -> str:
        """What computes the features; two processes with different ones may see different pixels."""
        from transformers import __version__

        minor = __version__.rpartition(".")[0]
        return f"{type(self.processor.image_processor).__name__} of transformers {minor}"

    @classmethod
    def load(
        cls, name_or_path: str | Path, tokenizer: Any, config: Any, revision: str | None = None
    ) -> ImageProcessor:
        """Load the processor beside a model's files; raise ImageError where it has none for images."""
        from transformers import AutoImageProcessor
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
        from transformers.utils import cached_file

        try:
            kind: Any = PROCESSOR_MAPPING[type(config)]

            class ForImages(kind):
                def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
                    """Take None for the parts that are left out."""

            parts = inspect.signature(kind.__init__).parameters
            path = cached_file(
                str(name_or_path),
                "processor_config.json",
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
            )
            given = json.loads(Path(path).read_text()) if path else {}
            options = {name: value for name, value in given.items() if name in parts and not isinstance(value, dict)}
            options |= dict.fromkeys(ForImages.get_attributes())
            image_processor = AutoImageProcessor.from_pretrained(str(name_or_path), revision=revision or "main")
            # tokenizers are not made for several threads
            options |= {"image_processor": image_processor, "tokenizer": copy.deepcopy(tokenizer)}
            # a processor's own may be the mark alone, which it writes more around
            return cls(ForImages(**options), config.image_token_id)
        except Exception as error:
            raise ImageError(
                f"model type {config.model_type!r} in {str(name_or_path)!r} has no processor of images that can be "
                f"used here ({type(error).__name__}: {error})"
            ) from error

    def read(self, text: str, images: Sequence[bytes]) -> tuple[list[int], Images]:
        """Return the ids of a rendered prompt, with as many for each image as it takes, and the images.

        Raises ImageError for images that cannot be read, or of another number than the prompt has places for.
        """
        ids, read = self._read(text, images)
        runs = [is_place for is_place, _ in itertools.groupby(ids, self.token_id.__eq__)].count(True)
        # where a model is told the kind of each token, it tells images apart by what stands between them
        are_apart = runs == len(images) or not self._by_token
        with self._lock:
            said = self.processor.tokenizer.encode(text.replace(self.token, ""), add_special_tokens=False)
        if not are_apart or self.token_id in said:
            raise ImageError(
                f"the prompt's text holds the mark of images ({self.token}) or what stands for their parts; leave it "
                "out of texts, or serve a model whose chat template shows the images of this message"
            )
        return list(ids), read

    def of_images(self, images: Sequence[bytes]) -> Images:
        """Return images without the prompt that holds them."""
        return self._read(self.token * len(images), images)[1]

    def _read(self, text: str, images: Sequence[bytes]) -> tuple[list[int], Images]:
        digest = hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in images)).digest()
        with self._lock:
            # the rollouts of a group, and their rows, show the same
            found = self._kept.pop((text, digest), None) or self._read_again(text, images, digest)
            self._kept[text, digest] = found
            while sum(read.size for _, read in self._kept.values()) > _KEPT_BYTES and len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
        return found

    def _read_again(self, text: str, images: Sequence[bytes], digest: bytes) -> tuple[list[int], Images]:
        if (places := text.count(self.token)) != len(images):
            raise ImageError(
                f"the prompt has {places} places for images ({self.token}) and {len(images)} images; leave the mark "
                "out of texts, or serve a model whose chat template shows images"
            )
        try:
            found = self._call(text, [read_image(one) for one in images])
        except ImageError:
            raise
        except ValueError as error:
            raise ImageError(f"the model's processor refused an image ({error}); give it another size") from error
        ids: list[int] = found.pop("input_ids")[0].tolist()
        features = {
            name: one[0] if name in self._in_lists else one
            for name, one in found.items()
            if name not in (*self._by_token, "attention_mask")
        }
        return ids, Images(features, ids.count(self.token_id), digest)

    def gray(self) -> tuple[list[int], Images]:
        """Return the ids and the features of a prompt that is one gray image."""
        file = io.BytesIO()
        _gray().save(file, "PNG")
        return self.read(self.token, [file.getvalue()])

    def inputs(self, ids_RT: Tensor, images: Sequence[Images | None], device: torch.device) -> dict[str, Tensor]:
        """Return what a model is given beside the ids of rows that hold images; nothing where no row does."""
        held = [one for one in images if one is not None]
        if not held:
            return {}
        places_RT = (ids_RT == self.token_id).long()
        inputs = {name: _joined([one.features[name] for one in held]).to(device) for name in held[0].features}
        inputs |= {name: inputs[name][None] for name in self._in_lists.intersection(inputs)}
        return inputs | {name: places_RT.to(device) for name in self._by_token}

    def _call(self, text: str, images: list[Any]) -> dict[str, Tensor]:
        return dict(self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))


class RowImages:
    """The images of training rows: from the run's store, as the policy's model reads them.

    Attributes:
        store: where rows' names of images lead.
        body: the model's, whose `get_rope_index` tells the positions of rows that share what they begin with.
    """

    def __init__(self, processor: ImageProcessor, store: ImageStore, body: Any = None) -> None:
        self.processor, self.store, self.body = processor, store, body

    def inputs(self, ids_RT: Tensor, batch: Mapping[str, Any], layout: Any = None) -> dict[str, Tensor]:
        """Return what a model is given for the images of a micro-batch; nothing where no row has one.

        Args:
            ids_RT: prompts and completions.
            batch: `images`, the names of each row's, and `loss_mask`, 1 on sampled tokens.
            layout: of rows that share what they begin with; see `SharedRows`.

        Raises:
            ConfigError: the server counted other tokens for a row's images than this processor does.
        """
        shown = batch.get("images", ())
        # the rows of a group show the same
        read = {names: self._read(names) for names in dict.fromkeys(shown) if names}
        images = [read.get(names) for names in shown]
        if not any(images):
            return {}
        sampled_RT = batch["loss_mask"].to(ids_RT.device) > 0
        # sampled, it is a token as any other, and the last of its answer: what it is to the model does not matter
        ids_RT = ids_RT.masked_fill(sampled_RT & (ids_RT == self.processor.token_id), 0)
        counts = (ids_RT == self.processor.token_id).sum(1).tolist()
        for count, one in zip(counts, images, strict=True):
            if count != (0 if one is None else one.tokens):
                raise ConfigError(
                    f"the server's prompt has {count} tokens of images where the model's processor here makes "
                    f"{0 if one is None else one.tokens}: they do not read images alike; give both the same "
                    "preprocessor_config.json and version of transformers."
                )
        inputs = self.processor.inputs(ids_RT, images, ids_RT.device)
        if layout is None:
            return {"input_ids": ids_RT, **inputs}
        mask_RT = batch["attention_mask"].to(ids_RT.device)
        asked = {name: inputs[name] for name in ("image_grid_thw", "mm_token_type_ids")}
        positions_3RT, _ = self.body.get_rope_index(input_ids=ids_RT, attention_mask=mask_RT, **asked)
        source_N = layout.sources(mask_RT)
        ids_1N = ids_RT.flatten()[source_N][None]
        laid = self.processor.inputs(ids_1N, self._laid_out(layout, ids_1N[0], batch["images"]), ids_RT.device)
        return {"input_ids": ids_1N, "position_ids": positions_3RT.flatten(1)[:, None, source_N], **laid}

    def _read(self, names: Sequence[str]) -> Images:
        return self.processor.of_images([self.store.read(name) for name in names])

    def _laid_out(self, layout: Any, ids_N: Tensor, names: Sequence[Sequence[str]]) -> list[Images]:
        """Return each image in the order of the layout: once where rows share it."""
        read = {name: self._read([name]) for name in dict.fromkeys(itertools.chain(*names))}
        ordered: list[Images] = []
        for group in layout.groups:
            shown = [[read[name] for name in names[row]] for row in group.rows]
            left = int((ids_N[group.start : group.start + group.prefix] == self.processor.token_id).sum())
            shared = 0
            while left > 0:
                left -= shown[0][shared].tokens
                shared += 1
            ordered += shown[0][:shared]
            ordered += [image for row in shown for image in row[shared:]]
        return ordered


def towers(model: Any) -> dict[str, Any]:
    """Return the parts of a multimodal model's body that images and sound pass through, by their names in it."""
    decoder = model.get_decoder()
    beside = {
        name: part
        for name, part in model.base_model.named_children()
        if all(module is not decoder for module in part.modules())
    }
    # of text models it is the body itself; a head of that name is in no part of it
    return {} if len(beside) == len([*model.base_model.children()]) else beside


def _joined(features: Sequence[Tensor]) -> Tensor:
    """Join features of several prompts' images; smaller images are filled up with zeros, as in one prompt."""
    sizes = [max(dims) for dims in zip(*(one.shape[1:] for one in features), strict=True)]
    joined = features[0].new_zeros(sum(map(len, features)), *sizes)
    for place, one in zip(joined.split([*map(len, features)]), features, strict=True):
        place[(slice(None), *map(slice, one.shape[1:]))] = one
    return joined


def _gray() -> Any:
    from PIL import Image

    # wider than high, so that positions tell the two apart
    return Image.new("RGB", (96, 64), (128, 128, 128))
