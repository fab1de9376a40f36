"""Headers and contents of messages: a good template, and each with one thing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import CHATML, byte_tokenizer
from support.families import family_renderer, template_files
from support.templates import NO_TOOLS
from turnwise.chat.renderer import Renderer
from turnwise.doctor.messages import contents, headers

PROMPT = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def renderer(template: str = CHATML) -> Renderer:
    return Renderer(byte_tokenizer(template))


def test_turns_that_begin_with_the_generation_prompt_are_right() -> None:
    found = headers(renderer())
    assert (found.status, found.text) == (
        "ok",
        "a turn of the model begins with the generation prompt, '<|im_start|>assistant\\n'",
    )


def test_turns_without_a_header_need_no_generation_prompt() -> None:
    mistral = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    found = headers(renderer(mistral))
    assert (found.status, found.text) == (
        "ok",
        "turns of the model have no header, so there is no generation prompt",
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        pytest.param(
            CHATML.removesuffix(PROMPT),
            "the template writes '<|im_start|>assistant\\n' before an assistant message, and nothing where "
            "add_generation_prompt is true, so the model would speak without its header",
            id="no generation prompt",
        ),
        pytest.param(
            CHATML.replace(PROMPT, PROMPT.replace("assistant", "model")),
            "the generation prompt is '<|im_start|>model\\n', and an assistant message begins with "
            "'<|im_start|>assistant\\n'",
            id="another header than the turns have",
        ),
        pytest.param(
            "{{ bos_token }}{{ bos_token }}" + CHATML,
            "the template begins a conversation with '<|endoftext|>' (0) twice",
            id="BOS twice",
        ),
        pytest.param(
            CHATML.replace("<|im_start|>", "<|header|>"),
            "headers that are no tokens of this tokenizer: '<|header|>' (10 tokens)",
            id="headers that are no tokens",
        ),
    ],
)
def test_headers_that_no_model_was_trained_with_are_wrong(template: str, told: str) -> None:
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    found = headers(Renderer(tokenizer))
    assert found.status == "fail"
    assert told in found.text


def test_contents_that_are_written_as_they_are_are_right() -> None:
    assert (contents(renderer()).status, contents(renderer(NO_TOOLS)).status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("[:100]", "becomes '<|im_end|>"),
        (" | e", "becomes '&lt;b&gt;&amp;amp;&l'"),
        (" | replace('\\n\\n', '\\n')", "becomes '<b>&amp;</b>"),
    ],
)
def test_contents_that_are_cut_or_changed_are_wrong(change: str, told: str) -> None:
    template = NO_TOOLS.replace("{{ message.content }}", f"{{{{ message.content{change} }}}}")
    found = contents(renderer(template))
    assert found.status == "fail"
    assert told in found.text


def test_white_space_that_is_taken_off_is_told_since_families_do_so_and_servers_with_them() -> None:
    found = contents(renderer(NO_TOOLS.replace("{{ message.content }}", "{{ message.content | trim }}")))
    assert found.status == "note"
    assert "takes white space off both ends of messages of system and user and assistant" in found.text
    assert "training keeps it as it was sampled" in found.text


@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_headers_and_contents_of_families_are_not_called_wrong(file: Path) -> None:
    found = family_renderer(file)
    assert headers(found).status == "ok", headers(found).text
    assert contents(found).status != "fail", contents(found).text
