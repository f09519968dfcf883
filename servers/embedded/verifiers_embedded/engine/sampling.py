"""Drawing one token for each row of a batch, and the log-probability with which it was drawn.

A token is the one with the largest probability divided by its own Exp(1) number (the Gumbel-max trick, Gumbel 1954).
The numbers depend on the seed, the position and the token id alone, so what is drawn for a request does not depend on
which others share its batch: the rounding of another batch changes a token only where two are tied to within that
rounding, while it moves every border of a cumulative distribution.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verifiers_embedded.engine.decoding import upload

_WORTH_THREADS = 2**18
"""Numbers of a step that threads draw faster than one; numpy lets go of the interpreter meanwhile."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True)
class SamplingParameters:
    """The sampling settings of one completion.

    Args:
        seed: of the request's own random stream, in [0, 2**64).
        temperature: divides the logits; 0 (below 1e-5) takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens whose probability reaches top_p; 1 keeps all.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        top_logprobs: how many of the likeliest tokens are reported beside the drawn one.
        return_mask: report the ids of all tokens that could be drawn, where some could not.

    The temperature is applied first, then min_p, top_k and top_p (vLLM's order); what is left is
    renormalised.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_logprobs: int = 0
    return_mask: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncated(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True)
class Draw:
    """The tokens of one step, in row order.

    `likeliest[i]` is a list of (id, log-probability), the likeliest first, for rows that asked for it; a truncated
    distribution may hold fewer than were asked for. `kept[i]` are the ids that could be drawn, in rising order, for
    rows that asked for them; none where all could.
    """

    tokens: list[int]
    log_probs: list[float]
    likeliest: list[list[tuple[int, float]]]
    kept: list[list[int]]


def seed_of_choice(seed: int, index: int) -> int:
    """Return the seed of one of several completions of a request; the first has the request's own."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])


class NoiseStream:
    """Exp(1) numbers for the tokens of one position after another, by the seed alone: numpy's Philox."""

    def __init__(self, seed: int) -> None:
        self.seed, self.position = seed, 0
        self._bits = np.random.Generator(np.random.Philox(key=seed))

    def fill(self, noise_V: torch.Tensor) -> None:
        """Write the next position's numbers into a float64 tensor: in float32 those near 0 would be too coarse."""
        self._bits.standard_exponential(out=noise_V.numpy())


class DeviceNoise:
    """Exp(1) numbers for the tokens of many rows at once, by seed, position and token id, with no work on the host.

    A counter-based generator: two rounds of SplitMix64's finalizer (Steele et al., "Fast splittable pseudorandom
    number generators", 2014), over seed and position, then over that and the token id.
    """

    def __init__(self, streams: Sequence[NoiseStream], device: torch.device) -> None:
        rows = [[_signed(stream.seed), stream.position] for stream in streams]
        self._seeds, self._positions = upload(rows, device).unsqueeze(-1).unbind(1)

    def next(self, vocabulary: int) -> torch.Tensor:
        """Return the next position's numbers, float64 (rows, vocabulary)."""
        tokens = torch.arange(1, vocabulary + 1, device=self._seeds.device)
        keys = _mixed(self._seeds + (self._positions + 1) * _GOLDEN)
        bits = _mixed(keys + tokens * _GOLDEN)
        self._positions = self._positions + 1
        uniform = _shifted(bits, 11).double().mul_(2.0**-53)
        return uniform.neg_().log1p_().neg_().clamp_(min=2.0**-54)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right as unsigned numbers do."""
    return (state >> by) & ((1 << (64 - by)) - 1)


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Return threads of this process: a fork has none of those before it."""
    return ThreadPoolExecutor(count, "vf-noise")


class BatchSampler:
    """A sampler for a fixed set of rows; rebuilt when the rows change, so that a step copies no parameters.

    The log-probability returned is that of the distribution drawn from: after temperature, after truncation
    and renormalisation. A greedy row's is the one at temperature 1, since its own distribution has a single
    point.

    Args:
        host_noise: numbers come from `NoiseStream`; False for `DeviceNoise`. None: on the CPU they do.
    """

    def __init__(
        self, rows: Sequence[SamplingParameters], device: torch.device, *, host_noise: bool | None = None
    ) -> None:
        self._host_noise = device.type == "cpu" if host_noise is None else host_noise
        self._device_noise: DeviceNoise | None = None

        temperatures = [1.0 if row.greedy else row.temperature for row in rows]
        self._temperatures: torch.Tensor | None = None
        if any(value != 1.0 for value in temperatures):
            self._temperatures = upload(temperatures, device, torch.float32)[:, None]
        self._greedy_rows = _index([i for i, row in enumerate(rows) if row.greedy], device)
        truncated = [(i, row) for i, row in enumerate(rows) if row.truncated]
        self._truncated_rows = _index([i for i, _ in truncated], device)
        self._drawn_rows = [i for i, row in enumerate(rows) if not row.greedy]
        self._noise: torch.Tensor | None = None
        self._tops = [row.top_logprobs for row in rows]
        self._top_rows = [i for i, row in enumerate(rows) if row.top_logprobs]
        self._mask_rows = [i for i, row in enumerate(rows) if row.return_mask]
        self._limits = upload([[row.top_k, row.top_p, row.min_p] for _, row in truncated], device, torch.float32)

    def sample(self, logits_NV: torch.Tensor, noise: Sequence[NoiseStream]) -> Draw:
        """Sample one token for every row, from logits of any floating dtype; the mathematics are in float32.

        What a grammar forbids is -inf, and so has no part in temperature, truncation or log-probabilities. A row
        whose logits hold NaN gets a log-probability that is not finite; the caller checks for it.
        """
        logits = logits_NV.float()
        scaled = logits if self._temperatures is None else logits / self._temperatures
        log_probs = torch.log_softmax(scaled, dim=-1)
        if self._truncated_rows is not None:
            kept = truncate(log_probs[self._truncated_rows], self._limits)
            log_probs[self._truncated_rows] = torch.log_softmax(kept, dim=-1)
        if not self._drawn_rows:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = self._race(log_probs, noise)
            if self._greedy_rows is not None:
                tokens[self._greedy_rows] = logits[self._greedy_rows].argmax(dim=-1)
        chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
        # One transfer instead of two: on a GPU each .tolist() waits for the device. Ids are exact in float64.
        ids, values = torch.stack([tokens.double(), chosen.double()]).tolist()
        return Draw([int(value) for value in ids], values, self._likeliest(log_probs), self._kept(log_probs))

    def _kept(self, log_probs_NV: torch.Tensor) -> list[list[int]]:
        kept: list[list[int]] = [[] for _ in self._tops]
        if self._mask_rows:
            alive = log_probs_NV[self._mask_rows] > -math.inf
            alive &= ~alive.all(1, keepdim=True)
            counts, ids = alive.sum(1).tolist(), iter(alive.nonzero()[:, 1].tolist())
            for row, count in zip(self._mask_rows, counts, strict=True):
                kept[row] = list(itertools.islice(ids, count))
        return kept

    def _likeliest(self, log_probs_NV: torch.Tensor) -> list[list[tuple[int, float]]]:
        found: list[list[tuple[int, float]]] = [[] for _ in self._tops]
        if not self._top_rows:
            return found
        count = min(max(self._tops), log_probs_NV.shape[1])
        values, ids = log_probs_NV[self._top_rows].topk(count, dim=-1)
        columns = torch.stack([ids.double(), values.double()]).tolist()
        for row, row_ids, row_values in zip(self._top_rows, *columns, strict=True):
            pairs = zip(row_ids[: self._tops[row]], row_values[: self._tops[row]], strict=True)
            found[row] = [(int(token), value) for token, value in pairs if value > -math.inf]
        return found

    def _race(self, log_probs_NV: torch.Tensor, noise: Sequence[NoiseStream]) -> torch.Tensor:
        """Return each row's token with the largest probability divided by its number."""
        if not self._host_noise:
            if self._device_noise is None:
                self._device_noise = DeviceNoise(noise, log_probs_NV.device)
            for stream in noise:
                stream.position += 1
            return (log_probs_NV.exp() / self._device_noise.next(log_probs_NV.shape[1])).argmax(dim=-1)
        if self._noise is None or self._noise.shape != log_probs_NV.shape:
            self._noise = torch.ones_like(log_probs_NV, dtype=torch.float64)
            shared = self._noise.numel() >= _WORTH_THREADS
            self._map: Any = _threads(torch.get_num_threads(), os.getpid()).map if shared else map
        rows = self._drawn_rows
        list(self._map(NoiseStream.fill, [noise[row] for row in rows], [self._noise[row] for row in rows]))
        # over the noise, as a new tensor of this size costs as much as the division
        return torch.div(log_probs_NV.exp(), self._noise, out=self._noise).argmax(dim=-1)


def truncate(log_probs_NV: torch.Tensor, limits_N3: torch.Tensor) -> torch.Tensor:
    """Set normalised log-probabilities outside min_p, top_k and top_p to -inf, without renormalising.

    A row's limits are top_k (0: off), top_p (1: off) and min_p (0: off). Exactly k tokens are left by top_k; among
    equals the one with the lower id stays.
    """
    top_k, top_p, min_p = limits_N3[:, 0:1], limits_N3[:, 1:2], limits_N3[:, 2:3]
    ordered, order = log_probs_NV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)[None]
    drop = ordered < ordered[:, :1] + min_p.log()
    drop |= (top_k > 0) & (rank >= top_k)
    weights = ordered.masked_fill(drop, float("-inf")).softmax(dim=-1, dtype=torch.float64)
    mass_before = weights.cumsum(dim=-1) - weights
    drop |= (top_p < 1.0) & (mass_before >= top_p)
    drop[:, 0] = False
    return torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(drop, float("-inf")))


def _index(rows: list[int], device: torch.device) -> torch.Tensor | None:
    return upload(rows, device) if rows else None
