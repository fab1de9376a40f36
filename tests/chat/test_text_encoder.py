"""Texts are encoded by the tokenizer's backend, with the ids of `tokenizer.encode`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from turnwise.chat.text_encoder import text_encoder

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXTS = ("", "a", "<|im_start|>user\nWhat is 12 * 3?<|im_end|>\n", "  \n\t x ", "Straße 🙂 \ud83d", "ab " * 700)


class Upper(PreTrainedTokenizerFast):
    """Encodes in its own way."""

    def _encode_plus(self, text, *args, **options):
        return super()._encode_plus(text.upper(), *args, **options)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def expected(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_tokenizers_own_method(tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        ids = expected(tokenizer, text)
    except Exception as error:
        with pytest.raises(type(error)):
            text_encoder(tokenizer)(text)
        return
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", None)  # it is not called
    assert list(text_encoder(tokenizer)(text)) == ids


def test_settings_that_others_leave_in_the_backend_change_nothing(tokenizer) -> None:
    encode, text = text_encoder(tokenizer), TEXTS[2]
    ids = expected(tokenizer, text)
    tokenizer(text, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation
    assert list(encode(text)) == ids
    tokenizer([text, "a"], padding=True)
    assert tokenizer.backend_tokenizer.padding
    assert list(encode("a")) == expected(tokenizer, "a")
    tokenizer.encode(text, split_special_tokens=True)
    assert list(encode(text)) == ids
    tokenizer.split_special_tokens = True
    assert list(encode(text)) == expected(tokenizer, text) != ids


def test_tokens_that_are_added_later_are_known(tokenizer) -> None:
    encode = text_encoder(tokenizer)
    tokenizer.add_tokens(["What is 12"])
    assert list(encode(TEXTS[2])) == expected(tokenizer, TEXTS[2])
    assert len(tokenizer) - 1 in encode(TEXTS[2])


def test_a_class_that_encodes_in_its_own_way_is_asked(tokenizer) -> None:
    own = Upper(tokenizer_object=tokenizer.backend_tokenizer)
    assert list(text_encoder(own)("abc")) == expected(tokenizer, "ABC")
