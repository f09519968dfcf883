from __future__ import annotations

from pathlib import Path

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.summary import Price, load_prices


def written(directory: Path, text: str) -> Path:
    path = directory / "prices.toml"
    path.write_text(text)
    return path


def test_tokens_cost_what_the_table_says(tmp_path: Path) -> None:
    table = load_prices(
        written(
            tmp_path,
            'currency = "EUR"\n["org/model-4.1"]\nprompt = 0.5\ncompletion = 2\n[free]\nprompt = 0\ncompletion = 0\n',
        )
    )
    assert table.currency == "EUR"
    assert table.prices == {"org/model-4.1": Price(0.5, 2.0), "free": Price(0.0, 0.0)}
    assert table.prices["org/model-4.1"].cost(3_000_000, 500_000) == 2.5
    assert load_prices(written(tmp_path, "")).currency == "USD"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[m]\nprompt = 1", "'m'"),
        ("[m]\nprompt = 1\ncompletion = -1", "completion price of 'm' is -1"),
        ("[m]\nprompt = true\ncompletion = 1", "prompt price of 'm' is True"),
        ("[m]\nprompt = nan\ncompletion = 1", "prompt price of 'm' is nan"),
        ("[gpt-4.1]\nprompt = 1\ncompletion = 1", "needs quotes"),
        ("m = 3", "'m' is 3"),
        ("currency = 3", "currency"),
        ("[m", "cannot be read"),
    ],
)
def test_what_is_no_price_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_prices(written(tmp_path, text))


def test_a_missing_table_is_a_mistake_in_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_prices(tmp_path / "none.toml")
