"""TRL's `rollout_func` of its GRPOTrainer: a function that generates the completions itself, unchanged.

    environment:
      use: turnwise.compat.trl_rollout:TrlRollout
      arguments: {function: rollouts.py:rollout_func}

TRL calls it with all prompts of a step; here it is called for each conversation, with a list of one prompt, in a thread. It
calls the model with `trl.experimental.openenv.generate_rollout_completions`, or with `trainer.vllm_generation`. What it returns
is compared with what the model sampled. Its other fields are passed to TRL's reward functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from turnwise.compat.token_prompts import TokenPrompts
from turnwise.environments.agents.histories import ReturnedSequence
from turnwise.environments.agents.token_agent import (
    TokenAgentEnvironment,
    TokenAgentResult,
    TokenCall,
    TokenModel,
)
from turnwise.environments.environment import Environment, PutInFront
from turnwise.environments.tools.tool import Tool, copy_containers
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.rollout.context import RolloutContext
from turnwise.types import Failure, Row, SamplingChange, Turn
from turnwise.user_code.references import resolve
from turnwise.user_code.threads import run_in_thread

__all__ = ["TrlRollout", "generate_rollout_completions"]

_KEY = "environment.arguments.function"
_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_FORCED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Sampling parameters that the recipe decides."""


class TrlRollout:
    """Calls a `rollout_func` for each conversation (an EnvironmentSource).

    Args:
        function: A function `(prompts, trainer)`, or a reference to one such as `rollouts.py:rollout_func`. It may be sync or
        async. arguments: Further keyword arguments of the function.
        prompts: The form of the prompt: `messages`, or `text`, the content of the row's last message.
        returned: What happens to the returned tokens. `compare`: tokens with the mask 1 that the model did not sample fail the
            conversation, and sampled tokens that are not returned are not trained on. `ignore`: they have no effect, and all
            sampled tokens are trained on, each after the prompt for which it was sampled. Some of TRL's examples return sampled
            tokens after other prompts.
        trainer: Further attributes of the stand-in for TRL's trainer.

    Raises ConfigError.
    """

    writes_prompt = True
    returns_columns = True
    """Whether reward functions may get values that are no columns of the data."""

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        prompts: Literal["messages", "text"] = "messages",
        returned: Literal["compare", "ignore"] = "compare",
        trainer: Mapping[str, Any] | None = None,
    ) -> None:
        if prompts not in ("messages", "text") or returned not in ("compare", "ignore"):
            raise ConfigError(
                f"prompts={prompts!r}, returned={returned!r}: prompts is messages or text, returned is compare or ignore"
            )
        with _trl_names():
            target = resolve(function, key=_KEY) if isinstance(function, str) else function
        given = dict(arguments or {})
        self.name = getattr(target, "__name__", "rollout_func")
        try:
            inspect.signature(target).bind([], None, **given)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{_KEY}: {self.name} cannot be called with (prompts, trainer, **{given}): {error}"
            ) from None
        self._function: Callable[..., Any] = functools.partial(target, **given)
        self._text = prompts == "text"
        self._compares = returned == "compare"
        self._attributes = dict(trainer or {})
        self._context: RolloutContext | None = None

    def tools(self) -> Sequence[Tool]:
        """None: the function writes the prompts."""
        return ()

    def use_context(self, context: RolloutContext) -> RolloutContext:
        """Take the renderer, the sampling and the limits of the run's conversations."""
        self._context = context
        return context

    def make(self, in_front: PutInFront) -> Environment:
        """The environment of one conversation."""
        environment = _RolloutEnvironment(self)
        if in_front((), environment) is not environment:
            raise ConfigError(
                f"{self.name} writes its own prompts, so the recipe's tools cannot be offered: remove tools and mcp"
            )
        return environment

    async def aclose(self) -> None:
        """Nothing is shared."""

    def conversation(self, row: Row) -> TokenAgentEnvironment:
        """The environment of a conversation of the row. Raises Failed without an engine of tokens."""
        if self._context is None:
            raise Failed(
                Failure(
                    "environment",
                    f"{self.name} calls the model with tokens: use an engine that samples tokens (engine.name=local)",
                )
            )
        renderer = self._context.renderer.for_arguments(row.chat_template_kwargs)
        prompts = TokenPrompts(renderer, row.messages)
        return TokenAgentEnvironment(_Call(self, self._context, prompts), prompts.describe)

    async def call(self, row: Row, trainer: _Trainer) -> Any:
        """What the function returns for the row's prompt."""
        prompt = (
            row.messages[-1]["content"] if self._text else [copy_containers(dict(message)) for message in row.messages]
        )
        call = functools.partial(self._function, [prompt], trainer)
        if inspect.iscoroutinefunction(self._function.func):  # pyright: ignore[reportFunctionMemberAccess]
            return await call()
        result = await run_in_thread(call, name=self.name, kind="environment")
        return await result if inspect.isawaitable(result) else result

    def result(self, output: Any) -> TokenAgentResult:
        """The result of the function. Raises TypeError or ValueError if it has not TRL's form."""
        if not isinstance(output, Mapping) or any(key not in output for key in _REQUIRED):
            raise TypeError(f"{self.name} returned {output!r:.80}; it must return a dict with {', '.join(_REQUIRED)}")
        for key in _REQUIRED:
            if len(output[key]) != 1:
                raise ValueError(
                    f"{self.name} returned {len(output[key])} {key} for one prompt: it is called for each conversation, so "
                    f"return one "
                    f"(trainer.num_generations is 1)"
                )
        others = {
            key: value for key, value in output.items() if key not in (*_REQUIRED, "env_mask", "logprob_token_ids")
        }
        fields = {
            key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in others.items()
        }
        info = {"fields": fields} if fields else {}
        if not self._compares:
            return TokenAgentResult(info=info)
        response = [int(token) for token in output["completion_ids"][0]]
        mask = output["env_mask"][0] if output.get("env_mask") is not None else [1] * len(response)
        logprobs = [one[0] if isinstance(one, list | tuple) else one for one in output["logprobs"][0]]
        sequence = ReturnedSequence(
            prompt_ids=[int(token) for token in output["prompt_ids"][0]],
            response_ids=response,
            mask=[int(weight) for weight in mask],
            logprobs=[float(value) for value in logprobs] if logprobs else None,
        )
        return TokenAgentResult(info=info, returned=[sequence])

    def attributes(self) -> dict[str, Any]:
        """The user's attributes of the trainer."""
        return copy.deepcopy(self._attributes)


class _RolloutEnvironment:
    """One conversation, made when its row is known."""

    def __init__(self, setup: TrlRollout) -> None:
        self._setup = setup
        self._inner: TokenAgentEnvironment | None = None

    async def begin(self, row: Row) -> Any:
        self._inner = self._setup.conversation(row)
        return await self._inner.begin(row)

    async def step(self, turn: Turn) -> Any:
        assert self._inner is not None, "step before begin"
        return await self._inner.step(turn)

    async def final_reply(self, turn: Turn) -> Any:
        assert self._inner is not None, "final_reply before begin"
        return await self._inner.final_reply(turn)

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


class _Call:
    """One call of the function (a TokenAgent)."""

    def __init__(self, setup: TrlRollout, context: RolloutContext, prompts: TokenPrompts) -> None:
        self._setup = setup
        self._context = context
        self._prompts = prompts

    async def run(self, row: Row, model: TokenModel) -> TokenAgentResult:
        generator = _Generator(model, self._prompts, self._context)
        trainer = _Trainer(generator, self._context, self._setup.attributes())
        output = await self._setup.call(row, trainer)
        with boundary("environment"):
            return self._setup.result(output)


class _Generator:
    """Samples for a function that runs in a thread: TRL's `trainer.vllm_generation`, and its `vllm_client`."""

    def __init__(self, model: TokenModel, prompts: TokenPrompts, context: RolloutContext) -> None:
        self.mode = "server"
        self.structured_outputs_regex = None
        self.vllm_client = SimpleNamespace(generate=self._of_client)
        self._model = model
        self._prompts = prompts
        self._context = context
        self._loop = asyncio.get_running_loop()

    def sync_weights(self) -> None:
        """Nothing: the engine samples with the trainer's weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> Any:
        """As in TRL 1.16: (prompt_ids, completion_ids, logprobs, logprob_token_ids)."""
        if images is not None and any(images):
            raise ValueError("vllm_generation.generate(images=...): images cannot be given to a rollout_func here")
        turns = [
            self.sample([int(token) for token in prompt], {}) for prompt in prompts for _ in range(num_generations)
        ]
        ids = [list(prompt) for prompt in prompts for _ in range(num_generations)]
        tokens = [list(turn.completion.token_ids) for turn in turns if turn.completion is not None]
        logprobs = [[[value] for value in turn.completion.logprobs] for turn in turns if turn.completion is not None]
        return ids, tokens, logprobs, [[[token] for token in one] for one in tokens]

    def _of_client(self, prompts: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        given = {**kwargs, **(kwargs.get("generation_kwargs") or {})}
        outputs = [self.complete(prompt, given) for prompt in prompts]
        return {key: [output[key] for output in outputs] for key in _REQUIRED}

    def complete(self, prompt: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The completion of a text, of messages or of token ids, as a mapping with TRL's keys."""
        tokenizer = self._context.renderer.tokenizer
        if isinstance(prompt, str):
            ids = list(tokenizer(prompt)["input_ids"])
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self._prompts.encode_opening(prompt)
        else:
            ids = [int(token) for token in prompt]
        turn = self.sample(ids, overrides)
        assert turn.completion is not None
        tokens = list(turn.completion.token_ids)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": list(turn.completion.logprobs), "text": text}

    def sample(self, ids: list[int], overrides: Mapping[str, Any]) -> Turn:
        """One turn after a prompt. Waits for the event loop, so it must be called in a thread."""
        call = TokenCall(prompt_ids=ids, **_sampling(overrides, self._context))
        if _runs(self._loop):
            raise RuntimeError("an async rollout_func must call the model in a thread: await asyncio.to_thread(...)")
        return asyncio.run_coroutine_threadsafe(self._model.generate(call), self._loop).result()


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is the thread of an event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _sampling(overrides: Mapping[str, Any], context: RolloutContext) -> dict[str, Any]:
    """The change of the sampling that the parameters ask for, and those that have no effect."""
    change: dict[str, Any] = {}
    forced: dict[str, Any] = {}
    for name, value in overrides.items():
        if name == "max_tokens" and value is not None:
            change["max_tokens"] = int(value)
        elif name == "stop" and value is not None:
            change["stop"] = [value] if isinstance(value, str) else list(value)
        elif name == "stop_token_ids" and value is not None:
            change["stop_token_ids"] = [int(token) for token in value]
        elif name in _FORCED and value not in (None, getattr(context.sampling, name, None)):
            forced[name] = value
    return {"sampling": SamplingChange(**change, answers_cut="max_tokens" in change), "forced": forced}


class _Trainer:
    """Stands in for TRL's trainer: what rollout functions read of it."""

    def __init__(self, generator: _Generator, context: RolloutContext, more: Mapping[str, Any]) -> None:
        limits, sampling = context.limits, context.sampling
        self.processing_class = self.tokenizer = copy.deepcopy(context.renderer.tokenizer)
        self.vllm_generation = generator
        self.vllm_client = generator.vllm_client
        options = {
            "use_vllm": True,
            "vllm_mode": "server",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "max_completion_length": limits.tokens_per_turn,
            "num_generations": 1,
            "num_generations_eval": 1,
            "generation_kwargs": None,
            "chat_template_kwargs": {},
            **more,
        }
        vars(self).update(options)
        self.args = SimpleNamespace(**options)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(is_main_process=True, num_processes=1, process_index=0, device="cpu")
        self.state = SimpleNamespace(global_step=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.{name}: turnwise has no trainer of TRL, and its stand-in has {', '.join(sorted(vars(self)))}; add it with "
            f"environment.arguments.trainer"
        )


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """TRL's function of `trl.experimental.openenv`: a completion for each prompt, which is a text, messages, or token ids."""
    return [trainer.vllm_generation.complete(prompt, generation_overrides or {}) for prompt in prompts]


@contextlib.contextmanager
def _trl_names() -> Iterator[None]:
    """Provide `trl.experimental.openenv` while a user's file is loaded, whether TRL is installed or not."""
    module = ModuleType("trl.experimental.openenv")
    vars(module)["generate_rollout_completions"] = generate_rollout_completions
    lent = {module.__name__: module}
    if find_spec("trl") is None:
        for name in ("trl.experimental", "trl"):
            package = ModuleType(name)
            package.__path__ = []
            lent[name] = package
    before = {name: sys.modules.get(name) for name in lent}
    sys.modules.update(lent)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
