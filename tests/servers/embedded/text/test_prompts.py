"""Single tokens and their bytes, for tokenizers that cut characters in two."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verifiers_embedded.text.prompts import ChatText


def byte_level_text() -> ChatText:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ChatText(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_the_bytes_of_all_tokens_join_to_the_text() -> None:
    text = byte_level_text()
    ids = text._tokenizer.encode("ü 🙂\n", add_special_tokens=False)
    assert len(ids) == len("ü 🙂\n".encode())
    assert b"".join(bytes(text.token(token)[1]) for token in ids).decode() == "ü 🙂\n"
    assert text.token(ids[2])[0] == " "


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    assert byte_level_text().token(5000) == ("", [])
