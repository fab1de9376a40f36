"""The checks `headers` and `contents`: a good template, and templates with one error each."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import CHATML, byte_tokenizer
from support.families import family_renderer, template_files
from support.templates import NO_TOOLS
from turnwise.chat.renderer import Renderer
from turnwise.doctor.template import contents, headers

PROMPT = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def renderer(template: str = CHATML) -> Renderer:
    return Renderer(byte_tokenizer(template))


def test_turns_that_begin_with_the_generation_prompt_are_ok() -> None:
    found = headers(renderer())
    assert (found.status, found.text) == (
        "ok",
        "assistant messages begin with the generation prompt '<|im_start|>assistant\\n'",
    )


def test_turns_without_a_header_need_no_generation_prompt() -> None:
    mistral = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    found = headers(renderer(mistral))
    assert (found.status, found.text) == (
        "ok",
        "assistant messages have no header, so no generation prompt is needed",
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            CHATML.removesuffix(PROMPT),
            "the template writes '<|im_start|>assistant\\n' before an assistant message, but writes nothing if "
            "add_generation_prompt is true, so the model would generate without its header",
            id="no generation prompt",
        ),
        pytest.param(
            CHATML.replace(PROMPT, PROMPT.replace("assistant", "model")),
            "the generation prompt is '<|im_start|>model\\n', but an assistant message begins with "
            "'<|im_start|>assistant\\n'",
            id="another header than the turns have",
        ),
        pytest.param(
            "{{ bos_token }}{{ bos_token }}" + CHATML,
            "the template begins a conversation with two BOS tokens '<|endoftext|>' (0)",
            id="BOS twice",
        ),
        pytest.param(
            CHATML.replace("<|im_start|>", "<|header|>"),
            "headers that are not special tokens of this tokenizer: '<|header|>' (10 tokens)",
            id="headers that are not tokens",
        ),
    ],
)
def test_wrong_headers_fail(template: str, message: str) -> None:
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    found = headers(Renderer(tokenizer))
    assert found.status == "fail"
    assert message in found.text


def test_unchanged_contents_are_ok() -> None:
    assert (contents(renderer()).status, contents(renderer(NO_TOOLS)).status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[:100]", "becomes '<|im_end|>"),
        (" | e", "becomes '&lt;b&gt;&amp;amp;&l'"),
        (" | replace('\\n\\n', '\\n')", "becomes '<b>&amp;</b>"),
    ],
)
def test_contents_that_are_cut_or_changed_fail(change: str, message: str) -> None:
    template = NO_TOOLS.replace("{{ message.content }}", f"{{{{ message.content{change} }}}}")
    found = contents(renderer(template))
    assert found.status == "fail"
    assert message in found.text


def test_removed_white_space_is_a_note() -> None:
    found = contents(renderer(NO_TOOLS.replace("{{ message.content }}", "{{ message.content | trim }}")))
    assert found.status == "note"
    assert "removes white space at both ends of messages with the roles system, user, assistant." in found.text
    assert "In training, the white space in a sampled completion is kept" in found.text


@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_headers_and_contents_of_model_families_do_not_fail(file: Path) -> None:
    found = family_renderer(file)
    assert headers(found).status == "ok", headers(found).text
    assert contents(found).status != "fail", contents(found).text
