"""What an evaluation cost, by a table of prices that the user keeps: prices change, so none are built in."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError

__all__ = ["Price", "PriceTable", "load_prices"]


@dataclass(frozen=True, slots=True)
class Price:
    """What a model's tokens cost, per million of each kind."""

    prompt: float
    completion: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """In the table's currency."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by model name, all in one currency."""

    prices: Mapping[str, Price]
    currency: str = "USD"


def load_prices(path: str | os.PathLike[str]) -> PriceTable:
    """Read a price table: a TOML file with a table a model, and optionally `currency` at the top.

        currency = "USD"

        ["org/some-model"]
        prompt = 0.40
        completion = 1.60

    Prices are per million tokens.

    Raises:
        ConfigError: the file cannot be read, or an entry is no price.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the price table {os.fspath(path)!r} cannot be read: {error}.") from error
    currency = found.pop("currency", "USD")
    if not isinstance(currency, str):
        raise ConfigError(f"currency in {os.fspath(path)!r} is {currency!r}; give a text such as 'USD'.")
    return PriceTable({model: _price(model, entry) for model, entry in found.items()}, currency)


def _price(model: str, entry: Any) -> Price:
    names = ("prompt", "completion")
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ConfigError(
            f"the price of {model!r} is {entry!r}; give a table with prompt and completion, per million tokens"
            " (a model name with dots needs quotes)."
        )
    for name in names:
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"the {name} price of {model!r} is {value!r}; give a number of at least 0.")
    return Price(*(float(entry[name]) for name in names))
