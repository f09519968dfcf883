"""Secrets are found by value, wherever they turn up."""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

import pytest

from verifiers.cli.endpoint import endpoint_redactor
from verifiers.inference.endpoint_registry import EndpointEntry
from verifiers.log import Redactor, redact_logs, secrets_of_run, url_without_secrets

SECRET = "canary-0123456789"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://user:{SECRET}@host:8000/v1", "https://host:8000/v1"),
        (f"https://host/v1?api_key={SECRET}", "https://host/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
    ],
)
def test_a_url_is_written_without_what_is_secret_in_it(url: str, shown: str) -> None:
    assert url_without_secrets(url) == shown
    assert SECRET not in Redactor(secrets_of_run(url, "EMPTY", {}, environ={}))(f"{url} could not be reached")


def test_keys_are_found_in_headers_arguments_and_the_environment() -> None:
    headers = {"Authorization": f"Bearer {SECRET}-1", "X-Team": "research"}
    arguments = {"judge": {"api_key": f"{SECRET}-2"}, "name": "a name that is long enough"}
    environ = {"JUDGE_API_KEY": f"{SECRET}-3", "HOME": "/home/somebody-or-other", "KEY": "short"}
    redact = Redactor(secrets_of_run("http://h/v1", f"{SECRET}-0", headers, arguments, environ))
    for number in range(4):
        assert redact(f"<{SECRET}-{number}>") == "<***>"
    for text in ("research", "a name that is long enough", "/home/somebody-or-other", "short", "EMPTY"):
        assert redact(text) == text


@pytest.mark.parametrize("key", ["completed", "assistant", "placeholder", "not-needed", "12345678", "example_id"])
def test_a_key_that_other_texts_have_too_changes_no_outcome_role_name_or_number(key: str) -> None:
    redact = Redactor(secrets_of_run("http://h/v1", key, {}, environ={}))
    row = {"outcome": "completed", "example_id": 12345678, "completion": [{"role": "assistant", "content": "4"}]}
    assert redact.data(row) == row


def test_what_headers_say_of_a_program_takes_no_words_out_of_texts() -> None:
    headers = {
        "X-Title": "Arithmetic word problems",
        "X-Api-Key": "assistant",
        "X-Proof": f"by {SECRET}-0123456789",
        "X-Upstream": "Basic dXNlcjpzM2NyZXQ=",
    }
    redact = Redactor(secrets_of_run("http://h/v1", "", headers, environ={}))
    for text in ("Arithmetic word problems", "problems", "assistant"):
        assert redact(text) == text
    assert redact(f"{SECRET}-0123456789, dXNlcjpzM2NyZXQ=") == "***, ***"


def test_a_key_of_words_from_the_environment_masks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KEY", "placeholder")
    monkeypatch.setenv("UPSTREAM", f"{SECRET}-5")
    entry = EndpointEntry("m", "m", ("http://h/v1",), key_var="LOCAL_KEY", header_vars={"X-Up": "UPSTREAM"})
    assert endpoint_redactor(entry, {})(f"a placeholder, {SECRET}-5") == "a placeholder, ***"


def test_a_password_of_words_is_a_secret_where_it_is_named_one() -> None:
    arguments = {"judge": {"api_key": "abcdefghijklmnop"}}
    redact = Redactor(secrets_of_run("http://u:sunshine@h/v1?api_key=passphrase", "", {}, arguments, environ={}))
    assert redact("sunshine, passphrase, abcdefghijklmnop") == "***, ***, ***"


@pytest.mark.parametrize("proxy", ["http://me:passphrase@proxy:3128", "me:passphrase@proxy:3128/"])
def test_user_and_password_of_a_proxy_are_a_secret_together(proxy: str) -> None:
    redact = Redactor(secrets_of_run("http://h/v1", "", {}, environ={"https_proxy": proxy, "no_proxy": "a.example"}))
    assert "me" not in secrets_of_run("http://h/v1", "", {}, environ={"https_proxy": "http://me@proxy:3128"})
    text = "407 of http://{}@proxy:3128 to a.example; say the passphrase"
    assert redact(text.format("me:passphrase")) == text.format("***")


def test_a_line_of_json_stays_one_and_its_numbers_with_it() -> None:
    redact = Redactor(["12345678"])
    assert redact.json('{"12345678": 12345678, "said": "\\ud800 12345678"}') == (
        '{"12345678": 12345678, "said": "\\ud800 ***"}'
    )


def test_data_has_no_secret_in_its_texts() -> None:
    row = {"error": f"refused {SECRET}", "info": [{"text": json.dumps({"key": SECRET})}], "reward": 1.0}
    assert Redactor([SECRET]).data(row) == {
        "error": "refused ***",
        "info": [{"text": '{"key": "***"}'}],
        "reward": 1.0,
    }


def test_logs_have_no_secret_in_text_arguments_or_traceback(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("verifiers.hiding-test")
    with redact_logs(Redactor([SECRET])), caplog.at_level("DEBUG"):
        try:
            raise ValueError(f"refused {SECRET}")
        except ValueError as error:
            logger.error("failed with %s", error, exc_info=error)
        logger.info("100 %")
    assert "failed with refused ***" in caplog.text
    assert "ValueError: refused ***" in caplog.text
    assert "100 %" in caplog.text
    assert SECRET not in caplog.text
    logger.error("afterwards %s", SECRET)
    assert f"afterwards {SECRET}" in caplog.text


def test_errors_keep_their_class_and_lose_the_secret_also_in_their_causes() -> None:
    def fail() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise ValueError(f"no {SECRET}") from cause

    with pytest.raises(ValueError, match=r"no \*\*\*") as caught, Redactor([SECRET]).in_errors():
        fail()
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.args == ("***",)


def test_a_key_is_masked_inside_an_address_too() -> None:
    key = "sk/abc+def==123456"
    for shown in (quote(key), quote(key, safe="")):
        assert Redactor([key])(f"no key {shown} there") == "no key *** there"
