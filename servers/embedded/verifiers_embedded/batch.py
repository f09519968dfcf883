"""The sequences in the slots, the passes of the model over them, and their cache. Runs in the engine thread
only.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch

from verifiers_embedded.cache import SlotCache
from verifiers_embedded.constraints import Guide, forbid
from verifiers_embedded.errors import StartError
from verifiers_embedded.generation import Sequence
from verifiers_embedded.prefixes import BLOCK, PrefixStore
from verifiers_embedded.sampling import BatchSampler, Draw

PREFILL_TOKENS = 8192
"""Most tokens (with padding) of one prefill pass, unless a single prompt is longer."""

MASK_CELLS = 16 * 2**20
"""Most cells of the attention mask of a pass that goes on from kept keys: queries times columns."""

ATTENTION_KINDS = ("full_attention", "sliding_attention")


class ActiveBatch:
    """Up to `slots` sequences, row i of the cache belonging to ``sequences[i]``.

    A prompt's last token is not prefilled: it goes through the decode pass like every token after it, so that
    all logits that are sampled from come from one place.

    Args:
        model: a causal language model of transformers, frozen and in eval mode.
        slots: most sequences at once.
        max_model_len: most tokens of one sequence, prompt and completion together.
        prefix_bytes: memory for keys and values of finished sequences, which later prompts may go on from.
    """

    def __init__(self, model: Any, slots: int, max_model_len: int, prefix_bytes: int = 0) -> None:
        self.sequences: list[Sequence] = []
        self.prefixes = PrefixStore(prefix_bytes)
        self._model = model
        self._body = model.base_model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._windows = attention_windows(model.config)
        config = model.config.get_text_config()
        self._cache = SlotCache(config.num_hidden_layers, slots, max_model_len)
        self._sampler: BatchSampler | None = None
        self._guides: list[tuple[int, Guide]] = []

    @property
    def allocated(self) -> tuple[int, int]:
        """Cache rows and columns that memory is held for."""
        return self._cache.allocated

    @property
    def bytes_per_token(self) -> int:
        """Key-value memory of one token in bytes; 0 while no sequence is held."""
        return self._cache.bytes_per_token

    def add(self, sequences: Listed[Sequence]) -> None:
        """Gives each sequence a row and computes the cache of all its tokens but the last."""
        first = len(self.sequences)
        self.sequences.extend(sequences)
        self._sampler = None
        self._prefill(range(first, len(self.sequences)))

    def keep_only(self, keep: Listed[bool]) -> None:
        """Frees the rows whose flag is false; the last rows move into the gaps."""
        survivors = sum(keep)
        gaps = [row for row in range(survivors) if not keep[row]]
        movers = [row for row in range(survivors, len(keep)) if keep[row]]
        self._sampler = None
        for gap, mover in zip(gaps, movers, strict=True):
            self.sequences[gap] = self.sequences[mover]
        del self.sequences[survivors:]
        if not self.sequences:
            self._cache.clear()
        elif gaps:
            columns = max(len(self.sequences[gap].tokens) for gap in gaps)
            self._cache.move(movers, gaps, min(columns, self.allocated[1]), self._device)

    def remember(self, finished: Listed[bool]) -> None:
        """Keeps the keys and values of the rows whose flag is true, for prompts that begin like them."""
        if not self.prefixes.max_bytes:
            return
        for row, ended in enumerate(finished):
            # the last token was sampled, and never passed through the model
            tokens = self.sequences[row].tokens[:-1]
            if ended and len(tokens) >= BLOCK:
                self.prefixes.keep(tokens, self._cache.copy_out(row, len(tokens)))

    def recompute(self) -> None:
        """Computes all keys and values anew from the token ids, under the weights the model has now."""
        self.prefixes.clear()
        self._cache.clear()
        self._prefill(range(len(self.sequences)))

    def step(self) -> Draw:
        """Samples the next token of every sequence."""
        if self._sampler is None:
            self._sampler = BatchSampler([item.request.sampling for item in self.sequences], self._device)
            rows = enumerate(self.sequences)
            self._guides = [(row, item.guide) for row, item in rows if item.guide is not None]
        logits = self.logits()
        if self._guides:
            forbid(logits, self._guides)
        return self._sampler.sample(logits, [item.uniforms.next() for item in self.sequences])

    def logits(self) -> torch.Tensor:
        """The model's logits after each sequence's last token, (rows, vocabulary); stores its keys."""
        lengths = [len(item.tokens) for item in self.sequences]
        columns = max(lengths)
        self._cache.reserve(len(lengths), columns)
        last = torch.tensor(
            [[item.tokens[-1] for item in self.sequences], [length - 1 for length in lengths]],
            device=self._device,
        )
        ids, positions = last[0], last[1]
        self._cache.begin_decode(positions, columns)
        output = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(positions[:, None], columns),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _masks(self, positions_NL: torch.Tensor, columns: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What each query may see: the columns up to its own position, within the layer's window."""
        column_ids = torch.arange(columns, device=self._device)
        ahead = column_ids > positions_NL[..., None]
        masks = {}
        for kind, window in self._windows.items():
            hidden = ahead if window is None else ahead | (column_ids <= positions_NL[..., None] - window)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _prefill(self, rows: Listed[int]) -> None:
        """Fills the cache of the given rows, with one computation for all rows that share a prompt."""
        self._cache.reserve(
            len(self.sequences), max((len(item.tokens) for item in self.sequences), default=0)
        )
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            rows_of.setdefault(tuple(self.sequences[row].tokens[:-1]), []).append(row)
        rows_of.pop((), None)
        self._go_on_from_kept(rows_of)
        group: list[tuple[int, ...]] = []
        for prefix in sorted(rows_of, key=len):
            if group and (len(group) + 1) * len(prefix) > PREFILL_TOKENS:
                self._prefill_pass(group, rows_of)
                group = []
            group.append(prefix)
        if group:
            self._prefill_pass(group, rows_of)

    def _go_on_from_kept(self, rows_of: dict[tuple[int, ...], list[int]]) -> None:
        """Fills the rows whose prompt begins like a finished sequence, and takes them out of `rows_of`."""
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
        """Computes keys and values behind those that rows already have.

        Args:
            starts: (row, number of tokens it has).
        """
        columns = max((len(self.sequences[row].tokens) for row, _ in starts), default=1)
        most = max(1, MASK_CELLS // columns)
        waiting = sorted(starts, key=lambda item: len(self.sequences[item[0]].tokens) - item[1])
        while waiting:
            group: list[tuple[int, int]] = []
            length = 0
            while waiting:
                row, start = waiting[0]
                longer = min(most, len(self.sequences[row].tokens) - 1 - start)
                if group and (len(group) + 1) * longer > min(most, PREFILL_TOKENS):
                    break
                group.append(waiting.pop(0))
                length = longer
            self._extend_pass(group, length, columns)
            # a prompt too long for one pass goes on in the next
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
        rows = torch.tensor([row for row, _ in group], device=self._device)
        positions = torch.tensor(places, device=self._device)
        self._cache.begin_extend(rows, positions, columns)
        self._body(
            input_ids=torch.tensor(ids, device=self._device),
            position_ids=positions,
            attention_mask=self._masks(positions, columns),
            past_key_values=self._cache,
            use_cache=True,
        )

    def _prefill_pass(
        self, prefixes: list[tuple[int, ...]], rows_of: dict[tuple[int, ...], list[int]]
    ) -> None:
        length = len(prefixes[-1])
        # Padding stands on the right, where the causal mask hides it; its own keys are overwritten or masked
        # later.
        padded = [prefix + (prefix[0],) * (length - len(prefix)) for prefix in prefixes]
        rows = [row for prefix in prefixes for row in rows_of[prefix]]
        source = [index for index, prefix in enumerate(prefixes) for _ in rows_of[prefix]]
        self._cache.begin_prefill(
            torch.tensor(rows, device=self._device), torch.tensor(source, device=self._device)
        )
        positions = torch.arange(length, device=self._device)[None].expand(len(prefixes), -1)
        # The head is left out: no logits are needed here, and over a prompt they are the largest tensor of
        # all.
        self._body(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )


def attention_windows(config: Any) -> dict[str, int | None]:
    """The kinds of attention the model's layers have, each with its window in tokens (None: all tokens).

    Raises:
        StartError: the model has layers of another kind, such as recurrent or chunked ones.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"model type {config.model_type!r} has an encoder; serve a decoder-only model")
    if kinds is None:
        return {"full_attention": window}
    strange = sorted(set(kinds) - set(ATTENTION_KINDS))
    if strange:
        raise StartError(
            f"model type {config.model_type!r} has layers of kind {', '.join(strange)}; "
            "this server knows full and sliding attention, so serve such a model with vLLM"
        )
    return {
        kind: window if kind == "sliding_attention" else None for kind in ATTENTION_KINDS if kind in kinds
    }
