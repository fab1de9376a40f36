"""Builds the teachers of a recipe: what scores tokens, and what a teacher reads in place of the student's prompt.

A teacher must have the student's tokens, which is tested by their ids, before a model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.assembly.references import named_callable, reference_name
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.scoring import ScoringServer
from turnwise.errors import ConfigError, EngineError, Failed, TemplateError, boundary
from turnwise.json_yaml import half_character
from turnwise.local_paths import same_directory
from turnwise.options.schema import Config
from turnwise.options.section import Use
from turnwise.options.teacher import TeacherModel
from turnwise.training.learner import Learner
from turnwise.types import Failure, Media, Row, Trajectory
from turnwise.user_code.copies import ConversationCopies

if TYPE_CHECKING:
    from turnwise.training.teacher import Scores, ScoresTokens, TeacherPrompt, TeacherStep
    from turnwise.training.value_batch import StateSequence

__all__ = ["refuse_unusable_teachers", "teacher_step"]


def teacher_step(config: Config, learner: Learner, renderer: Renderer) -> TeacherStep | None:
    """The teachers of a training run; None without a teacher. Raises ConfigError."""
    from turnwise.training.teacher import Teacher, TeacherStep  # torch

    section = config.teacher
    if not section.on:
        return None
    tokens = config.train.micro_batch_tokens
    teachers = [
        Teacher(
            model.name,
            model.weight,
            _scoring(model, learner, config) if section.scores else None,
            None if model.context is None else _prompt(model.context, renderer),
        )
        for model in section.models
    ]
    return TeacherStep(learner, teachers=teachers, section=section, micro_batch_tokens=tokens)


def _scoring(model: TeacherModel, learner: Learner, config: Config) -> ScoresTokens:
    if model.url is not None:
        return ServerTeacher(_server(model, config.teacher.timeout))
    from turnwise.training.teacher import LearnerTeacher  # torch

    return LearnerTeacher(learner, None if model.is_student else model.name, config.train.micro_batch_tokens)


def _server(model: TeacherModel, timeout: float) -> ScoringServer:
    assert model.url is not None
    return ScoringServer(model.url, model.server, timeout=timeout)


@dataclass(frozen=True, slots=True)
class ServerTeacher:
    """A teacher on a server: `ScoresTokens`. Sequences with images cannot be scored."""

    server: ScoringServer

    async def scores(self, sequences: Sequence[StateSequence], states: int, top_k: int) -> Scores:
        """See `ScoresTokens.scores`."""
        from turnwise.training.teacher import Scores  # torch

        rows = np.zeros((states, 1 + 2 * top_k))
        problems: dict[int, str] = {
            int(
                one.places[0]
            ): "a teacher on a server scores text, and the conversation has images: use a local teacher"
            for one in sequences
            if one.media
        }
        texts = [one for one in sequences if not one.media]
        asked = [(one.token_ids.tolist(), np.flatnonzero(one.is_target).tolist()) for one in texts]
        for sequence, found in zip(texts, await self.server.score(asked, top_k), strict=True):
            if isinstance(found, EngineError):
                problems[int(sequence.places[0])] = str(found)
            else:
                for place, token in zip(sequence.places.tolist(), found, strict=True):
                    ids, logprobs = zip(*token.top, strict=True)
                    rows[place] = [token.logprob, *ids, *logprobs]
        return Scores(rows, problems)


# context: what a teacher reads


@same_directory()
def _prompt(use: Use, renderer: Renderer) -> TeacherPrompt:
    """What `teacher.context` shows, a function `(trajectory, turn) -> messages`. Raises ConfigError if it cannot be called."""
    function = named_callable(use, key="teacher.context", given=(None, None))
    name = reference_name(use)

    def prompt(trajectory: Trajectory, index: int) -> tuple[Sequence[int], Sequence[Media]]:
        turn = trajectory.turns[index]
        with boundary("teacher"):  # copies: what it changes in messages stays out of the record
            given = ConversationCopies().trajectory(trajectory)
            messages: Any = function(given, given.turns[index])
        problem = _problem(messages)
        if problem is not None:
            raise Failed(
                Failure(
                    "teacher",
                    f"teacher.context: {name} returned {problem} for turn {index}. It must return the messages before the turn, "
                    f"ending where the model's turn begins: with a message of the user or of a tool",
                )
            )
        # whatever is wrong with messages of a user's function is a failure of this conversation: the template may raise anything
        with boundary("teacher", where=f"teacher.context: {name}, turn {index}"):
            if (half := half_character(messages)) is not None:
                raise TemplateError(half)
            encoded = renderer.for_arguments(turn.chat_template_kwargs).encode_opening(messages, turn.tools)
        return encoded.token_ids, encoded.media

    return prompt


def _problem(messages: Any) -> str | None:
    """Why a result of a context function is no prompt of a turn; None if it is."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        return f"{messages!r:.100}, which is no list of messages"
    if not messages:
        return "no messages"
    last = messages[-1]["role"]
    return f"messages that end with a message of the role {last!r}" if last in ("assistant", "system") else None


# what is refused at the start


def refuse_unusable_teachers(config: Config, rows: Sequence[Row], renderer: Renderer) -> None:
    """Refuse what is known of teachers before a model is loaded. Raises ConfigError."""
    refuse_unknown_teachers(config, rows)
    _refuse_other_tokenizers(config, renderer)
    servers = [_server(model, config.teacher.timeout) for model in config.teacher.models if model.url is not None]
    if servers:
        texts = _test_tokens(renderer)
        with ThreadPoolExecutor(1) as thread:  # this thread may already run an event loop
            for server in servers:
                thread.submit(lambda server=server: asyncio.run(server.refuse_other_tokens(texts))).result()


_TEST_TOKENS = 64


def _test_tokens(renderer: Renderer) -> dict[int, str]:
    """The texts of tokens from all parts of the vocabulary, by their ids: words and parts of words that every program writes in
    the same way."""
    vocabulary = sorted(renderer.tokenizer.get_vocab().values())
    plain = [(id, renderer.decode([id])) for id in vocabulary[:: max(1, len(vocabulary) // (8 * _TEST_TOKENS))]]
    plain = [(id, text) for id, text in plain if text.strip().isascii() and text.strip().isalnum()]
    return dict(plain[:: max(1, len(plain) // _TEST_TOKENS)])


def refuse_unknown_teachers(config: Config, rows: Sequence[Row]) -> None:
    """Raise ConfigError if a row names no teacher of the recipe in `teacher.column`."""
    column, names = config.teacher.column, [model.name for model in config.teacher.models]
    if column is None:
        return
    for row in rows:
        if column not in row.fields:
            raise ConfigError(
                f"teacher.column={column}: row {row.id} has no such column; it must name the row's teacher "
                f"({', '.join(names)}). Columns: {', '.join(sorted(row.fields)) or 'none'}"
            )
        if row.fields[column] not in names:
            raise ConfigError(
                f"teacher.column={column}: row {row.id} has {row.fields[column]!r}, and the teachers are {', '.join(names)}: add "
                f"it to teacher.models, or correct the row"
            )


def _refuse_other_tokenizers(config: Config, renderer: Renderer) -> None:
    """Raise ConfigError if the tokenizer of a local teacher gives other ids than that of the student. The first difference is
    named. A teacher without a tokenizer of its own, such as an adapter, is not tested."""
    own: dict[str, int] = renderer.tokenizer.get_vocab()
    for model in config.teacher.local:
        assert model.path is not None
        if model.path == config.model.path:
            continue
        other = _vocabulary(model.path)
        if other is None or other == own:
            continue
        token = min(own.items() ^ other.items(), key=lambda pair: (pair[1], pair[0]))[0]
        raise ConfigError(
            f"the teacher {model.name!r} ({model.path}) has another vocabulary than model.path={config.model.path}: the token "
            f"{token!r} has the id {own.get(token, 'none')} in the student and {other.get(token, 'none')} in the teacher. A "
            f"teacher scores token ids, so it must have the same ids: use a teacher of the same family"
        )


def _vocabulary(path: str) -> dict[str, int] | None:
    """The ids of a model's tokens; None if there is no tokenizer beside it."""
    from transformers import AutoTokenizer

    from turnwise.models.lora import adapter_base  # torch

    base = adapter_base(path)
    try:
        with boundary("model"):
            return AutoTokenizer.from_pretrained(base or path).get_vocab()
    except Failed as failed:
        if base is not None:
            return None
        raise ConfigError(
            f"teacher.path={path}: the teacher's tokenizer cannot be read, so its token ids cannot be compared with those of the "
            f"student: {failed.failure.message}"
        ) from failed
