"""The sequences in the slots, the passes of the model over them, and their cache. Runs in the engine thread only."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from collections.abc import Sequence as Listed
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from verifiers.train.cpu_linear import fuse_gates, turn_weights, use_onednn
from verifiers.train.image_processor import ImageProcessor, Images
from verifiers_embedded.engine.attention import Prompts, filled_up, install, laid_out, row_groups
from verifiers_embedded.engine.cache import ATTENTION_KINDS, NOTHING_KEPT, STATE_KINDS, SlotCache
from verifiers_embedded.engine.constraints import Guide, forbid
from verifiers_embedded.engine.decoding import FixedPass, Record, refuses_waits, upload
from verifiers_embedded.engine.generation import Sequence
from verifiers_embedded.engine.prefixes import BLOCK, PrefixStore
from verifiers_embedded.engine.sampling import BatchSampler, Draw
from verifiers_embedded.engine.scoring import Prompt, PromptScore, score_prompts, scored_together
from verifiers_embedded.errors import BrokenLogits, StartError

PREFILL_TOKENS = 8192
"""Most tokens (with padding) of one prefill pass, unless a single prompt is longer."""

IMAGE_BYTES = 2**26
"""Most bytes of images' features in one pass, unless a single prompt has more: a tower takes several times that."""

MASK_CELLS = 16 * 2**20
"""Most cells of the attention mask of a pass that extends kept keys: queries times columns."""

ROWS_APART = 16
"""Rows are held in order of length by blocks of at least so many, and of a quarter of the slots."""

_OWN_POSITIONS = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_NOT_SERVED = {
    # in 16 bits that is lost in the rounding which the check at start allows
    "jamba": "goes on from a kept turn by one token alone",
    **dict.fromkeys(_OWN_POSITIONS, "counts positions from the id of its padding token"),
    **dict.fromkeys(("idefics", "kosmos-2"), "takes no prompt without an image"),
    "paligemma": "sees prompts in both directions",
    "minimax": "takes no cache but its own",
    "recurrent_gemma": "keeps its state outside of the cache",
    "openai-gpt": "has no cache",
    "blt": "reads bytes in patches",
}
_WITHOUT_WINDOW = ("moshi", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
"""Types of text models that read no `sliding_window`, though their configs have one."""


class ActiveBatch:
    """A batch of up to `slots` sequences, row i of the cache belonging to ``sequences[i]``.

    A prompt's last token is not prefilled: it goes through the decode pass like every token after it, so that
    all logits that are sampled from come from one place. The arguments are those of `Engine`.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        max_model_len: int,
        prefix_bytes: int = 0,
        record: Record | None = None,
        cache_tokens: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        kinds, self._windows = layer_kinds(model.config)
        self._has_states = not set(STATE_KINDS).isdisjoint(kinds)
        self.sequences: list[Sequence] = []
        self.prefixes = PrefixStore(prefix_bytes, whole=self._has_states)
        self._model, self._images = model, images
        self._body = model.base_model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        fixed = record is not None
        self._fixed_pass = None
        if record is not None:
            self._fixed_pass = FixedPass(self._one_token, record)
        self._by_length = install(model) and not fixed
        use_onednn(model)
        turn_weights(model)
        fuse_gates(model)
        self._packs_prompts = self._by_length and not self._has_states and set(self._windows.values()) == {None}
        self._block = max(ROWS_APART, -(-slots // 4)) if self._by_length else slots
        most = slots * max_model_len if cache_tokens is None else cache_tokens
        self._cache = SlotCache(kinds, slots, max_model_len, most, fixed=fixed)
        # transformers 5.24 has another name for it
        self._cache_name = (
            "cache" if "cache" in inspect.signature(self._body.forward).parameters else "past_key_values"
        )
        self._passed_cache = {self._cache_name: self._cache}
        self._sampler: BatchSampler | None = None
        self._guides: list[tuple[int, Guide]] = []

    @property
    def allocated(self) -> tuple[int, int]:
        return self._cache.allocated

    @property
    def bytes_per_token(self) -> int:
        """Key-value memory of one token in bytes; 0 while no sequence is held."""
        return self._cache.bytes_per_token

    @property
    def bytes_per_row(self) -> int:
        """Memory of one sequence's states in bytes, as `bytes_per_token`."""
        return self._cache.bytes_per_row

    def fits(self, sequences: Listed[Sequence], tokens: int) -> bool:
        """Return whether the cache may grow to hold these sequences and so many more tokens of each."""
        return self._cache.fits(len(sequences), max(len(item.tokens) for item in sequences) + tokens)

    def can_be_recorded(self) -> bool:
        """Try whether a pass of one token waits for nothing and can be done twice, before other threads use a GPU."""
        if self._has_states or self._device.type != "cuda":
            return not self._has_states
        try:
            with refuses_waits():
                self.logits()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return False
        return True

    def add(self, sequences: Listed[Sequence]) -> None:
        """Give each sequence a row and compute the cache of all its tokens but the last."""
        held = len(self.sequences)
        rows: list[int | None] = [*range(held), *[None] * len(sequences)]
        columns = max(len(item.tokens) for item in (*self.sequences, *sequences))
        self._cache.reserve(len(rows), columns)
        self._place([*self.sequences, *sequences], rows)
        fresh = set(map(id, sequences))
        self._prefill([row for row, item in enumerate(self.sequences) if id(item) in fresh])

    def score(self, prompts: Listed[Prompt]) -> list[PromptScore | BrokenLogits]:
        """Score as many of the first prompts as go into one pass."""
        together = prompts[: scored_together(self._model, prompts)]
        return score_prompts(self._model, together, self._cache_name)

    def keep_only(self, keep: Listed[bool]) -> None:
        """Free the rows whose flag is false; other rows move into the gaps."""
        rows: list[int | None] = [row for row, kept in enumerate(keep) if kept]
        if rows:
            self._place([self.sequences[row] for row in rows if row is not None], rows)
        else:
            self.sequences, self._sampler = [], None
            self._clear()

    def _place(self, sequences: list[Sequence], rows: Listed[int | None]) -> None:
        """Give the sequences their rows from now on; `rows` are those that hold their keys."""
        lengths = [len(item.tokens) for item in sequences]
        targets = arranged(lengths, rows, self._block)
        moves = [
            (row, target, length)
            for row, target, length in zip(rows, targets, lengths, strict=True)
            if row is not None and row != target
        ]
        placed: dict[int, Sequence] = dict(zip(targets, sequences, strict=True))
        self.sequences = [placed[row] for row in range(len(sequences))]
        self._sampler = None
        if moves:
            sources, targets, lengths = (list(column) for column in zip(*moves, strict=True))
            self._cache.move(sources, targets, min(max(lengths), self.allocated[1]), self._device)

    def remember(self, finished: Listed[bool]) -> None:
        """Keep the keys and values of the rows whose flag is true, for prompts that begin like them."""
        if not self.prefixes.max_bytes:
            return
        for row, ended in enumerate(finished):
            # the last token was sampled, and never passed through the model
            tokens = self.sequences[row].tokens[:-1]
            # ids do not tell which image they stand for
            if ended and len(tokens) >= BLOCK and self.sequences[row].request.images is None:
                self.prefixes.keep(tokens, self._cache.copy_out(row, len(tokens)))

    def recompute(self) -> None:
        """Compute all keys and values again from the token ids, under the weights the model has now."""
        self.prefixes.clear()
        self._clear()
        self._prefill(range(len(self.sequences)))

    def _clear(self) -> None:
        self._cache.clear(is_idle=not self.sequences)
        if self._fixed_pass is not None:
            self._fixed_pass.forget_others(self._cache.place)

    def step(self) -> Draw:
        if self._sampler is None:
            self._sampler = BatchSampler([item.request.sampling for item in self.sequences], self._device)
            rows = enumerate(self.sequences)
            self._guides = [(row, item.guide) for row, item in rows if item.guide is not None]
        logits = self.logits()
        if self._guides:
            forbid(logits, self._guides)
        return self._sampler.sample(logits, [item.noise for item in self.sequences])

    def logits(self) -> torch.Tensor:
        """Return the model's logits after each sequence's last token, (rows, vocabulary); stores its keys."""
        lengths = [len(item.tokens) for item in self.sequences]
        tokens = [item.tokens[-1] for item in self.sequences]
        places = [length - 1 for length in lengths]
        positions = [place + item.shift for place, item in zip(places, self.sequences, strict=True)]
        self._cache.reserve(len(lengths), max(lengths))
        if self._fixed_pass is not None and self._cache.ready:
            # rows without a sequence write to a column that a prompt writes to before it is read
            rows, columns = self._cache.shape_of_pass(len(lengths), max(lengths))
            empty = [0] * (rows - len(lengths))
            last = upload([tokens + empty, places + empty, positions + empty], self._device)
            return self._fixed_pass(last, columns, self._cache.place)[: len(lengths)]
        columns = self._filled_up(max(lengths))
        with laid_out(row_groups(lengths, columns, self._dtype) if self._by_length else None):
            return self._one_token(upload([tokens, places, positions], self._device), columns)

    def _one_token(self, last: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the logits after ids in places, at positions, `last` (3, rows); waits for nothing."""
        ids, places, positions = last
        self._cache.begin_decode(places, columns)
        output = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(places[:, None], columns),
            **self._passed_cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _filled_up(self, columns: int) -> int:
        return min(filled_up(columns, self._dtype), self.allocated[1]) if self._by_length else columns

    def _masks(self, positions_NL: torch.Tensor, columns: int) -> Any:
        """Return what each query may see: the columns up to its own position, within the layer's window.

        One mask, or one for each kind of layer; None for those that attend to nothing.
        """
        column_ids = torch.arange(columns, device=self._device)
        ahead = column_ids > positions_NL[..., None]
        masks: dict[str, torch.Tensor | None] = dict.fromkeys(STATE_KINDS) if self._has_states else {}
        for kind, window in self._windows.items():
            hidden = ahead if window is None else ahead | (column_ids <= positions_NL[..., None] - window)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _prefill(self, rows: Listed[int]) -> None:
        """Fill the cache of the given rows, with one computation for all rows that share a prompt."""
        self._cache.reserve(len(self.sequences), max((len(item.tokens) for item in self.sequences), default=0))
        texts: dict[tuple[int, ...], list[int]] = {}
        with_images: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        for row in rows:
            prefix, images = tuple(self.sequences[row].tokens[:-1]), self.sequences[row].request.images
            if images is None:
                texts.setdefault(prefix, []).append(row)
            else:
                with_images.setdefault((images.digest, prefix), []).append(row)
        self._begin_with_images(with_images.values())
        if unread := texts.pop((), []):
            self._cache.begin_rows(unread, self._device)
        self._go_on_from_kept(texts)
        prefill = self._packed_pass if self._packs_prompts else self._padded_pass
        group: list[list[int]] = []
        held = 0
        for rows in sorted(texts.values(), key=self._length):
            length = self._length(rows)
            held += length
            # a state would go on through padding
            is_apart = self._has_states and bool(group) and length > self._length(group[0])
            pass_tokens = held if self._packs_prompts else (len(group) + 1) * length
            if group and (is_apart or pass_tokens > PREFILL_TOKENS):
                prefill(group)
                group, held = [], length
            group.append(rows)
        if group:
            prefill(group)

    def _length(self, rows: list[int]) -> int:
        """Return how many tokens are computed before the first is sampled, of rows that have one prompt."""
        return len(self.sequences[rows[0]].tokens) - 1

    def _begin_with_images(self, prompts: Iterable[list[int]]) -> None:
        """Fill the cache of rows whose prompts have images; those of one length and one form go in one pass."""
        groups: dict[Any, list[tuple[list[int], Images]]] = {}
        for rows in prompts:
            images = self.sequences[rows[0]].request.images
            assert images is not None
            forms = tuple((name, feature.shape[1:]) for name, feature in images.features.items())
            groups.setdefault((self._length(rows), forms), []).append((rows, images))
        for alike in groups.values():
            largest = max(images.size for _, images in alike)
            count = max(1, min(PREFILL_TOKENS // max(1, self._length(alike[0][0])), IMAGE_BYTES // largest))
            for start in range(0, len(alike), count):
                self._image_pass(*zip(*alike[start : start + count], strict=True))

    def _go_on_from_kept(self, rows_of: dict[tuple[int, ...], list[int]]) -> None:
        """Fill the rows whose prompt begins like a finished sequence, and take them out of `rows_of`."""
        starts = []
        kept = {prompt: found for prompt in rows_of if (found := self.prefixes.find(prompt)) is not None}
        for prompt, (prefix, shared) in kept.items():
            self._cache.copy_in(rows_of[prompt][0], shared, prefix.states)
            if shared < len(prompt):
                starts.append((rows_of[prompt][0], shared))
        self._extend(starts)
        for prompt in kept:
            first, *others = rows_of.pop(prompt)
            if others:
                self._cache.move([first] * len(others), others, len(prompt), self._device)

    def _extend(self, starts: list[tuple[int, int]]) -> None:
        """Compute keys and values behind those that rows already have: (row, number of tokens it has)."""
        if not starts:
            return
        columns = self._filled_up(max(len(self.sequences[row].tokens) for row, _ in starts))
        most = max(1, MASK_CELLS // columns)
        waiting = sorted(starts, key=lambda item: len(self.sequences[item[0]].tokens) - item[1])
        while waiting:
            group: list[tuple[int, int]] = []
            length = 0
            while waiting:
                row, start = waiting[0]
                longer = min(most, len(self.sequences[row].tokens) - 1 - start)
                if group and (self._has_states or (len(group) + 1) * longer > min(most, PREFILL_TOKENS)):
                    break
                group.append(waiting.pop(0))
                length = longer
            self._extend_pass(group, length, columns)
            # a prompt too long for one pass continues in the next
            left = [(row, start + length) for row, start in group]
            waiting[:0] = [(row, start) for row, start in left if start < len(self.sequences[row].tokens) - 1]

    def _extend_pass(self, group: list[tuple[int, int]], length: int, columns: int) -> None:
        ids, places = [], []
        for row, start in group:
            tokens = self.sequences[row].tokens
            new = tokens[start : min(start + length, len(tokens) - 1)]
            padding = length - len(new)
            # Padding goes to the column of the last token, which the decode pass writes before it reads.
            ids.append(new + [tokens[-1]] * padding)
            places.append([*range(start, start + len(new)), *[len(tokens) - 1] * padding])
        positions = upload(places, self._device)
        self._cache.begin_extend([row for row, _ in group], positions, columns)
        self._body(
            input_ids=upload(ids, self._device),
            position_ids=positions,
            attention_mask=self._masks(positions, columns),
            **self._passed_cache,
            use_cache=True,
        )

    def _packed_pass(self, prompts: list[list[int]]) -> None:
        """Compute the keys and values of whole prompts, in order of their length, end to end in one row."""
        ids: list[int] = []
        lengths = [self._length(rows) for rows in prompts]
        cells: list[int] = []
        source: list[int] = []
        for rows, length in zip(prompts, lengths, strict=True):
            for row in rows:
                cells.extend(range(row * self.allocated[1], row * self.allocated[1] + length))
                source.extend(range(len(ids), len(ids) + length))
            ids.extend(self.sequences[rows[0]].tokens[:-1])
        self._cache.begin_prompts(upload(cells, self._device), upload(source, self._device))
        # The mask only keeps the model from making one: the layout says what each token may see.
        with laid_out(Prompts(tuple((len(list(run)), length) for length, run in groupby(lengths)))):
            self._body(
                input_ids=upload([ids], self._device),
                position_ids=upload([[place for length in lengths for place in range(length)]], self._device),
                attention_mask=torch.zeros((1, 1, 1, 1), dtype=self._dtype, device=self._device),
                **self._passed_cache,
                use_cache=True,
            )

    def _image_pass(self, prompts: Listed[list[int]], images: Listed[Images]) -> None:
        """Compute the keys and values of prompts with images, all of one length."""
        assert self._images is not None
        ids = upload([self.sequences[rows[0]].tokens[:-1] for rows in prompts], self._device)
        given = self._images.inputs(ids, images, self._device)
        if hasattr(self._body, "get_rope_index"):
            # the model would keep the shifts for its next pass, which may be another thread's
            asked = {name: given[name] for name in ("image_grid_thw", "mm_token_type_ids")}
            given["position_ids"], shifts = self._body.get_rope_index(input_ids=ids, **asked)
            for rows, shift in zip(prompts, shifts.flatten().tolist(), strict=True):
                for row in rows:
                    self.sequences[row].shift = shift
        self._whole_pass(prompts, ids, given)

    def _padded_pass(self, prompts: list[list[int]]) -> None:
        """Compute the keys and values of whole prompts, in order of their length, a row each."""
        length = self._length(prompts[-1])
        # Padding stands on the right, where the causal mask hides it; its own keys are overwritten or masked
        # later.
        prefixes = [self.sequences[rows[0]].tokens[:-1] for rows in prompts]
        ids = upload([prefix + prefix[:1] * (length - len(prefix)) for prefix in prefixes], self._device)
        places = torch.arange(length, device=self._device)
        self._whole_pass(prompts, ids, {"position_ids": places[None].expand(len(prompts), -1)})

    def _whole_pass(self, prompts: Listed[list[int]], ids: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
        length = ids.shape[1]
        places = torch.arange(length, device=self._device)
        source = [index for index, rows in enumerate(prompts) for _ in rows]
        row_ids, prompt_ids = upload([[row for rows in prompts for row in rows], source], self._device)
        cells = row_ids[:, None] * self.allocated[1] + places
        tokens = prompt_ids[:, None] * length + places
        self._cache.begin_prompts(cells.flatten(), tokens.flatten(), row_ids, prompt_ids)
        # The head is left out: no logits are needed here, and over a prompt they are the largest tensor of
        # all.
        self._body(
            input_ids=ids,
            **given,
            **self._passed_cache,
            use_cache=True,
        )


def arranged(lengths: Listed[int], rows: Listed[int | None], block: int) -> list[int]:
    """Order the rows by falling length from block to block, and as they are now within one, so that few move.

    Sequences grow alike, so their order holds until one comes or goes. `rows` are their places now; None for new.
    """
    count = len(lengths)
    order = sorted(range(count), key=lambda item: (-lengths[item], count if rows[item] is None else rows[item]))
    targets = [0] * count
    for start in range(0, count, block):
        members = order[start : start + block]
        block_rows = range(start, start + len(members))
        staying = {rows[item] for item in members if rows[item] in block_rows}
        free = iter([row for row in block_rows if row not in staying])
        for item in members:
            row = rows[item]
            targets[item] = row if row is not None and row in staying else next(free)
    return targets


def layer_kinds(config: Any) -> tuple[list[str], dict[str, int | None]]:
    """Return the kind of each of the model's layers, and of each kind of attention its window in tokens (None: all).

    Raises StartError, which names the model type, for kinds that this server has no cache for.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"model type {config.model_type!r} has an encoder; serve a decoder-only model")
    if (reason := _NOT_SERVED.get(config.model_type)) is not None:
        raise StartError(
            f"model type {config.model_type!r} {reason}, so this server cannot run it; serve it with vLLM"
        )
    text = config.get_text_config()
    kinds, options = get_layer_types_and_kwargs(text)
    if text.model_type in _WITHOUT_WINDOW:
        kinds, options = ["full_attention"] * len(kinds), [{} for _ in kinds]
    strange = sorted(set(kinds).difference(ATTENTION_KINDS, STATE_KINDS, [NOTHING_KEPT]))
    if strange:
        raise StartError(
            f"model type {config.model_type!r} has layers of kind {', '.join(strange)}; this server supports "
            f"{', '.join((*ATTENTION_KINDS, *STATE_KINDS))}, so serve such a model with vLLM"
        )
    windows = {kind: option.get("sliding_window") for kind, option in zip(kinds, options, strict=True)}
    return kinds, {kind: windows[kind] for kind in ATTENTION_KINDS if kind in windows}
