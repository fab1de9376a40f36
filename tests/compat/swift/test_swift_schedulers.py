"""What a scheduler says with messages, ids, masks, log-probabilities and `request_config`, and which turns are learnt from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import byte_tokenizer
from support.conversations import RENDERER, STOP, Says, a_row, call, spoken
from support.swift import ASKED, learnt, play, whole
from support.templates import SWITCHES
from turnwise.assembly import turn_weighting
from turnwise.chat.renderer import Renderer
from turnwise.commands.convert import converted
from turnwise.compat.swift.protocol import (
    RequestConfig,
    ReturnedTokens,
    RolloutOutput,
    SampledTurn,
    mask_outputs,
    mask_turn,
)
from turnwise.compat.swift.rewards import arguments_of
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.config.recipe import load
from turnwise.types import Row, Stop, Trajectory

# What a scheduler says with messages, ids, masks and log-probabilities, and what the conversation makes of it.


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

OTHER = {"type": "function", "function": {"name": "sub", "description": "Subtracts.", "parameters": {"type": "object"}}}


class Does(MultiTurnScheduler):
    """Does to the request what a test wants, after the first turn."""

    what: Any = None

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        said = type(self).what(infer_request, response_choice)
        return {"infer_request": infer_request, **(said or {})}


def does(what: Any, *said: Any, row: Row | None = None, **options: Any) -> Trajectory:
    kind = type("Does", (Does,), {"what": staticmethod(what)})
    return play(kind, *(said or ("one", "two")), row=row, **{"max_turns": 2, **options})


def user(request: Any, text: str = "More.") -> None:
    request.messages.append({"role": "user", "content": text})


def test_what_a_scheduler_is_handed_is_the_row_and_the_turn_as_they_are() -> None:
    seen: dict[str, Any] = {}

    def look(request: Any, choice: Any) -> None:
        seen.update(
            messages=[dict(message) for message in request.messages],
            data=request.data_dict,
            tools=request.tools,
            images=request.images,
            uuid=request.uuid,
            choice=choice,
        )
        user(request)

    row = a_row("Hi", id="7", solution="4", extra={"a": [1]}, tools=[TOOL])
    trajectory = does(look, "one", "two", row=row)
    assert trajectory.error is None, trajectory.error
    assert seen["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one"}]
    assert seen["data"] == {"solution": "4", "extra": {"a": [1]}}
    assert (seen["tools"], seen["images"]) == ([TOOL], [])
    assert seen["uuid"].startswith("7-")
    choice = seen["choice"]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "one", "stop")
    assert choice.token_ids == [*RENDERER.encode("one"), STOP]
    assert [one["logprob"] for one in choice.logprobs["content"]] == [-0.125, -0.25, -0.375, -0.5]
    assert trajectory.tools == (TOOL,)


def test_what_a_scheduler_changes_in_a_row_is_its_own() -> None:
    row = a_row("Hi", deep={"list": [1]})

    def change(request: Any, choice: Any) -> None:
        request.data_dict["deep"]["list"].append(2)
        user(request)

    whole(does(change, row=row))
    assert row.fields == {"deep": {"list": [1]}}


def test_tool_messages_go_on_with_the_conversation() -> None:
    def tool(request: Any, choice: Any) -> None:
        request.messages.append({"role": "tool", "content": "5"})

    trajectory = whole(does(tool))
    assert "<tool_response>\n5\n</tool_response>" in spoken(trajectory.segments[0])[2][1]


def test_an_untouched_request_lets_the_model_go_on_with_its_answer() -> None:
    trajectory = whole(does(lambda request, choice: None, "one", " two"))
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "one"), (1, " two<|im_end|>")]
    assert trajectory.messages[-1]["content"] == "one two"
    assert trajectory.turns[1].info["completion"] == "one two"


def test_a_replaced_history_begins_a_new_segment_and_former_turns_stay_trained() -> None:
    def compress(request: Any, choice: Any) -> None:
        request.messages = [{"role": "user", "content": "So far: " + choice.message.content}]

    trajectory = whole(does(compress))
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "one<|im_end|>")],
        [(-1, "<|im_start|>user\nSo far: one<|im_end|>\n<|im_start|>assistant\n"), (1, "two<|im_end|>")],
    ]


def test_an_answer_that_is_edited_before_a_further_message_is_another_history() -> None:
    def edit(request: Any, choice: Any) -> None:
        request.messages[-1]["content"] = "ONE"
        user(request)

    first, second = whole(does(edit)).segments
    assert spoken(first) == [(-1, ASKED), (0, "one<|im_end|>")]
    assert [turn for turn, _ in spoken(second)] == [-1, 1]
    assert "assistant\nONE<|im_end|>" in spoken(second)[0][1]


def test_ids_and_a_mask_say_which_sampled_tokens_are_learnt_from() -> None:
    def mask(request: Any, choice: Any) -> dict[str, Any]:
        user(request)
        return {"response_token_ids": choice.token_ids, "response_loss_mask": [0, 1, 1, 0]}

    trajectory = whole(does(mask))
    assert learnt(trajectory.segments[0], 0) == [*RENDERER.encode("ne")]
    assert [turn for turn, text in spoken(trajectory.segments[0])] == [-1, 0, -1, 1]


def test_tool_tokens_behind_an_edited_answer_are_context_as_the_text_says() -> None:
    """The ToolCallScheduler of ms-swift's examples: text and ids are both extended, the latter with mask 0."""

    def extend(request: Any, choice: Any) -> dict[str, Any]:
        request.messages[-1]["content"] += " 42"
        ids = choice.token_ids
        mask = [1] * len(ids)
        result = list(RENDERER.encode(" 42"))
        return {"response_token_ids": ids + result, "response_loss_mask": mask + [0] * len(result)}

    trajectory = whole(does(extend))
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "one"), (-1, " 42"), (1, "two<|im_end|>")]
    assert "not_sampled" not in trajectory.turns[0].info


def test_tokens_that_were_not_sampled_are_never_learnt_from_even_if_the_mask_says_so() -> None:
    def pretend(request: Any, choice: Any) -> dict[str, Any]:
        request.messages[-1]["content"] += " 42"
        ids = choice.token_ids + list(RENDERER.encode(" 42"))
        return {"response_token_ids": ids, "response_loss_mask": [1] * len(ids)}

    trajectory = whole(does(pretend))
    assert spoken(trajectory.segments[0])[2] == (-1, " 42")
    assert trajectory.turns[0].info["not_sampled"] == 3


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"response_token_ids": [5, 6]},
            r"turn 1: response_token_ids has 2 tokens, but the model sampled 4; they differ",
        ),
        ({"response_loss_mask": [1, 1]}, r"response_loss_mask has 2 values for 4 sampled tokens"),
        ({"response_loss_mask": [1, 1, 2, 1]}, r"response_loss_mask contains 2; its values must be 0 or 1"),
        ({"rollout_logprobs": [-0.1]}, r"rollout_logprobs has 1 values for 4 tokens whose mask is 1"),
        ({"rollout_logprobs": [-0.1] * 4}, r"rollout_logprobs has -0\.1 for token 0, which was sampled with -0\.125"),
        ({"infer_request": None}, r"Does\.step must return \{'infer_request': RolloutInferRequest"),
    ],
)
def test_numbers_that_do_not_fit_break_their_own_conversation_and_say_so(said: dict[str, Any], why: str) -> None:
    def wrong(request: Any, choice: Any) -> dict[str, Any]:
        user(request)
        return said

    trajectory = does(wrong)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    import re

    assert re.search(why, trajectory.error.message), trajectory.error.message


def test_logprobs_that_are_right_are_accepted() -> None:
    def give(request: Any, choice: Any) -> dict[str, Any]:
        user(request)
        return {
            "response_loss_mask": [1, 0, 1, 0],
            "rollout_logprobs": [choice.logprobs["content"][n]["logprob"] for n in (0, 2)],
        }

    trajectory = whole(does(give))
    assert learnt(trajectory.segments[0], 0) == [*RENDERER.encode("oe")]


def test_hooks_are_called_in_order_and_infos_are_merged_turn_by_turn() -> None:
    calls: list[str] = []

    class Hooks(MultiTurnScheduler):
        async def on_trajectory_start(self, requests: list[Any]) -> None:
            calls.append("start")
            requests[0].messages.insert(0, {"role": "system", "content": "Be brief."})

        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            calls.append(f"end {current_turn}")
            return {"rollout_infos": {"seen": current_turn}, **({"done": True} if current_turn == 3 else {})}

        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            calls.append(f"check {current_turn}")
            return False

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            calls.append(f"step {current_turn}")
            user(infer_request)
            return {"infer_request": infer_request, "rollout_infos": {"stepped": current_turn}}

        async def on_trajectory_end(self, infer_request: Any) -> None:
            calls.append(f"over {len(infer_request.messages)}")

    trajectory = whole(play(Hooks, "a", "b", "c", "d"))
    assert calls == [
        "start", "end 1", "check 1", "step 1", "end 2", "check 2", "step 2", "end 3", "check 3", "over 7",
    ]  # fmt: skip
    assert [turn.info for turn in trajectory.turns] == [
        {"seen": 1, "stepped": 1},
        {"seen": 2, "stepped": 2},
        {"seen": 3},
    ]
    assert trajectory.messages[0] == {"role": "system", "content": "Be brief."}


def test_one_scheduler_for_all_conversations_is_called_by_one_at_a_time() -> None:
    from support.conversations import hold_all
    from support.swift import made

    class Counts(MultiTurnScheduler):
        inside = 0
        most = 0
        total = 0

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            import time

            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.005)
            self.total += 1
            self.inside -= 1
            user(infer_request)
            return {"infer_request": infer_request, "rollout_infos": {"most": self.most, "total": self.total}}

    with made(Counts, max_turns=2, shared=True) as make:
        shared = hold_all(Says("a", "b"), make, size=4)
    assert sorted(one.turns[0].info["total"] for one in shared) == [1, 2, 3, 4]
    assert {one.turns[0].info["most"] for one in shared} == {1}
    with made(Counts, max_turns=2) as make:
        own = hold_all(Says("a", "b"), make, size=4)
    assert [one.turns[0].info["total"] for one in own] == [1, 1, 1, 1]


def one_pass(messages: Any, tools: Any) -> list[int]:
    """The prompt that an inference server makes of a conversation, by the tokenizer alone."""
    text = RENDERER.tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, tokenize=False
    )
    return RENDERER.tokenizer.encode(text, add_special_tokens=False)


def prompt_of(trajectory: Trajectory, segment: int, turn: int) -> list[int]:
    columns = trajectory.segments[segment]
    return list(columns.token_ids[: columns.turn.index(turn)])


def replaced(request: Any) -> None:
    request.tools = [OTHER]


def edited_in_place(request: Any) -> None:
    request.tools[0] = {**OTHER, "function": {**OTHER["function"]}}


def without_wrapper(request: Any) -> None:
    request.tools = [OTHER["function"]]


@pytest.mark.parametrize("change", [replaced, edited_in_place, without_wrapper])
def test_tools_that_a_scheduler_changes_are_in_the_next_prompt_and_in_a_new_segment(change: Any) -> None:
    def tools(request: Any, choice: Any) -> None:
        change(request)
        user(request)

    trajectory = whole(does(tools, "one", call("sub"), row=a_row("Hi", tools=[TOOL])))
    assert [turn.tools for turn in trajectory.turns] == [(TOOL,), (OTHER,)]
    assert [[one.name for one in turn.calls] for turn in trajectory.turns] == [[], ["sub"]]
    assert len(trajectory.segments) == 2
    assert trajectory.previous_histories == []
    assert prompt_of(trajectory, 0, 0) == one_pass(trajectory.messages[:1], [TOOL])
    assert prompt_of(trajectory, 1, 1) == one_pass(trajectory.messages[:3], [OTHER])
    assert [learnt(trajectory.segments[n], n) for n in (0, 1)] == [
        [*RENDERER.encode(text), STOP] for text in ("one", call("sub"))
    ]


def test_arguments_of_the_template_come_from_the_row_and_may_be_changed_by_a_scheduler() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    seen: list[Any] = []

    def switch(request: Any, choice: Any) -> None:
        seen.append((dict(request.chat_template_kwargs), "chat_template_kwargs" in request.data_dict))
        request.chat_template_kwargs["enable_thinking"] = True
        user(request)

    row = a_row("Hi", chat_template_kwargs={"enable_thinking": False})
    trajectory = whole(does(switch, "one", "two", row=row, table={"renderer": renderer}))
    assert seen == [({"enable_thinking": False}, False)]
    assert row.fields["chat_template_kwargs"] == {"enable_thinking": False}
    first, second = trajectory.segments
    assert spoken(first)[0][1].endswith("assistant\n<think>\n\n</think>\n\n")
    assert spoken(second)[0][1].endswith("More.<|im_end|>\n<|im_start|>assistant\n")

    class Leads(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **others: Any) -> Any:
            for thinking in (False, False, True):
                infer_request.chat_template_kwargs = {"enable_thinking": thinking}
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
                user(infer_request)
            infer_request.messages.pop()
            return RolloutOutput(response=response, messages=infer_request.messages)

    trajectory = whole(play(Leads, "one", "two", "three", table={"renderer": renderer}))
    assert [len({*segment.turn} - {-1}) for segment in trajectory.segments] == [2, 1]


def test_tools_may_change_while_the_model_continues_its_answer() -> None:
    def tools(request: Any, choice: Any) -> None:
        request.tools = None

    trajectory = whole(does(tools, "one", " two", row=a_row("Hi", tools=[TOOL])))
    assert [turn.tools for turn in trajectory.turns] == [(TOOL,), ()]
    assert len(trajectory.segments) == 2
    assert prompt_of(trajectory, 1, 1) == [*one_pass([{"role": "user", "content": "Hi"}], []), *RENDERER.encode("one")]
    assert learnt(trajectory.segments[0], 0) == [*RENDERER.encode("one"), STOP]
    assert learnt(trajectory.segments[1], 1) == [*RENDERER.encode(" two"), STOP]
    assert trajectory.messages[-1]["content"] == "one two"


def test_the_run_of_a_scheduler_may_change_the_tools() -> None:
    class Runs(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            for tools in ([TOOL], [TOOL, OTHER], [TOOL, OTHER]):
                infer_request.tools = tools
                response = await self.infer_engine.infer_async(infer_request, request_config)
                infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
                user(infer_request)
            infer_request.messages.pop()
            return RolloutOutput(response, infer_request.messages)

    trajectory = whole(play(Runs, "one", "two", "three"))
    assert [turn.tools for turn in trajectory.turns] == [(TOOL,), (TOOL, OTHER), (TOOL, OTHER)]
    assert [sorted(set(segment.turn)) for segment in trajectory.segments] == [[-1, 0], [-1, 1, 2]]
    assert prompt_of(trajectory, 1, 1) == one_pass(trajectory.messages[:3], [TOOL, OTHER])


def test_tools_changed_after_the_last_turn_change_nothing() -> None:
    class Ends(MultiTurnScheduler):
        def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
            infer_request.tools = [OTHER]
            return True

    trajectory = whole(play(Ends, "one", row=a_row("Hi", tools=[TOOL])))
    assert (trajectory.tools, len(trajectory.segments)) == ((TOOL,), 1)


def test_what_cannot_be_reported_to_a_model_here_is_refused_and_not_left_out() -> None:
    def add_audio(request: Any, choice: Any) -> None:
        request.audios.append("a.wav")
        user(request)

    def wrong_tools(request: Any, choice: Any) -> None:
        request.tools = [5]
        user(request)

    def open_end(request: Any, choice: Any) -> None:
        request.add_eos = True

    for what, why in (
        (add_audio, "the request has audios, which is not supported here"),
        (wrong_tools, "the tools of the scheduler's request must be schemas; one of them is 5"),
        (open_end, "add_eos=True is not supported here"),
    ):
        error = does(what).error
        assert error is not None
        assert why in error.message


# masks by themselves


@given(
    sampled=st.lists(st.integers(3, 20), min_size=1, max_size=8),
    given_ids=st.lists(st.integers(3, 20), max_size=10),
    ones=st.lists(st.integers(0, 1), min_size=10, max_size=10),
)
def test_only_tokens_that_agree_with_the_sampled_ones_and_have_mask_1_are_learnt(
    sampled: list[int], given_ids: list[int], ones: list[int]
) -> None:
    mask = ones[: len(given_ids)]
    if not given_ids:
        return
    masked = mask_turn(ReturnedTokens(given_ids, mask), sampled, [0.0] * len(sampled), turn=1, edited=True)
    left = [n for n in range(len(sampled)) if n not in masked.positions]
    agree = 0
    while agree < min(len(sampled), len(given_ids)) and sampled[agree] == given_ids[agree]:
        agree += 1
    assert left == [n for n in range(agree) if mask[n]]
    assert masked.not_sampled == sum(mask[agree:])


def outputs(*ids: list[list[int]], masks: Any = None) -> list[RolloutOutput]:
    return [
        RolloutOutput(response_token_ids=one, response_loss_mask=masks[n] if masks else []) for n, one in enumerate(ids)
    ]


def test_outputs_of_run_are_found_in_the_turns_and_turns_in_none_are_left_out() -> None:
    turns = [SampledTurn(0, [5, 6, 2]), SampledTurn(1, [7, 2]), SampledTurn(2, [8, 9, 2])]
    assert mask_outputs(outputs([[5, 6, 2]], [[7, 2]], [[8, 9, 2]]), turns).masked == {}
    assert mask_outputs(outputs([[5, 6, 2], [7, 2], [8, 9, 2]]), turns).masked == {}
    assert mask_outputs(outputs([[8, 9, 2]]), turns).masked == {0: [0, 1, 2], 1: [0, 1]}
    assert mask_outputs(outputs([[5, 6, 2]], [[7]], masks=[[[1, 0, 0]], [[1]]]), turns).masked == {
        0: [1, 2],
        2: [0, 1, 2],
    }
    # between them there may be what the scheduler put there, masked
    together = [5, 6, 2, 40, 41, 7, 2]
    assert mask_outputs(outputs([together], masks=[[[1, 1, 1, 0, 0, 1, 1]]]), turns).masked == {2: [0, 1, 2]}
    assert mask_outputs([RolloutOutput()], turns).masked == {}


def test_each_output_of_run_is_a_record_whose_last_round_is_learnt_from_or_what_its_mask_says() -> None:
    turns = [SampledTurn(0, [5, 6, 2]), SampledTurn(1, [7, 2]), SampledTurn(2, [8, 9, 2])]

    def of(*args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        found = mask_outputs(outputs(*args, **kwargs), turns)
        return found.train_on, found.output_ends

    assert of([[5, 6, 2]], [[7, 2]], [[8, 9, 2]]) == ([0, 1, 2], [0, 1, 2])
    assert of([[5, 6, 2], [7, 2], [8, 9, 2]]) == ([2], [2])
    assert of([[5, 6, 2], [7, 2]], [[8, 9, 2]]) == ([1, 2], [1, 2])
    assert of([[5, 6, 2], [7, 2]], masks=[[[1, 1, 0], [1, 1]]]) == ([0, 1], [1])
    answers = [{"role": role, "content": "x"} for role in ("user", "assistant", "tool", "assistant", "assistant")]
    whole_round = RolloutOutput(messages=answers, response_token_ids=[[5, 6, 2], [7, 2], [8, 9, 2]])
    assert mask_outputs([whole_round], turns).train_on == [1, 2]
    assert mask_outputs([RolloutOutput()] * 3, turns).train_on == [0, 1, 2]
    assert mask_outputs([RolloutOutput()] * 2, turns).train_on == []


def test_outputs_of_run_that_fit_no_turn_are_refused() -> None:
    turns = [SampledTurn(0, [5, 6, 2])]
    with pytest.raises(
        ValueError,
        match=r"output 1 of run: the mask is 1 at position 3 of 5 response_token_ids, but the model did not sample token 40",
    ):
        mask_outputs(outputs([[5, 6, 2, 40, 41]]), turns)
    with pytest.raises(ValueError, match=r"response_loss_mask has 1 lists for 2 of response_token_ids"):
        mask_outputs(outputs([[5], [6]], masks=[[[1]]]), turns)
    with pytest.raises(ValueError, match=r"has response_loss_mask or rollout_logprobs, but no response_token_ids"):
        mask_outputs([RolloutOutput(response_loss_mask=[[1]])], turns)
    one = RolloutOutput(response_token_ids=[[5, 6, 2]], rollout_logprobs=[[-0.1]])
    with pytest.raises(ValueError, match=r"rollout_logprobs has 1 values for 3 tokens whose mask is 1"):
        mask_outputs([one], turns)


# `loss_scale last_round`: which turns are learnt from, and which records a reward function is handed.


SCRIPT = """
swift rollout --model Qwen/Qwen3-1.7B --use_async_engine true --multi_turn_scheduler thinking_tips_scheduler \\
    --vllm_max_model_len 32768 --vllm_gpu_memory_utilization 0.8 --max_turns 3
swift rlhf --rlhf_type grpo --model Qwen/Qwen3-1.7B --tuner_type full --dataset AI-MO/NuminaMath-TIR#5000 \\
    --loss_scale last_round --use_vllm true --vllm_mode server --max_steps 10 --reward_funcs accuracy
"""
"""Document 2's commands."""

TIP = "Wrong, try again."


class Records(MultiTurnScheduler):
    """A record for each turn, as thinking schedulers have it: the history without the thoughts of earlier answers."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            inputs = type("Inputs", (), {"messages": copy.deepcopy(infer_request.messages)})()
            self.infer_engine.template._swift_prepare_inputs(inputs)
            infos = {"num_turns": len(outputs) + 1}
            outputs.append(
                RolloutOutput(
                    response, messages=inputs.messages, response_token_ids=choice.token_ids, rollout_infos=infos
                )
            )
            if len(outputs) == self.max_turns:
                return outputs
            infer_request.messages.append({"role": "user", "content": TIP})


def weighed(trajectory: Trajectory, tmp_path: Path) -> list[float]:
    """The weights of the turns by the recipe that document 2's script becomes."""
    script, recipe = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    script.write_text(SCRIPT)
    from turnwise.commands.convert import as_recipe

    recipe.write_text(as_recipe(converted("swift", [str(script)])))
    config, _ = load(recipe)
    turn_weighting(config)(trajectory)
    return [turn.weight for turn in trajectory.turns]


@pytest.mark.parametrize("kind", ["thinking_tips_scheduler", Records])
@pytest.mark.parametrize("thought", ["<think>Hm.</think> ", ""])
def test_document_2s_script_learns_from_the_last_round_of_each_record(kind: Any, thought: str, tmp_path: Path) -> None:
    row = a_row("2 + 2?", solution="\\boxed{4}")
    trajectory = whole(play(kind, f"{thought}\\boxed{{5}}", f"{thought}\\boxed{{4}}", row=row, max_turns=2))
    assert weighed(trajectory, tmp_path) == [1, 1]
    for turn in trajectory.turns:
        assert turn.completion is not None
        sampled = [learnt(segment, turn.index) for segment in trajectory.segments]
        assert [ids for ids in sampled if ids] == [list(turn.completion.token_ids)]


@pytest.mark.parametrize("kind", ["thinking_tips_scheduler", Records])
@pytest.mark.parametrize("thought", ["<think>Hm.</think> ", ""])
def test_a_reward_is_handed_each_record(kind: Any, thought: str) -> None:
    row = a_row("2 + 2?", solution="\\boxed{4}")
    trajectory = whole(play(kind, f"{thought}\\boxed{{5}}", f"{thought}\\boxed{{4}}", row=row, max_turns=2))
    completions, columns = arguments_of(trajectory)
    (records,) = columns["trajectory_inputs"].values()  # type: ignore[attr-defined]
    first, second = ([message["content"] for message in record["messages"]] for record in records)
    assert first == ["2 + 2?", f"{thought}\\boxed{{5}}"]
    assert second[:2] == ["2 + 2?", "\\boxed{5}"]
    assert second[3:] == completions == [f"{thought}\\boxed{{4}}"]
    assert columns["rollout_infos"] == [{"num_turns": 2}]


class Steps(MultiTurnScheduler):
    """Steps that say what of the first answer is learnt from, or do not."""

    masks = True

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": TIP})
        ids = response_choice.token_ids
        mask = {"response_loss_mask": [1] * (len(ids) - 1) + [0]} if self.masks else {}
        return {"infer_request": infer_request, "response_token_ids": ids, **mask}


def test_loss_scale_is_ignored_where_there_is_a_loss_mask(tmp_path: Path) -> None:
    assert weighed(whole(play(Steps, "a", "b", max_turns=2)), tmp_path) == [1, 1]
    without = type("Without", (Steps,), {"masks": False})
    assert weighed(whole(play(without, "a", "b", max_turns=2)), tmp_path) == [0, 1]

    class Run(Steps):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            return await super().run(infer_request, request_config, **kwargs)

    assert weighed(whole(play(Run, "a", "b", max_turns=2)), tmp_path) == [1, 1]
    without = type("Without", (Run,), {"masks": False})
    assert weighed(whole(play(without, "a", "b", max_turns=2)), tmp_path) == [0, 1]


# A `request_config` that a scheduler changes: how many tokens a turn has, and which texts end it.


def config(**values: Any) -> RequestConfig:
    return RequestConfig(logprobs=True, **values)


class RequestConfigSteps(MultiTurnScheduler):
    """Returns a changed request_config after the first turn, and none after the second."""

    changed: ClassVar[dict[str, Any]] = {}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "More."})
        returned = {"request_config": config(**type(self).changed)} if current_turn == 1 else {}
        return {"infer_request": infer_request, **returned}


class CallsRun(RequestConfigSteps):
    """The same, through the `run` that it overrides."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        return await super().run(infer_request, request_config, **kwargs)


@pytest.mark.parametrize("base", [RequestConfigSteps, CallsRun])
def test_what_step_returns_holds_for_the_following_turns(base: type[RequestConfigSteps]) -> None:
    engine = Says("first", "more", "abcdefgh")
    trajectory = play(type("Short", (base,), {"changed": {"max_tokens": 6, "stop": ["!"]}}), engine, max_turns=3)
    assert whole(trajectory).stop in (Stop.LENGTH, Stop.DONE)
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == [
        "first<|im_end|>",
        "more<|im_end|>",
        "abcdef",
    ]
    assert [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests] == [
        (400, ()),
        (6, ("!",)),
        (6, ("!",)),
    ]


def test_each_question_of_a_run_has_the_request_config_that_it_is_asked_with() -> None:
    class Asks(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            request_config.max_tokens, request_config.stop = 7, ["."]
            first = await self.infer_engine.infer_async(infer_request, request_config)
            for following in (config(max_tokens=3), config()):
                infer_request.messages += [
                    {"role": "assistant", "content": first.choices[0].message.content},
                    {"role": "user", "content": "More."},
                ]
                first = await self.infer_engine.infer_async(infer_request, following)
            raise AssertionError("the second answer was cut")

    engine = Says("first", "second")
    trajectory = play(Asks, engine)
    assert [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests] == [(7, (".",)), (3, ())]
    assert [turn.text for turn in trajectory.turns] == ["first", "sec"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"temperature": 0.5},
            "temperature=0.5. Training needs all tokens to be sampled from the recipe's distribution",
        ),
        ({"temperature": 0.5}, "set sampling.temperature in the recipe"),
        ({"top_p": 0.9}, "set sampling.top_p in the recipe"),
        ({"top_k": 4}, "set sampling.top_k in the recipe"),
        ({"min_p": 0.1}, "set sampling.min_p in the recipe"),
        (
            {"repetition_penalty": 1.2},
            "repetition_penalty in the request_config; the recipe has no such option",
        ),
        ({"max_tokens": 0}, "SamplingChange(max_tokens=0): max_tokens must be an integer of at least 1"),
    ],
)
@pytest.mark.parametrize("base", [RequestConfigSteps, CallsRun])
def test_a_change_of_the_distribution_breaks_its_conversation_and_says_what_to_set(
    base: type[RequestConfigSteps], changed: dict[str, Any], why: str
) -> None:
    error = play(type("Other", (base,), {"changed": changed}), "one", "two", max_turns=2).error
    assert error is not None
    assert error.kind == "environment"
    assert why in error.message


def test_what_is_no_request_config_is_refused() -> None:
    class Dictionary(RequestConfigSteps):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {**super().step(infer_request, response_choice, current_turn), "request_config": {"max_tokens": 3}}

    error = play(Dictionary, "one", "two", max_turns=2).error
    assert error is not None
    assert "request_config must be a RequestConfig; it is {'max_tokens': 3}" in error.message
