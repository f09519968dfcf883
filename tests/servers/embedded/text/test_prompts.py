"""Single tokens and their bytes, for tokenizers that cut characters in two."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
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


def test_a_text_that_begins_with_the_bos_gets_no_second_one() -> None:
    vocabulary = {"<s>": 0, "a": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    text = ChatText(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))
    assert text.encode("a", True) == text.encode("<s>a", True) == text.encode("<s>a", False) == [0, 1]
    # a second one that is written stays, with and without a tokenizer that adds one
    assert text.encode("<s><s>a", True) == [0, 0, 1]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    plain = ChatText(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))
    assert plain.encode("<s><s>a", True) == [0, 0, 1]
