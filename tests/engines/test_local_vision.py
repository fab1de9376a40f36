"""Images in the embedded engine: its log-probabilities are those of the model's own pass over the whole conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from support.vision import image_part, picture, save_vision_model, text_part, vision_model, vision_tokenizer
from turnwise.chat.media import MediaProcessor
from turnwise.engines.local import LocalEngine
from turnwise.errors import EngineError
from turnwise.types import Completion, Media, Request, Sampling, Segment

TOKENIZER = vision_tokenizer()
PAD = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    found = MediaProcessor.from_pretrained(save_vision_model(tmp_path_factory.mktemp("model")), TOKENIZER)
    assert found is not None
    return found


def heard(vision: MediaProcessor, *parts: Any) -> tuple[list[int], list[Media]]:
    """The tokens and images of a user's message and the cue."""
    messages = [
        {"role": "user", "content": [text_part(part) if isinstance(part, str) else image_part(part) for part in parts]}
    ]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, found = vision.expand(text, vision.parts(messages))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return ids, vision.locate(ids, found)


async def converse(
    engine: LocalEngine, name: str, turns: Sequence[tuple[list[int], list[Media]]], *, seed: int = 0, tokens: int = 12
) -> Segment:
    """A conversation in which the model is heard after each of `turns`."""
    segment = Segment()
    for index, (ids, media) in enumerate(turns):
        segment.append_context(ids, media)
        segment.append_completion(index, await ask(engine, name, segment, seed=seed + index, tokens=tokens))
        await asyncio.sleep(0)
    return segment


async def ask(engine: LocalEngine, name: str, segment: Segment, *, seed: int = 0, tokens: int = 12) -> Completion:
    return await engine.generate(
        Request(
            conversation=name,
            token_ids=tuple(segment.token_ids),
            media=tuple(segment.media),
            sampling=Sampling(max_tokens=tokens),
            seed=seed,
        )
    )


def own_logprobs(model: Any, segment: Segment) -> list[float]:
    """Of the sampled tokens, from one pass of transformers' own over the whole sequence and all images."""
    ids = torch.tensor([list(segment.token_ids)])
    kinds = torch.zeros_like(ids)
    for one in segment.media:
        kinds[0, one.start : one.start + one.length] = 1
    # a placeholder that was sampled has no image: transformers would refuse it, so it gets its embedding by hand
    given: dict[str, Any] = {"input_ids": ids.masked_fill((ids == PAD) & (kinds == 0), 0)}
    given["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    if segment.media:
        given["mm_token_type_ids"] = kinds
        for name in ("pixel_values", "image_grid_thw"):
            given[name] = torch.cat([one.inputs[name] for one in segment.media])
    with torch.no_grad():
        all_TV = model(**given).logits[0].log_softmax(-1)
    return [float(all_TV[at - 1, segment.token_ids[at]]) for at, turn in enumerate(segment.turn) if turn >= 0]


def said_logprobs(segment: Segment) -> list[float]:
    return [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn >= 0]


def assert_exact(model: Any, *segments: Segment) -> None:
    for segment in segments:
        assert said_logprobs(segment) == pytest.approx(own_logprobs(model, segment), abs=1e-4)


def test_a_second_image_in_the_second_turn(vision: MediaProcessor) -> None:
    model = vision_model()
    engine = LocalEngine(model, threads=1)
    turns = [
        heard(vision, "a", picture(16, 24)),
        heard(vision, picture(32, 16, seed=1), "b", picture(8, 8, seed=2)),
        heard(vision, "no image now"),
    ]
    segment = asyncio.run(converse(engine, "c", turns))
    assert len(segment.media) == 3
    assert_exact(model, segment)
    # what was there is not computed again: only what was heard, and the last word before it
    assert engine.stats.prefilled_tokens == sum(len(ids) for ids, _ in turns) + 2


def test_in_company_of_other_images_and_of_text(vision: MediaProcessor) -> None:
    model = vision_model(seed=1)
    engine = LocalEngine(model, threads=1)
    openings = [
        [heard(vision, "same words", picture(16, 16, seed=1), "?"), heard(vision, picture(24, 24, seed=9))],
        [heard(vision, "same words", picture(16, 16, seed=2), "?"), heard(vision, "and?")],
        [heard(vision, "only words, and rather many of them"), heard(vision, picture(16, 16, seed=1))],
        [heard(vision, "only words"), heard(vision, "and words")],
    ]

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), turns, seed=n) for n, turns in enumerate(openings)))

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert said_logprobs(segments[0])[:3] != pytest.approx(said_logprobs(segments[1])[:3], abs=1e-3)  # another image


def test_a_group_computes_its_image_once(vision: MediaProcessor) -> None:
    model = vision_model(seed=2)
    engine = LocalEngine(model, threads=1)
    opening = heard(vision, "What is this?", picture(32, 32, seed=3))

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), [opening], seed=100 * n) for n in range(8)))

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert engine.stats.prefilled_tokens == len(opening[0]) + 7  # the last token is everybody's own
    assert engine.stats.copied_tokens == 7 * (len(opening[0]) - 1)


def test_another_image_of_the_same_size_shares_nothing_after_it(vision: MediaProcessor) -> None:
    model = vision_model(seed=2)
    engine = LocalEngine(model, threads=1)
    first, second = (heard(vision, "Quite a long text that both have", picture(seed=n), "and more") for n in (1, 2))
    assert first[0] == second[0]

    async def hold() -> list[Segment]:
        return [await converse(engine, "a", [first]), await converse(engine, "b", [second], seed=7)]

    segments = asyncio.run(hold())
    assert_exact(model, *segments)
    assert engine.stats.copied_tokens == first[1][0].start


def test_a_conversation_that_lost_its_slot_sees_its_images_again(vision: MediaProcessor) -> None:
    model = vision_model(seed=3)
    engine = LocalEngine(model, threads=1, slots=1)
    mine = [heard(vision, "a", picture(16, 24)), heard(vision, picture(seed=1), "b")]
    yours = [heard(vision, "c", picture(24, 24, seed=4)), heard(vision, "d")]

    async def hold() -> list[Segment]:
        return await asyncio.gather(converse(engine, "a", mine), converse(engine, "b", yours, seed=50))

    segments = asyncio.run(hold())
    assert engine.stats.evictions > 0
    assert_exact(model, *segments)


def test_a_request_that_loses_its_row_while_it_runs_goes_on_with_its_images(vision: MediaProcessor) -> None:
    model = vision_model(seed=3)
    token_bytes = LocalEngine(model, threads=1)._core.cache.kv.token_bytes
    engine = LocalEngine(model, threads=1, memory_gb=3 * 192 * token_bytes / 2**30)
    turns = [[heard(vision, "x" * 90, picture(32, 32, seed=n))] for n in range(4)]

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), one, seed=n, tokens=90) for n, one in enumerate(turns)))

    segments = asyncio.run(hold())
    assert engine.stats.preemptions > 0
    assert_exact(model, *segments)


def test_a_long_prompt_is_cut_between_images_not_in_them(
    vision: MediaProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.engines.local.scheduler.PREFILL_CHUNK_TOKENS", 20)
    model = vision_model(seed=4)
    engine = LocalEngine(model, threads=1)
    turns = [heard(vision, "some", picture(32, 32), "text", picture(32, 32, seed=1), picture(24, 32, seed=2), "?")]
    segment = asyncio.run(converse(engine, "c", turns))
    assert_exact(model, segment)


def test_a_placeholder_that_the_model_says_is_a_word(vision: MediaProcessor) -> None:
    model = vision_model(seed=5)
    with torch.no_grad():
        model.lm_head.weight[PAD] *= 40  # says it all the time
    engine = LocalEngine(model, threads=1, slots=1)
    turns = [heard(vision, "a", picture()), heard(vision, picture(seed=1))]
    other = [heard(vision, "b"), heard(vision, "c")]

    async def hold() -> list[Segment]:
        return await asyncio.gather(converse(engine, "a", turns), converse(engine, "b", other, seed=9))

    segment, words = asyncio.run(hold())
    assert sum(token == PAD and turn == 0 for token, turn in zip(segment.token_ids, segment.turn, strict=True)) > 2
    assert_exact(model, segment, words)


def test_new_weights_see_with_new_eyes(vision: MediaProcessor) -> None:
    model = vision_model(seed=6)
    engine = LocalEngine(model, threads=1)
    opening = heard(vision, "a", picture(24, 24))

    async def hold() -> Segment:
        await converse(engine, "a", [opening])
        with torch.no_grad():
            for parameter in model.model.visual.parameters():
                parameter.mul_(1.5)
        await engine.load_weights(1)
        return await converse(engine, "b", [opening])

    assert_exact(model, asyncio.run(hold()))


def test_what_cannot_be_seen_is_refused(vision: MediaProcessor) -> None:
    ids, media = heard(vision, "a", picture())
    segment = Segment()
    segment.append_context(ids, media)
    with pytest.raises(
        EngineError, match="the request contains 1 images or videos, and Qwen3ForCausalLM does not accept them"
    ):
        asyncio.run(ask(LocalEngine(tiny_model(vocabulary=263), threads=1), "c", segment))
    engine = LocalEngine(vision_model(), threads=1)
    cut = Segment()
    cut.append_context(ids[: media[0].start + 4], media)
    with pytest.raises(EngineError, match="its placeholders must be there, followed by at least one more token"):
        asyncio.run(ask(engine, "c", cut))
    assert len(asyncio.run(ask(engine, "c", segment)).token_ids) == 12  # and the engine goes on


def test_the_model_directory_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(save_vision_model(tmp_path))
    assert torch.equal(model.lm_head.weight, vision_model().lm_head.weight)
