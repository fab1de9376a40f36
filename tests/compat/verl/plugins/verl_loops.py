"""Agent loops as users of verl write them: what verl's base class, its registry and its parsers are used for."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopBase as FromPackage
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.replica import TokenOutput

assert FromPackage is AgentLoopBase
SEEN: list[Any] = []


@register("once")
class Once(AgentLoopBase):
    """One turn, with a reward of its own, in the style of verl 0.7."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length
        self.bonus = bonus

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        SEEN.append((dict(sampling_params), {name: kwargs[name] for name in sorted(kwargs)}))
        prompt_ids = await self.apply_chat_template(messages)
        metrics: dict[str, Any] = {}
        with simple_timer("generate_sequences", metrics):
            output: TokenOutput = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids[: self.response_length],
            response_mask=[1] * len(output.token_ids[: self.response_length]),
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            reward_score=1.5 + self.bonus,
            num_turns=2,
            metrics=metrics,
            extra_fields={"turn_scores": [], "note": "kept"},
        )


class Messages(AgentLoopBase):
    """Several turns with the helpers of verl 0.9: the user says `more` until the model says `stop`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        messages = list(kwargs["raw_prompt"])
        ids = await self.ct_build_initial_tokens(messages)
        prompt, mask, logprobs = len(ids), [], []
        while True:
            output = await self.server_manager.generate(
                request_id="one", prompt_ids=ids, sampling_params=sampling_params
            )
            merge, mask, logprobs = await self.ct_merge_assistant_token(
                ids, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            ids = merge.token_ids
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            if "stop" in text:
                break
            longer = [*messages, {"role": "user", "content": "more"}]
            merge, mask, logprobs = await self.ct_merge_non_assistant_msg(messages, longer, ids, mask, logprobs)
            ids, messages = merge.token_ids, longer
        return self.returned(ids[:prompt], ids[prompt:], mask, logprobs)

    def returned(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Any:
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=response, response_mask=mask, response_logprobs=logprobs, num_turns=4
        )


class Short(Messages):
    """Returns the first six tokens of the response only."""

    def returned(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Any:
        return super().returned(prompt, response[:6], mask[:6], logprobs[:6])


class Untrained(Messages):
    """Gives the first turn the mask 0."""

    def returned(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Any:
        first = mask.index(0)
        return super().returned(prompt, response, [0] * first + mask[first:], logprobs)


class Lies(Messages):
    """Returns another token than the model sampled."""

    def returned(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Any:
        return super().returned(prompt, [response[0] + 1, *response[1:]], mask, logprobs)


class LiesOfLogprobs(Messages):
    """Returns other log-probabilities."""

    def returned(self, prompt: list[int], response: list[int], mask: list[int], logprobs: list[float]) -> Any:
        return super().returned(prompt, response, mask, [0.0, *logprobs[1:]])


class Raw(AgentLoopBase):
    """Writes all tokens with the tokenizer. The first answer is thrown away; the second is shortened by its end; a third
    follows."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True
        )
        await self.server_manager.generate(request_id="a", prompt_ids=prompt, sampling_params=sampling_params)
        second = await self.server_manager.generate(request_id="b", prompt_ids=prompt, sampling_params=sampling_params)
        kept = second.token_ids[:-2]  # without the last character and the end of the turn
        hint = self.tokenizer.encode("?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        third = await self.server_manager.generate(
            request_id="b", prompt_ids=[*prompt, *kept, *hint], sampling_params={**sampling_params, "max_tokens": 3}
        )
        tail = self.tokenizer.encode("\n<|im_start|>tool\nnot sent", add_special_tokens=False)
        response = [*kept, *hint, *third.token_ids, *tail]
        mask = [*[1] * len(kept), *[0] * len(hint), *[1] * len(third.token_ids), *[0] * len(tail)]
        return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask, metrics={})


class Compressed(AgentLoopBase):
    """Two histories, returned as two outputs: the second begins again with a summary."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        outputs = []
        for messages in (list(kwargs["raw_prompt"]), [{"role": "user", "content": "Summary"}]):
            prompt = await self.ct_build_initial_tokens(messages)
            output = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    metrics={},
                )
            )
        return outputs


class Together(AgentLoopBase):
    """Asks twice at the same time with a temperature of its own; the better answer is returned."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        hot = {**sampling_params, "temperature": 2.0}
        _, second = await asyncio.gather(
            *(self.server_manager.generate("x", prompt_ids=prompt, sampling_params=hot) for _ in range(2))
        )
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=second.token_ids, response_mask=[1] * len(second.token_ids), metrics={}
        )


class Calls(AgentLoopBase):
    """A loop with tools: reads calls with verl's parser, and calls the tools of the run."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools = {tool.name: tool for tool in tools.tools}
        self.schemas = [tool.tool_schema.model_dump(exclude_unset=True) for tool in tools.tools]
        self.parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        ids = await self.apply_chat_template(messages, tools=self.schemas)
        prompt, mask = len(ids), []
        for _ in range(self.rollout_config.multi_turn.max_assistant_turns):
            output = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params)
            ids, mask = [*ids, *output.token_ids], [*mask, *[1] * len(output.token_ids)]
            _, calls = await self.parser.extract_tool_calls(output.token_ids)
            if not calls:
                break
            answers = [await self.tools[call.name].call(json.loads(call.arguments)) for call in calls]
            added = await self.apply_chat_template(
                [{"role": "tool", "content": str(answer)} for answer in answers], remove_system_prompt=True
            )
            ids, mask = [*ids, *added], [*mask, *[0] * len(added)]
        return AgentLoopOutput(prompt_ids=ids[:prompt], response_ids=ids[prompt:], response_mask=mask, metrics={})


class Fails(AgentLoopBase):
    """Raises after its first turn."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
        raise RuntimeError("the game server is gone")


class Greedy(AgentLoopBase):
    """Asks for a parameter that does not exist."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        await self.server_manager.generate("x", prompt_ids=prompt, sampling_params={"best_of": 4})
        raise AssertionError("not reached")
