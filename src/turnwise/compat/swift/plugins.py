"""Plugin files of ms-swift, and what a recipe takes from them: `scheduler`, `Reward` and `reward`.

A plugin file may `import swift` at any time: at its top, and inside a method that runs later, in any thread. A module looks up
`import` in its own builtins. A plugin file, and the modules that it imports from its own folder, run with builtins whose `import`
returns the objects of `NAMES` under ms-swift's names. Other code is not affected: nothing is put into `sys.modules`. The
behaviour is the same whether or not ms-swift is installed."""

from __future__ import annotations

import asyncio
import builtins
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import turnwise.compat.swift.outcomes as outcomes
import turnwise.compat.swift.protocol as protocol
import turnwise.compat.swift.rewards as rewards
import turnwise.compat.swift.schedulers as schedulers
from turnwise.compat.swift.environments import InferEngine, RunEnvironment, StepEnvironment, Template
from turnwise.compat.swift.rewards import RewardArgs, call_reward, call_reward_once, columns_of, make_reward, orms
from turnwise.compat.swift.schedulers import (
    GYMScheduler,
    MultiTurnScheduler,
    RolloutScheduler,
    ThinkingModelTipsScheduler,
    context_managers,
    envs,
    multi_turns,
    registered,
)
from turnwise.data.images import load_image
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Trajectory
from turnwise.user_code.calls import NO_ASYNC, advise_threads

_ROOT = "swift"
"""turnwise always provides modules of this name. It provides modules of other names only if no such package is installed."""


class Modules:
    """Modules of ms-swift by name. ms-swift has moved names between its modules, so each module here has all names."""

    def __init__(self, listed: Sequence[str], names: Mapping[str, Any]) -> None:
        self._modules: dict[str, ModuleType] = {}
        tops = {name.partition(".")[0] for name in listed}
        installed = {top for top in tops if top != _ROOT and importlib.util.find_spec(top) is not None}
        self._tops = tops - installed
        for name in (name for name in listed if name.partition(".")[0] in self._tops):
            module = self._modules[name] = ModuleType(name, "turnwise's own, for plugins written for ms-swift")
            module.__path__ = []  # marks a package; its only submodules are those of this table
            vars(module).update(names)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._modules[parent], child, module)

    def __contains__(self, top: str) -> bool:
        """Whether turnwise provides the top-level module `top`."""
        return top in self._tops

    def get(self, name: str, *, top: bool) -> ModuleType:
        """The module, or with `top` its top-level package. Raises ModuleNotFoundError if there is no module of that name."""
        if name not in self._modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self._modules[name.partition(".")[0] if top else name]


def run_file(name: str, path: Path, modules: Modules) -> ModuleType:
    """Run a file as the module `name`. Modules that it imports from its own folder run in the same way.

    Raises the exceptions of the file; the module is then not in `sys.modules`.
    """
    folder = _Folder(path.parent, modules)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path), folder))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module in `sys.modules`
    try:
        with folder.importable():  # for importlib.import_module, which does not use the builtins
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Folder:
    """Finds the modules of a plugin's folder, and runs them in the same way as the plugin."""

    def __init__(self, folder: Path, modules: Modules) -> None:
        self._folder = str(folder)
        self._modules = modules
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        """The builtins of the modules in the folder."""

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """The function that an `import` statement calls."""
        top = name.partition(".")[0]
        if not level and top in self._modules:
            return self._modules.get(name, top=not fromlist)
        if level or top in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        with self.importable():
            return builtins.__import__(name, globals, locals, fromlist or (), level)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The method of a finder in `sys.meta_path`."""
        if path is not None and not any(str(entry).startswith(self._folder) for entry in path):
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(name, [self._folder] if path is None else path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(name, spec.loader.path, self)
        return spec

    @contextmanager
    def importable(self) -> Iterator[None]:
        """In this context, the folder's modules can be imported; they take precedence over installed modules of the same name."""
        finders: list[Any] = sys.meta_path
        place = next((n for n, finder in enumerate(finders) if finder is PathFinder), len(finders))
        finders.insert(place, self)
        try:
            yield
        finally:
            finders.remove(self)


class _Loader(SourceFileLoader):
    """Runs a file with the builtins of its folder."""

    def __init__(self, name: str, path: str, folder: _Folder) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._folder.builtins
        super().exec_module(module)


MODULES = (
    "swift",
    "swift.plugin",
    "swift.plugin.multi_turn",
    "swift.plugin.env",
    "swift.plugin.context_manager",
    "swift.plugin.orm",
    "swift.plugin.prm",
    "swift.rollout",
    "swift.rollout.multi_turn",
    "swift.rollout.gym_env",
    "swift.rollout.openenv_wrapper",
    "swift.rewards",
    "swift.plugin.rm_plugin",
    "swift.rewards.orm",
    "swift.rewards.rm_plugin",
    "swift.llm",
    "swift.llm.infer",
    "swift.llm.infer.protocol",
    "swift.llm.infer.infer_engine",
    "swift.llm.utils",
    "swift.llm.template",
    "swift.llm.template.template",
    "swift.llm.template.template.utils",
    "swift.llm.template.template_inputs",
    "swift.infer_engine",
    "swift.infer_engine.protocol",
    "swift.template",
    "swift.utils",
    "modelscope",
    "modelscope.preprocessors",
    "modelscope.preprocessors.templates",
    "modelscope.preprocessors.templates.utils",
)
"""The modules that a plugin can import. ms-swift has moved objects between modules, so each module has all names. The modules
of modelscope exist only if modelscope is not installed: plugins import types from it."""


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger."""
    return logging.getLogger(name or "turnwise.swift")


def _absent(name: str, instead: str) -> type[Any]:
    """A class that can be imported and subclassed, but raises RuntimeError when it is used."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"turnwise has no {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not available: {instead}"})


def _to_device(inputs: Any, device: Any) -> Any:
    raise RuntimeError("turnwise has no to_device: call a model on a server, or use torch directly")


def _load_image(image: Any) -> Any:
    return load_image(image, where="the scheduler's image")


NAMES: dict[str, Any] = {
    **{
        name: getattr(module, name)
        for module, listed in (
            (
                protocol,
                [
                    "ChatCompletionMessageToolCall",
                    "ChatCompletionResponse",
                    "ChatCompletionResponseChoice",
                    "ChatMessage",
                    "Function",
                    "InferRequest",
                    "Message",
                    "Messages",
                    "RequestConfig",
                    "RolloutInferRequest",
                    "RolloutOutput",
                    "UsageInfo",
                ],
            ),
            (
                schedulers,
                [
                    "MultiTurnScheduler",
                    "RolloutScheduler",
                    "multi_turns",
                    "MathTipsMultiTurnScheduler",
                    "MathTipsScheduler",
                    "ThinkingModelTipsScheduler",
                    "ToolCallScheduler",
                    "ContextManager",
                    "DummyContextManager",
                    "Env",
                    "GYMScheduler",
                    "context_managers",
                    "envs",
                    "OpenEnvScheduler",
                    "OpenEnvWrapper",
                ],
            ),
            (rewards, ["ORM", "AsyncORM", "orms"]),
            (
                outcomes,
                [
                    "CosineReward",
                    "Format",
                    "MathAccuracy",
                    "MathORM",
                    "ReActFormat",
                    "RepetitionPenalty",
                    "SoftOverlong",
                ],
            ),
        )
        for name in listed
    },
    "get_logger": get_logger,
    "remove_response": protocol.remove_response,
    "RolloutResponseChoice": protocol.ChatCompletionResponseChoice,
    "Template": Template,
    "ThinkingTemplate": Template,
    "to_device": _to_device,
    **{
        name: _absent(name, "reward models are functions in a recipe: reward.trajectory")
        for name in ("DefaultRMPlugin", "GenRMPlugin")
    },
    **{
        name: _absent(name, "a scheduler uses self.infer_engine, and a reward function calls a server of the user")
        for name in ("PtEngine", "TransformersEngine", "VllmEngine")
    },
    "rm_plugins": dict[str, Any](),
    "GRPOVllmEngine": InferEngine,
    "InferEngine": InferEngine,
    "load_image": _load_image,
}
"""The objects that a plugin can import from these modules."""


@functools.cache
def modules() -> Modules:
    """The modules of ms-swift, as plugins import them."""
    return Modules(MODULES, NAMES)


def load(file: str) -> ModuleType:
    """Run a plugin file, once; it registers its classes. Modules in its directory can be imported by it.

    Raises ConfigError if there is no such file, or if it raises an exception.
    """
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"there is no plugin {path}; a plugin is a .py file, relative to the working directory")
    return _loaded(path)


def load_plugins(files: str | Sequence[str]) -> None:
    """Load one or several plugin files. Raises ConfigError."""
    for file in [files] if isinstance(files, str) else files:
        load(file)


@functools.lru_cache(maxsize=256)
def _loaded(path: Path) -> ModuleType:
    name = f"turnwise_swift.{path.stem}_{abs(hash(str(path))):x}"
    try:
        with boundary("import"):
            return run_file(name, path, modules())
    except Failed as failed:
        raise ConfigError(
            f"the plugin {path} could not be loaded: {failed.failure.message}{_lacks(failed)}"
        ) from failed


def select(registry: dict[str, Any], name: str, *, what: str, key: str) -> Any:
    """The object that is registered under `name`, or the object that `file.py:Class` names.

    Raises ConfigError.
    """
    file, colon, inside = name.rpartition(":")
    if colon and file.endswith(".py"):
        module = load(file)
        if not hasattr(module, inside):
            raise ConfigError(f"{key}: {file} has no {inside!r}{nearest(inside, vars(module))}")
        return getattr(module, inside)
    if name not in registry:
        have = ", ".join(sorted(registry))
        raise ConfigError(
            f"{key}: there is no {what} {name!r}{nearest(name, registry)}; registered are: {have}. A plugin registers one: "
            f"external_plugins: [plugin.py]"
        )
    return registry[name]


def _lacks(failed: Failed) -> str:
    cause = failed.__cause__
    if not isinstance(cause, ImportError) or not (cause.name or "").startswith("swift"):
        return ""
    listed = ", ".join(sorted(NAMES)) if cause.name in MODULES else ", ".join(MODULES)
    return f". The parts of ms-swift that can be imported: {listed}"


_functions: dict[str, tuple[Any, Any]] = {}
"""Cache of `reward`: by its arguments, the registered object and the function that was made from it."""


class Reward:
    """A reward function of ms-swift for `reward.batch`: called once for all conversations of a step, as in ms-swift.

    In `reward.group`, it is called once for all conversations of a row.

    A call gets `completions`, each column of the data as a list with one item per conversation, and `trainer_state` with
    `global_step` and `max_steps`.
    """

    def __init__(
        self,
        use: str,
        *,
        external_plugins: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the function. A class is made once.

        Args:
            use: A name that ms-swift or a plugin registers in `orms`, or `file.py:name`.
            external_plugins: Plugin files, which are loaded once.
            arguments: The arguments of the class.
            args: ms-swift's arguments, for classes with a parameter `args`. The arguments of ms-swift's own reward functions
                have its defaults.

        Raises ConfigError.
        """
        self.__name__ = use.rpartition(":")[2]
        self._use = use
        self._args = RewardArgs(args)
        self._function = _reward_function(use, external_plugins, arguments, self._args)
        self.needed_columns = columns_of(self._function)

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | TypeError | None]:
        if not trajectories:
            return []
        return await call_reward(self._function, trajectories, self._use, args=self._args)


async def reward(
    trajectory: Trajectory,
    *,
    use: str,
    external_plugins: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """Like `Reward`, for `reward.trajectory`: called for each trajectory, with one completion. Raises ConfigError."""
    key = json.dumps([use, list(external_plugins), dict(arguments or {})], sort_keys=True)
    load_plugins(external_plugins)
    registered = select(orms, use, what="reward function", key="reward.trajectory.arguments.use")
    cached = _functions.get(key)
    if cached is None or cached[0] is not registered:  # the name may have been registered again
        cached = _functions[key] = (registered, _reward_function(use, external_plugins, arguments, RewardArgs()))
    return await call_reward_once(cached[1], trajectory, use)


def registered_reward(use: str, plugins: Sequence[str]) -> Any:
    """The function or class that `use` names, after the plugins were loaded. Raises ConfigError."""
    load_plugins(plugins)
    return select(orms, use, what="reward function", key="reward.batch.arguments.use")


def _reward_function(use: str, plugins: Sequence[str], arguments: Mapping[str, Any] | None, args: RewardArgs) -> Any:
    function = registered_reward(use, plugins)
    if isinstance(function, type):
        try:
            return make_reward(function, dict(arguments or {}), args)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"reward.batch.arguments: {use} cannot be created: {error}") from error
    if arguments:
        raise ConfigError(
            f"reward.batch.arguments.arguments: {use} is a function, not a class, so arguments have no effect: remove them"
        )
    return function


_numbers = itertools.count()
"""Numbers the environments; the number is part of each conversation's uuid."""
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = weakref.WeakKeyDictionary()
"""For each event loop: the schedulers that all conversations share, by the arguments that they were made with."""


def scheduler(
    name: str | None = None,
    *,
    external_plugins: Sequence[str] = (),
    max_turns: int | None = None,
    tokenizer: str | None = None,
    use_gym_env: bool | None = None,
    gym_weight: float = 1.0,
    gym_env: str | None = None,
    context_manager: str | None = None,
    shared: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Environment:
    """Make the environment of a scheduler, for one conversation.

    Args:
        name: A name that ms-swift or a plugin registers in `multi_turns`, or `file.py:Class`. Without a name, a conversation
            has one turn.
        external_plugins: Plugin files, which are loaded once.
        max_turns: The maximum number of turns.
        tokenizer: The directory of the model, for schedulers that use a tokenizer.
        use_gym_env: Whether the reward of a turn is the increase of `rollout_infos["total_reward"]`. The default is true for
            gym schedulers.
        gym_weight: The factor of that reward.
        gym_env: The name of the gym environment, for rows without `env_config.name`.
        context_manager: The name of the context manager, for rows without `ctx_config.name`.
        shared: Whether all conversations of a run share one scheduler, as in ms-swift. Its sync methods are then called one
            at a time. Otherwise each conversation has its own scheduler.
        arguments: Further arguments of the scheduler's constructor.

    Raises ConfigError.
    """
    kind = named_scheduler(name, external_plugins, gym_env=gym_env, context_manager=context_manager)
    if name is None:
        name, max_turns = "one turn", max_turns or 1
        if max_turns > 1:
            raise ConfigError(
                f"environment.arguments.max_turns={max_turns} has no effect without a scheduler: set name"
            )
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"environment.arguments.max_turns={max_turns}; it must be at least 1")
    given = {"gym_env": gym_env, "context_manager_name": context_manager, **(arguments or {})}
    given = {key: value for key, value in given.items() if value is not None}

    def make() -> Any:
        return _instance(kind, name, InferEngine(tokenizer), max_turns, given)

    made_from = json.dumps([name, max_turns, tokenizer, given], default=str, sort_keys=True)
    instance, lock = _shared_instance(made_from, make) if shared else (make(), None)
    weight = _gym_weight(kind, name, use_gym_env, gym_weight)
    number = str(next(_numbers))
    if lock is not None:  # in a conversation: environment.thread is refused
        advise_threads(NO_ASYNC)
    if kind.run is not MultiTurnScheduler.run:
        return RunEnvironment(instance, name=number, gym_weight=weight, shares=shared)
    return StepEnvironment(instance, name=number, gym_weight=weight, lock=lock, shares=shared)


def named_scheduler(
    name: str | None, external_plugins: Sequence[str], *, gym_env: str | None, context_manager: str | None
) -> type[RolloutScheduler]:
    """The class of a scheduler. Loads the plugins, and checks the names that are given. Raises ConfigError."""
    load_plugins(external_plugins)
    kind = MultiTurnScheduler
    if name is not None:
        kind = _scheduler_class(select(multi_turns, name, what="scheduler", key="environment.arguments.name"), name)
    for key, value, registry, what in (
        ("gym_env", gym_env, envs, "environment"),
        ("context_manager", context_manager, context_managers, "context manager"),
    ):
        if value is None:
            continue
        if not issubclass(kind, GYMScheduler):
            raise ConfigError(
                f"environment.arguments.{key} has no effect on {name or 'one turn'}, which is not a gym scheduler: remove it"
            )
        if kind._create_env is GYMScheduler._create_env:  # a scheduler may make its environments itself
            registered(registry, value, what, key)
    return kind


def _scheduler_class(candidate: Any, name: str) -> type[RolloutScheduler]:
    """`candidate` as a subclass of our base classes. A plugin may bring ms-swift's base classes: missing methods are ours then.

    Raises ConfigError if it is not a scheduler, or not a scheduler of single conversations.
    """
    if isinstance(candidate, type) and issubclass(candidate, RolloutScheduler):
        kind = candidate
    elif isinstance(candidate, type) and any(callable(getattr(candidate, method, None)) for method in ("step", "run")):
        kind = types.new_class(candidate.__name__, (candidate, MultiTurnScheduler))
    else:
        raise ConfigError(
            f"environment.arguments.name: {name} is {candidate!r:.80}; a scheduler is a subclass of MultiTurnScheduler, or a "
            f"class with its methods step or run"
        )
    owner = _defining_class(kind, "async_infer")
    if owner is not RolloutScheduler and owner.__name__ != "RolloutScheduler":
        raise ConfigError(
            f"environment.arguments.name: {name} overrides async_infer, which takes a batch of conversations; here each "
            f"conversation runs alone: override run, or step and check_finished"
        )
    return kind


def _gym_weight(kind: type[RolloutScheduler], name: str, use_gym_env: bool | None, gym_weight: float) -> float | None:
    """The factor of `total_reward`; None if it is not the reward. Raises ConfigError for arguments without effect."""
    gym = issubclass(kind, GYMScheduler) if use_gym_env is None else use_gym_env
    if gym and _defining_class(kind, "run") is ThinkingModelTipsScheduler:
        raise ConfigError(
            f"environment.arguments.use_gym_env has no effect on {name}, whose run returns no total_reward"
        )
    if gym_weight != 1.0 and not gym:
        raise ConfigError(f"environment.arguments.gym_weight has no effect on {name} without use_gym_env: remove it")
    return gym_weight if gym else None


def _defining_class(kind: type[Any], method: str) -> type[Any]:
    """The class that defines the method which `kind` uses."""
    return next(base for base in kind.__mro__ if method in vars(base))


def _instance(kind: type[Any], name: str, engine: InferEngine, max_turns: int | None, given: Mapping[str, Any]) -> Any:
    """A scheduler, made with the arguments of ms-swift that its constructor accepts, and those of the recipe."""
    parameters = inspect.signature(kind.__init__).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    offered: dict[str, Any] = {"infer_engine": engine, "max_turns": max_turns}
    if "tokenizer" in parameters:
        offered["tokenizer"] = engine.tokenizer
    accepted = {key: value for key, value in offered.items() if accepts_all or key in parameters}
    try:
        instance = kind(**accepted, **given)
    except TypeError as error:
        raise ConfigError(f"environment.arguments: {name} cannot be created: {error}") from error
    instance.infer_engine = engine
    if instance.max_turns is None:
        instance.max_turns = max_turns
    return instance


def _shared_instance(made_from: str, make: Callable[[], Any]) -> tuple[Any, asyncio.Lock | None]:
    """The scheduler that all conversations of this event loop share, and the lock of its sync methods."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # the recipe is being checked, and no conversation has started
        return make(), None
    instances = _shared.setdefault(loop, {})
    if made_from not in instances:
        instances[made_from] = (make(), asyncio.Lock())
    return instances[made_from]
