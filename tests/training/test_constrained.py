"""Constrained turns: no malformed call can be sampled, and engine and trainer give the same log-probabilities under the mask."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support import CHATML, byte_tokenizer
from support.agent_clients import clients_are_closed, openai_client  # noqa: F401
from support.conversations import Says, a_table, hold_all
from support.tiny import tiny_model
from turnwise import assembly
from turnwise.assembly.conversations import constrained
from turnwise.chat.constraints import Constrained
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.config.engine_checks import no_grammar
from turnwise.config.recipe import with_overrides
from turnwise.doctor.credit import conserved
from turnwise.engines.local import LocalEngine
from turnwise.environments.agents import AgentFunction
from turnwise.errors import ConfigError, GrammarError, TemplateError
from turnwise.models.distribution import AllowedTokens, sampling_logits
from turnwise.record.reader import read_lines
from turnwise.record.trajectory_json import decode_trajectory, trajectory_record
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.prompts import RenderedPrompts
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.train import _weigh
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import (
    AnswerFormat,
    Group,
    LogprobKind,
    Opening,
    Reply,
    Row,
    Sampling,
    SamplingChange,
    ToolSchema,
    Trajectory,
    Turn,
)

SCHEMA = {"type": "object", "properties": {"q": {"enum": ["a", "bc"]}, "n": {"type": "boolean"}}, "required": ["q"]}
THINKS = CHATML.replace(
    "{{ message.content }}{%- for call",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{%- for call",
)
TOOL = "turnwise.environments.calculator:calculator"
SEARCH = {"type": "function", "function": {"name": "search", "description": "d", "parameters": SCHEMA}}
"""A tool whose calls are short, so that random weights finish them."""


class Offers:
    """Offers a tool for two turns."""

    change = SamplingChange()
    prefill = ""

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages, tools=[SEARCH], sampling=self.change)

    async def step(self, turn: Turn) -> Reply:
        return Reply(
            messages=[{"role": "user", "content": "go on"}],
            done=turn.index == 1,
            prefill=self.prefill if turn.index == 0 else "",
        )

    async def close(self) -> None: ...


def sampled(
    constrained: Constrained,
    sampling: Sampling = Sampling(),
    *,
    environment: Any = Offers,
    tokens: int = 300,
    size: int = 3,
    turns: int = 2,
    skip_forms: bool = False,
) -> tuple[Any, Renderer, list[Trajectory]]:
    """A model of random weights, its renderer, and the conversations that it has sampled."""
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer, constrained=constrained, unchecked=("tools shown",))
    model = tiny_model(1, vocabulary=len(tokenizer) + 5)
    engine = LocalEngine(model, memory_gb=0.2, threads=1, decode=renderer.decode, masks=renderer.masks)
    context = RolloutContext(
        engine=engine,
        renderer=renderer,
        make_environment=environment,
        sampling=sampling,
        skip_forms=skip_forms,
        limits=Limits(turns=turns, tokens_per_turn=tokens, seconds=None, seconds_per_turn=None),
    )
    if isinstance(environment, AgentFunction):
        environment.use_prompts(RenderedPrompts(context))
    groups: Sequence[Group] = [new_group(Row(id="0", messages=[{"role": "user", "content": "Hi"}]), size=size, seed=3)]

    async def run() -> None:
        await rollout_groups(groups, context)
        await engine.close()

    asyncio.run(run())
    trajectories = [one for group in groups for one in group.trajectories]
    assert [one.error for one in trajectories] == [None] * size
    for number, one in enumerate(trajectories):
        one.advantages = [1.0 + number] * len(one.turns)
    return model, renderer, trajectories


def largest_difference(
    model: Any, renderer: Renderer, trajectories: list[Trajectory], sampling: Sampling, **size: Any
) -> float:
    """The largest difference between the engine's log-probability of a token and the trainer's."""
    batch = pack(trajectories, masks=renderer.masks, **size)
    assert try_tree_attention(model)
    forward = Forward(model, sampling, chunk_bytes=4 * 265 * 7)
    with torch.no_grad():
        return max(
            float((forward.logprobs(micro)[0] - micro.targets.behaviour_logprob_N).abs().max())
            for micro in batch.micro_batches
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=40), Sampling(top_p=0.9)], ids=["plain", "top_k", "top_p"]
)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "rows"])
def test_required_calls_are_well_formed_and_both_sides_have_one_distribution(sampling: Sampling, shared: bool) -> None:
    model, renderer, trajectories = sampled(Constrained(choice="required"), sampling)
    turns = [turn for one in trajectories for turn in one.turns]
    finished = [turn for turn in turns if turn.finish_reason == "stop"]
    assert finished
    assert all(call.error is None and call.name == "search" for turn in finished for call in turn.calls)
    assert all(turn.calls and turn.calls[0].arguments["q"] in ("a", "bc") for turn in finished)
    assert any(len(turn.completion.token_ids) > 5 for turn in turns if turn.completion is not None)
    assert largest_difference(model, renderer, trajectories, sampling, share_prompts=shared) < 1e-6


@pytest.mark.slow
def test_a_recorded_trajectory_has_what_the_masks_need() -> None:
    model, renderer, trajectories = sampled(Constrained(choice="required"))
    again = [
        decode_trajectory(json.loads(json.dumps(trajectory_record(one, exact_logprobs=True))), where="here")
        for one in trajectories
    ]
    for one, read in zip(trajectories, again, strict=True):
        assert [turn.constraint for turn in read.turns] == [turn.constraint for turn in one.turns]
    assert largest_difference(model, renderer, again, Sampling()) < 1e-6


def test_the_mask_comes_before_temperature_and_filters() -> None:
    """Token 3 is forbidden and the most likely: top-k=2 keeps the two best of the others, which share the probability."""
    logits_NV = torch.tensor([[1.0, 0.0, 2.0, 9.0]])
    allowed = AllowedTokens(torch.tensor([[0b0111]], dtype=torch.int32), torch.tensor([0]))
    found = sampling_logits(logits_NV, top_k_N=2, allowed=allowed).softmax(dim=-1)
    first = 1 / (1 + math.e)
    assert found[0].tolist() == pytest.approx([first, 0.0, 1 - first, 0.0])
    free = AllowedTokens(allowed.words_MW, torch.tensor([-1]))
    assert torch.equal(sampling_logits(logits_NV, allowed=free), logits_NV)


def test_tokens_without_a_bit_are_not_allowed() -> None:
    """Models have more logits than tokenizers have tokens."""
    words_MW = torch.from_numpy(np.array([[0xFFFFFFFF, 1]], dtype=np.uint32).view(np.int32))
    mask_NV = AllowedTokens(words_MW, torch.tensor([0])).mask(70)
    assert mask_NV[0].tolist() == [True] * 33 + [False] * 37


class Prefilled(Offers):
    """The second turn begins with a part of a call, which the environment wrote."""

    prefill = '<tool_call>{"name": "sea'


@pytest.mark.slow
def test_a_prefill_is_part_of_what_the_grammar_describes() -> None:
    model, renderer, trajectories = sampled(Constrained(choice="required"), environment=Prefilled)
    second = [one.turns[1] for one in trajectories if len(one.turns) == 2 and one.turns[1].finish_reason == "stop"]
    assert second
    for turn in second:
        assert turn.text.startswith("rch")
        assert [call.name for call in turn.calls][:1] == ["search"]
    assert largest_difference(model, renderer, trajectories, Sampling()) < 1e-6


class InJson(Offers):
    """Asks for another form of the answer than the recipe."""

    change = SamplingChange(answer_format=AnswerFormat(kind="json_schema", value='{"enum": ["yes", "no"]}'))

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages, sampling=self.change)


def test_an_environment_can_ask_for_a_form_of_the_answer() -> None:
    model, renderer, trajectories = sampled(
        Constrained(answer=AnswerFormat(kind="regex", value="[0-9]+")), environment=InJson
    )
    texts = {turn.text.strip() for one in trajectories for turn in one.turns}
    assert texts <= {'"yes"', '"no"'}
    assert largest_difference(model, renderer, trajectories, Sampling()) < 1e-6


_ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_SUB = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.slow
def test_the_requests_of_an_agent_ask_for_forms() -> None:
    """Each turn has its own grammar, which the record has; the trainer's distribution is that of the engine."""

    tools: Any = [_ADD, _SUB]
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}},
        {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tools": tools, "tool_choice": "required"},
    ]
    seen: list[Any] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        for body in asked:
            answer = client.chat.completions.create(model="m", messages=row.messages, max_tokens=200, **body)
            seen.append(answer.choices[0].message)
        form = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}
        seen.append(client.responses.create(model="m", input="Hi", text={"format": form}))  # type: ignore[arg-type]

    make = AgentFunction(function=agent)
    try:
        model, renderer, trajectories = sampled(Constrained(), environment=make, size=1, turns=4)
    finally:
        asyncio.run(make.aclose())
    (one,) = trajectories
    assert one.error is None, one.error
    assert [turn.constraint is not None for turn in one.turns] == [True] * 4
    assert seen[0].content.strip() in ('"yes"', '"no"')
    # the client's limit may have cut the last one
    assert {call.name for call in one.turns[1].calls if call.error is None} <= {"sub"}
    assert {call.name for call in one.turns[2].calls if call.error is None} <= {"add", "sub"}
    assert seen[3].output_text.strip() in ('"yes"', '"no"')
    assert largest_difference(model, renderer, trajectories, Sampling()) < 1e-6


def test_a_beginning_that_the_recipes_form_does_not_allow_is_the_requests_error() -> None:
    import openai

    seen: list[str] = []

    def agent(row: Any, base_url: str, api_key: str) -> None:
        client = openai_client(base_url, api_key)
        with pytest.raises(openai.BadRequestError, match="does not allow it: begin it otherwise"):
            client.chat.completions.create(model="m", messages=[*row.messages, says("No")])
        seen.append(str(client.chat.completions.create(model="m", messages=[*row.messages, says("1")]).choices[0]))

    def says(text: str) -> Any:
        return {"role": "assistant", "content": text}

    make, form = AgentFunction(function=agent), AnswerFormat(kind="regex", value="[0-9]{1,4}")
    try:
        _, renderer, (one,) = sampled(Constrained(answer=form), environment=make, size=1)
    finally:
        asyncio.run(make.aclose())
    assert (one.error, len(one.turns), len(seen)) == (None, 1, 1)

    class Server(Says):
        constrains = True

    context = replace(a_table(Server()), renderer=renderer)
    RenderedPrompts(context).check_turn([], SamplingChange(), prefill="", arguments={})
    with pytest.raises(GrammarError, match="a server begins a grammar with the first token"):
        RenderedPrompts(context).check_turn([], SamplingChange(), prefill="1", arguments={})


def test_an_engine_without_grammars_refuses_the_form_that_an_environment_asks_for() -> None:
    (one,) = hold_all(Says("a"), InJson, size=1)
    assert one.error is not None
    assert "the engine does not sample under grammars" in one.error.message


def test_equal_tokens_under_other_grammars_are_other_predictions() -> None:
    """Two conversations with the same tokens: one was free, the other had two choices. In one tree, each keeps its own mask."""
    model, renderer, trajectories = sampled(Constrained(), environment=InJson, size=1, tokens=40)
    (one,) = trajectories
    free = replace(one, id="free", turns=[replace(turn, constraint=None) for turn in one.turns], advantages=[1.0, 5.0])
    batch = pack([one, free], masks=renderer.masks)
    assert try_tree_attention(model)
    with torch.no_grad():
        logprob_N = Forward(model, Sampling()).logprobs(batch.micro_batches[0])[0]
    sequence_N = batch.micro_batches[0].targets.sequence_N
    constrained_N, free_N = logprob_N[sequence_N == 0], logprob_N[sequence_N == 1]
    assert (constrained_N >= free_N - 1e-6).all()
    assert float((constrained_N - free_N).max()) > 1.0


def test_a_token_that_the_grammar_forbids_is_told() -> None:
    _, renderer, (one,) = sampled(Constrained(choice="required"), size=1)
    constraint = one.turns[0].constraint
    assert constraint is not None
    one.segments[0].token_ids[constraint.start] = renderer.encode("Z")[0]
    with pytest.raises(GrammarError, match=f"token {constraint.start} of a segment"):
        pack([one], masks=renderer.masks)
    with pytest.raises(GrammarError, match="nothing here computes the masks"):
        pack([one])
    run: Any = SimpleNamespace(
        learner=SimpleNamespace(requirements=SimpleNamespace(logprob_kinds=tuple(LogprobKind))),
        inputs=SimpleNamespace(renderer=renderer),
        policies=(),
        weigh_turns=lambda trajectory: None,
        step=0,
    )
    _weigh(run, [Group(id="g", row=one.row, trajectories=[one])])  # before an update, it fails alone
    assert one.error is not None
    assert f"token {constraint.start} of a segment" in one.error.message


def test_a_schema_that_cannot_be_a_grammar_is_refused_with_the_place() -> None:
    renderer = Renderer(byte_tokenizer(), constrained=Constrained(calls=True))
    part = {"type": "array", "items": {"type": "string", "pattern": "(?=x)y"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": part}}}}
    with pytest.raises(
        GrammarError, match=r"tool f: parameters/properties/a/items cannot be a grammar: (?s:.)*look-around"
    ):
        renderer.constraint([tool])
    with pytest.raises(GrammarError, match="response_format: the regular expression"):
        renderer.constraint([], SamplingChange(answer_format=AnswerFormat(kind="regex", value="(")))


def test_the_options_of_the_recipe_reach_the_turns(tmp_path: Path) -> None:
    def constraint(*overrides: str) -> str:
        recipe = with_overrides(
            {"model": {"path": str(tmp_path)}, "data": {"train": "rows.jsonl"}, "tools": [TOOL]},
            overrides,
            source="here",
        )[0]
        found = assembly.renderer(recipe).constraint([SEARCH])
        return "" if found is None else found.grammar

    byte_tokenizer().save_pretrained(tmp_path)
    assert constraint() == ""
    assert constraint("tool_calls.constrain=true").endswith("start: (call_in_text)* TEXT\n")
    assert constraint("tool_calls.choice=required").endswith("WS calls WS\n")
    form = "sampling.response_format={type: regex, pattern: a/b}"
    assert "ANSWER: /a\\/b/" in constraint(form)
    assert constraint(form).endswith("WS calls WS | answer\n")
    assert constraint("sampling.response_format={type: json_object}").endswith("WS calls WS | WS answer WS\n")
    for wrong, message in (
        (
            ("engine.name=scripted", "engine.script=s.jsonl"),
            "engine.name=scripted samples no turn under a grammar: use engine.name=local",
        ),
        (("reward.kl.coef=0.1",), r"reward\.kl\.coef=0\.1 compares .* set loss\.kl_coef instead, which applies them"),
        (
            ("teacher.path=t",),
            "the teacher scores tokens without the masks of a grammar, .*: remove teacher, or the form",
        ),
        (("teacher.url=http://127.0.0.1:1",), "the teacher scores tokens without the masks of a grammar"),
        (("sampling.response_format={type: xml}",), "is no form of an answer"),
    ):
        with pytest.raises(ConfigError, match=message):
            constraint("tool_calls.constrain=true", *wrong)


@pytest.mark.parametrize("option", ["teacher.path=t", "reward.kl.coef=0.1"])
def test_forms_that_environments_ask_for_are_refused_where_tokens_are_scored_without_masks(
    option: str, tmp_path: Path
) -> None:
    base = {"model": {"path": str(tmp_path)}, "data": {"train": "rows.jsonl"}}
    refused, masked = (
        no_grammar(with_overrides(base, [one], source="here")[0]) for one in (option, "loss.kl_coef=0.1")
    )
    assert option.partition(".")[0] in refused
    assert masked == ""


def test_turns_under_a_grammar_of_servers_are_trained_on_if_the_recipe_says_so(tmp_path: Path) -> None:
    def recipe(*overrides: str) -> Any:
        base = {"model": {"path": str(tmp_path)}, "data": {"train": "rows.jsonl"}}
        return with_overrides(base, ["engine.name=vllm", *overrides], source="here")[0]

    form = "sampling.response_format={type: json_object}"
    assert constrained(recipe("engine.grammars=train", form)).answer is not None
    for wrong, message in (
        ([], "engine.name=vllm samples no turn under a grammar: set engine.grammars"),
        (["engine.grammars=skip"], "with engine.grammars=skip, no such turn is trained on: set engine.grammars=train"),
    ):
        with pytest.raises(ConfigError, match=message):
            constrained(recipe(form, *wrong))
    # forms that environments ask for
    for grammars, trained in (("train", True), ("skip", False)):
        assert recipe(f"engine.grammars={grammars}").engine.trains_constrained is trained
        _, renderer, (one,) = sampled(Constrained(), environment=InJson, size=1, skip_forms=not trained)
        assert (max(one.segments[0].turn) >= 0) is trained
        assert one.turns[0].constraint is not None
        assert bool(pack([one], masks=renderer.masks).micro_batches) is trained


def test_a_format_without_json_arguments_is_refused_by_its_name() -> None:
    renderer = Renderer(byte_tokenizer(), constrained=Constrained(calls=True), tool_format="qwen3_coder")
    with pytest.raises(TemplateError, match="calls of the format qwen3_coder cannot be constrained"):
        renderer.constraint([SEARCH])


def fits(
    renderer: Renderer,
    text: str,
    *,
    opened: str = "",
    choice: Any = None,
    answer: Any = None,
    tools: Sequence[ToolSchema] = (SEARCH,),
) -> str:
    """The beginning of a text that the grammar allows; with "$" if the turn may end there."""
    stop = renderer.encode("<|im_end|>")[0]
    change = SamplingChange(tool_choice=choice, answer_format=answer)
    constraint = renderer.constraint(tools, change, stops=[stop], reasoning_opening=opened)
    assert constraint is not None
    matcher = renderer.masks.matcher(constraint)
    for passed, token in enumerate(renderer.encode(text)):
        if not matcher.allowed()[token >> 5] >> (token & 31) & 1:
            return text[:passed]
        matcher.advance(token)
    return text + ("$" if matcher.allowed()[stop >> 5] >> (stop & 31) & 1 else "")


CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "a"}}\n</tool_call>'


def test_text_is_free_up_to_a_call_and_calls_are_not() -> None:
    renderer = Renderer(byte_tokenizer(), constrained=Constrained(calls=True))
    assert fits(renderer, "free {text} <tool") == "free {text} <tool$"
    assert fits(renderer, f"Let me see. {CALL}\n{CALL} done") == f"Let me see. {CALL}\n{CALL} done$"
    assert fits(renderer, '<tool_call>\n{"name": "find"') == '<tool_call>\n{"name": "'
    assert (
        fits(renderer, '<tool_call>{"name": "search", "arguments": {"z"')
        == '<tool_call>{"name": "search", "arguments": {"'
    )
    assert fits(renderer, "a<|im_start|>") == "a"
    # required: nothing but calls
    assert fits(renderer, f"{CALL}{CALL}", choice="required") == f"{CALL}{CALL}$"
    assert fits(renderer, "Let me", choice="required") == ""
    assert fits(renderer, "", choice="required") == ""


def test_reasoning_is_free_also_of_calls() -> None:
    renderer = Renderer(byte_tokenizer(THINKS), constrained=Constrained(calls=True))
    assert fits(renderer, "maybe <tool_call>x</think>yes", opened="<think>\n") == "maybe <tool_call>x</think>yes$"
    assert (
        fits(renderer, "<think>maybe <tool_call>x</think><tool_call>x")
        == "<think>maybe <tool_call>x</think><tool_call>"
    )
    assert fits(renderer, f"hm</think>{CALL}", opened="<think>\n", choice="required") == f"hm</think>{CALL}$"
    assert fits(renderer, "hm</think>no", opened="<think>\n", choice="required") == "hm</think>"
    assert fits(renderer, "never closed", opened="<think>\n") == "never closed$"


def test_no_text_is_in_front_of_reasoning_where_the_turn_has_a_form() -> None:
    renderer = Renderer(byte_tokenizer(THINKS))
    digits = AnswerFormat(kind="regex", value="[0-9]+")
    assert fits(renderer, "<think>hm <th</think>\n12", answer=digits) == "<think>hm <th</think>\n12$"
    assert fits(renderer, "12", answer=digits) == "12$"
    assert fits(renderer, f"\n<think>hm</think>{CALL}", choice="required") == f"\n<think>hm</think>{CALL}$"
    assert fits(renderer, f"<think>hm</think>{CALL}", answer=digits) == f"<think>hm</think>{CALL}$"
    for choice, answer in ((None, digits), ("required", None)):
        assert fits(renderer, "Free text. <think>x</think>", choice=choice, answer=answer) == ""


def test_an_answer_of_a_regular_expression_is_exact() -> None:
    digits, json_object = AnswerFormat(kind="regex", value="[0-9]+"), AnswerFormat(kind="json_object", value="")
    for thinks in (False, True):
        renderer = Renderer(byte_tokenizer(THINKS) if thinks else byte_tokenizer())
        assert fits(renderer, "12 ", answer=digits) == "12"
        assert fits(renderer, "\n12", answer=digits) == "\n"  # a call may follow
        assert fits(renderer, f"\n{CALL}\n", answer=digits) == f"\n{CALL}\n$"
        assert fits(renderer, "\n{}\n", answer=json_object) == "\n{}\n$"
        # without tools, nothing may follow
        assert fits(renderer, "\n", answer=digits, tools=[]) == ""
    assert fits(renderer, "<think>hm</think>\n\n12\n", answer=digits, tools=[]) == "<think>hm</think>\n\n12"
    assert fits(renderer, "hm</think>\n\n12", opened="<think>\n", answer=digits) == "hm</think>\n\n12$"


def test_white_space_inside_of_json_is_that_of_a_line_or_an_indentation() -> None:
    def answer(**schema: Any) -> AnswerFormat:
        return AnswerFormat(kind="json_schema", value=json.dumps({**SCHEMA, **schema}))

    renderer = Renderer(byte_tokenizer())
    compact, indented = '{"q":"a","n":true}', json.dumps({"q": "a", "n": True}, indent=4)
    for text in (compact, json.dumps({"q": "a", "n": True}), indented):
        assert fits(renderer, text, answer=answer(), tools=[]) == f"{text}$"
    assert fits(renderer, '{\n\n"q"', answer=answer(), tools=[]) == "{\n"
    assert fits(renderer, '{"q":   "a"', answer=answer(), tools=[]) == '{"q":  '
    endless = CALL.replace(': "a"', ":\n\n\n")
    assert fits(renderer, endless, choice="required") == endless[: endless.index("\n\n\n") + 1]
    # what a schema says of white space itself holds
    own = answer(**{"x-guidance": {"whitespace_flexible": False}})
    assert fits(renderer, indented, answer=own, tools=[]) == "{"
    assert fits(renderer, compact, answer=own, tools=[]) == f"{compact}$"
    whole = answer(**{"$ref": "#/$defs/x", "$defs": {"x": {"enum": [[1, 2]]}}, "type": "array", "required": []})
    assert fits(renderer, "[1,\n\n", answer=whole, tools=[]) == "[1,\n"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b"), ("[/]", "/"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb")],
)
def test_a_pattern_may_have_slashes(pattern: str, text: str) -> None:
    assert fits(Renderer(byte_tokenizer()), text, answer=AnswerFormat(kind="regex", value=pattern)) == f"{text}$"


@pytest.mark.slow
def test_a_constrained_run_passes_its_checks_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["steps=1", "batch_size=2", "group_size=2", "micro_batch_tokens=4096"]
    options = ["tool_calls.constrain=true", "model.device=cpu", "eval.every=0", *(f"train.{one}" for one in overrides)]
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["train", "recipes/calculator.yaml", *options, f"output={tmp_path / 'run'}"]) == 0
    (step,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert 0 < step["ratio/max_deviation"] < 1e-4
    assert main(["replay", str(tmp_path / "run"), "--all"]) == 0


def test_the_check_of_credit_takes_conversations_with_forms() -> None:
    """Its turns are given texts, which no grammar has made."""
    form = AnswerFormat.of({"type": "regex", "pattern": "[0-9]"})
    assert conserved(Renderer(byte_tokenizer(), constrained=Constrained(answer=form)), "keep").status == "ok"
