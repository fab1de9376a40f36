"""Images on real servers, whose weights come by broadcasts: token ids, pixels and log-probabilities are the trainer's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engine_env
import pytest
import torch
from transformers import AutoModelForImageTextToText

from engines.conformance.subjects import change
from support.vision import image_part, picture, served_vision_model, text_part
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import Probe
from turnwise.environments.environment import environment
from turnwise.errors import EngineError
from turnwise.models.loading import published_weights, token_logprobs
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Completion, LogprobKind, Opening, Reply, Request, Row, Sampling, Segment, Turn

pytestmark = pytest.mark.engines


class Served:
    """A server with a tiny vision model, and the model that is trained."""

    def __init__(self, name: str, folder: Path) -> None:
        path = served_vision_model(folder / "model")
        recipe = {
            "model": {"path": str(path), "device": "cpu"},
            "data": {"train": "rows.jsonl"},
            "engine": {
                "name": name,
                "python": str(engine_env.python(name)),
                "memory_gb": 0.1,
                "weight_transfer": "collective",
                "arguments": ["--enforce-eager"] if name == "vllm" else [],
                "start_timeout": 900.0,
            },
            "max_concurrent": 8,
            "output": str(folder / "run"),
        }
        self.runner = asyncio.Runner()
        self.renderer = Renderer.from_pretrained(path)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        engine = assembly.engine(Config.model_validate(recipe), self.renderer, self.model)
        assert isinstance(engine, RemoteEngine)
        self.engine = engine
        self.runner.run(engine.start())

    def publish(self, version: int, **changed: Any) -> None:
        """Send the model's weights; `changed` are weights that are replaced or, with None, left out."""
        weights = {
            name: tensor for name, tensor in {**published_weights(self.model), **changed}.items() if tensor is not None
        }
        probe = Probe(prompt=[5, 17, 30], tokens=24, logprobs=partial(token_logprobs, self.model), tolerance=1e-4)
        self.runner.run(self.engine.update(version, weights, probe))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine at a time: the server of one has ended before that of the next starts."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(engine_env.make_vision()), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        subject = Served(request.param, tmp_path_factory.mktemp(request.param))
        yield subject
        subject.close()


@environment
async def shows_another(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers the first turn with an image."""
    yield Opening(messages=row.messages)
    shown = [text_part("And"), image_part(picture(84, 56, seed=9)), text_part("this?")]
    yield Reply(messages=[{"role": "user", "content": shown}])
    yield Reply(done=True)


def assert_as_trained(served: Served, segment: Segment, version: int) -> None:
    """The sampled tokens have the log-probabilities of one pass of the trained model over all tokens and images."""
    ids = torch.tensor([list(segment.token_ids)])
    types = torch.zeros_like(ids)
    for image in segment.media:
        types[0, image.start : image.start + image.length] = 1
    inputs = {name: torch.cat([image.inputs[name] for image in segment.media]) for name in segment.media[0].inputs}
    # a placeholder that was sampled has no image: transformers would look for it, so its embedding is given
    pad = served.model.config.image_token_id
    without = ids.masked_fill((ids == pad) & (types == 0), 0)
    embeds = served.model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        answer = served.model(input_ids=without, inputs_embeds=embeds, mm_token_type_ids=types, **inputs)
    logprobs_TV = answer.logits[0].log_softmax(-1)
    sampled = [index for index, turn in enumerate(segment.turn) if turn >= 0]
    expected = [float(logprobs_TV[index - 1, segment.token_ids[index]]) for index in sampled]
    assert [segment.logprobs[index] for index in sampled] == pytest.approx(expected, abs=1e-4)
    assert {segment.version[index] for index in sampled} == {version}


def converse(served: Served) -> None:
    """Conversations with different images of one size, whose tokens are equal, and a second image in the second turn."""
    groups = []
    for seed in range(2):
        shown = [text_part("What is"), image_part(picture(56, 84, seed=seed)), text_part("?")]
        row = Row(id=f"{served.engine.version}-{seed}", messages=[{"role": "user", "content": shown}])
        groups.append(new_group(row, size=2, seed=seed))
    context = RolloutContext(
        engine=served.engine,
        renderer=served.renderer,
        make_environment=shows_another,
        sampling=Sampling(temperature=1.0),
        limits=Limits(turns=2, tokens_per_turn=24),
    )
    served.runner.run(rollout_groups(groups, context))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    pad = served.model.config.image_token_id
    for trajectory in list(trajectories):
        if trajectory.error is not None:  # the random model has sampled a placeholder, which SGLang does not take
            assert served.engine._api.name == "SGLang"
            assert f"tokens {pad} that belong to no image" in trajectory.error.message
            assert any(
                token == pad and turn >= 0
                for s in trajectory.segments
                for token, turn in zip(s.token_ids, s.turn, strict=False)
            )
            trajectories.remove(trajectory)
            continue
        assert trajectory.template_mismatch is None
        assert trajectory.logprob_kind in (LogprobKind.SAMPLED, LogprobKind.TEMPERED)
        (segment,) = trajectory.segments
        assert len(segment.media) in (1, 2)  # a first turn without a stop token is the last
        assert_as_trained(served, segment, served.engine.version)
    assert any(len(trajectory.segments[0].media) == 2 for trajectory in trajectories)
    first, other = (group.trajectories[0].segments[0] for group in groups)
    start = first.turn.index(0)
    assert list(first.token_ids[:start]) == list(other.token_ids[:start])


def test_a_conversation_with_images_before_and_after_an_update(served: Served) -> None:
    served.publish(1)
    converse(served)
    change(served.model, 1)
    served.publish(2)
    converse(served)


def test_a_broadcast_in_the_middle_of_a_turn(served: Served) -> None:
    version = served.engine.version
    request = Request(conversation="long", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=900))

    async def play(delay: float) -> Completion:
        running = asyncio.ensure_future(served.engine.generate(request))
        await asyncio.sleep(delay)
        change(served.model, 7)
        await served.engine.load_weights(version + 1, published_weights(served.model))
        return await running

    delay = 0.5
    for _ in range(8):  # the update may come before the first token, or after the last
        versions = list(served.runner.run(play(delay)).versions)
        switch = versions.index(version + 1) if version + 1 in versions else len(versions)
        assert versions == [version] * switch + [version + 1] * (900 - switch)
        version += 1
        if 0 < switch < 900:
            return
        delay *= 2 if switch == 0 else 0.5
    raise AssertionError("no update came in the middle of the turn")


def test_a_broadcast_that_fails_leaves_the_old_weights(served: Served) -> None:
    version = served.engine.version
    name = next(name for name in published_weights(served.model) if name.endswith("q_proj.weight"))
    for bad in (None, torch.zeros(3, 4), torch.full((64, 64), torch.nan)):
        with pytest.raises(EngineError, match=f"version {version + 1} were not taken over"):
            served.publish(version + 1, **{name: bad})
        assert served.engine.version == version
        converse(served)
    served.publish(version + 1)  # and the next one arrives
    converse(served)


def test_a_server_that_dies_gets_the_present_weights_by_a_new_group(served: Served) -> None:
    (replica,) = served.engine._replicas.all
    assert replica.process is not None
    change(served.model, 3)
    served.publish(served.engine.version + 1)
    replica.process.kill()
    converse(served)
