"""Plugin files: they load under ms-swift's names, leave nothing behind, and say what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from support.conversations import Says, hold, spoken
from support.swift import ASKED, play, whole
from turnwise.compat.swift import scheduler
from turnwise.compat.swift.plugins import NAMES, load, select
from turnwise.compat.swift.rewards import orms
from turnwise.compat.swift.schedulers import multi_turns
from turnwise.errors import ConfigError

PLUGIN = """
from {module} import MultiTurnScheduler, multi_turns


class Asks{n}(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        from swift.llm import RolloutInferRequest
        infer_request.messages.append({{"role": "user", "content": "Sure?"}})
        return {{"infer_request": infer_request}}


multi_turns["asks{n}"] = Asks{n}
"""

OLD = """
from copy import deepcopy
from typing import Dict, Union
from swift.plugin import MultiTurnScheduler, multi_turns, ORM, orms, rm_plugins
from swift.llm import RolloutInferRequest, Template, to_device
from swift.utils import get_logger

logger = get_logger()


class Old(MultiTurnScheduler):
    name = "old"

    def __init__(self, max_turns=None, *args, **kwargs):
        super().__init__(max_turns, *args, **kwargs)
        logger.debug("made")

    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": f"{current_turn} of {self.max_turns}"})
        return infer_request


multi_turns["old_style"] = Old
"""


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(multi_turns), dict(orms)
    yield
    for registry, kept in zip((multi_turns, orms), before, strict=True):
        registry.clear()
        registry.update(kept)


@pytest.mark.parametrize(
    "module", ["swift.plugin", "swift.plugin.multi_turn", "swift.rollout", "swift.rollout.multi_turn", "swift.llm"]
)
def test_a_plugin_imports_from_wherever_ms_swift_had_it(module: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    name = module.replace(".", "_")
    file.write_text(PLUGIN.format(module=module, n=name))
    trajectory = whole(play(f"asks{name}", "a", "b", max_turns=2, external_plugins=[str(file)]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "Sure?", "b"]


IMPORTS = """
import swift
import swift.rollout.multi_turn as theirs
from swift.rollout.multi_turn import MultiTurnScheduler
import helper

at_the_top = MultiTurnScheduler


class Later(MultiTurnScheduler):
    def check_finished(self, *_):  # sync, so it runs in a thread
        import swift.utils
        from swift.rollout.multi_turn import MultiTurnScheduler as now
        import beside
        from package.inner import named
        assert now is at_the_top is theirs.MultiTurnScheduler is swift.plugin.MultiTurnScheduler
        assert helper.inside() is beside.inside() is named() is now
        assert swift.utils.get_logger is not None
        return True
"""
BESIDE = "def inside():\n    from swift.rollout import MultiTurnScheduler\n    return MultiTurnScheduler\n"


def test_swift_can_be_imported_at_any_time_from_a_plugin_and_its_folder_and_nobody_else_sees_it(tmp_path: Path) -> None:
    for name in ("helper.py", "beside.py", "package/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(BESIDE)
    (tmp_path / "package" / "inner.py").write_text(BESIDE + "named = inside\n")
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "imports.py").write_text(IMPORTS)
    real = ModuleType("swift")
    before = {**sys.modules, "swift": real}
    paths, finders = list(sys.path), list(sys.meta_path)
    sys.modules["swift"] = real
    try:
        whole(play(f"{tmp_path}/imports.py:Later", "a"))
        assert load(str(tmp_path / "imports.py")).at_the_top is NAMES["MultiTurnScheduler"]
        assert {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "swift"} == {"swift": real}
    finally:
        for name in set(sys.modules) - set(before):
            if name in ("helper", "beside") or name.startswith("package"):
                del sys.modules[name]
        del sys.modules["swift"]
    assert (sys.path, sys.meta_path) == (paths, finders)


def test_a_scheduler_of_an_older_version_works_as_it_is(tmp_path: Path) -> None:
    """`__init__(max_turns, ...)`, a step that returns the request, names from `swift.plugin` and `swift.llm`."""
    file = tmp_path / "old.py"
    file.write_text(OLD)
    trajectory = whole(play("old_style", "a", "b", "c", max_turns=3, external_plugins=[str(file)]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "1 of 3", "b", "2 of 3", "c"]


def test_a_plugin_is_run_once_and_a_class_can_be_named_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(
        "from swift.plugin import MultiTurnScheduler\nfrom beside import text\ntext.append(1)\n"
        "class Ends(MultiTurnScheduler):\n    def check_finished(self, *args):\n        return len(text) == 1\n"
    )
    (tmp_path / "beside.py").write_text("text = []\n")
    assert load("once.py") is load(str(tmp_path / "once.py"))
    trajectory = whole(hold(Says("a"), lambda: scheduler("once.py:Ends", external_plugins="once.py")))
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "a<|im_end|>")]
    sys.modules.pop("beside")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from swift.trainers import Trainer",
            "could not be loaded: ModuleNotFoundError: No module named 'swift.trainers'",
        ),
        ("from swift.plugin import Nothing", "cannot import name 'Nothing' from 'swift.plugin'"),
        ("raise RuntimeError('no key')", "could not be loaded: RuntimeError: no key"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_run_is_refused_with_its_reason(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    assert why in str(caught.value)
    if "swift." in text:
        assert "The parts of ms-swift that can be imported: " in str(caught.value)
    assert not any(name.startswith("turnwise_swift.broken") for name in sys.modules)


def test_what_is_not_here_says_so_where_it_is_used_and_not_where_it_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "absent.py"
    file.write_text(
        "from swift.infer_engine import TransformersEngine\nfrom swift.rewards.rm_plugin import DefaultRMPlugin\n"
    )
    TransformersEngine, DefaultRMPlugin = load(str(file)).TransformersEngine, load(str(file)).DefaultRMPlugin
    with pytest.raises(RuntimeError, match=r"turnwise has no DefaultRMPlugin: reward models are functions in a recipe"):
        type("Mine", (DefaultRMPlugin,), {})()
    with pytest.raises(RuntimeError, match=r"turnwise has no TransformersEngine"):
        TransformersEngine("model", max_batch_size=1)


def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduler("math_tips_trick")
    assert str(caught.value).startswith(
        "environment.arguments.name: there is no scheduler 'math_tips_trick'; did you mean 'math_tip_trick'?; registered are: "
        "base_scheduler, gym_scheduler, math_tip_trick, math_tip_trick_multi_turn, openenv_scheduler, "
        "thinking_tips_scheduler, tool_call_scheduler."
    )
    with pytest.raises(ConfigError, match=r"there is no plugin .*/absent\.py; a plugin is a \.py file"):
        scheduler("x", external_plugins=[str(tmp_path / "absent.py")])
    (tmp_path / "one.py").write_text("class One: pass\n")
    with pytest.raises(ConfigError, match=r"has no 'Onee'; did you mean 'One'\?"):
        select(multi_turns, f"{tmp_path}/one.py:Onee", what="scheduler", key="k")
    with pytest.raises(
        ConfigError, match=r"One'> .*a scheduler is a subclass of MultiTurnScheduler|a scheduler is a subclass"
    ):
        scheduler(f"{tmp_path}/one.py:One")


def test_options_that_do_nothing_are_refused() -> None:
    for arguments, why in (
        ({"max_turns": 0}, "max_turns=0; it must be at least 1"),
        ({"gym_env": "g"}, "gym_env has no effect on math_tip_trick, which is not a gym scheduler"),
        ({"context_manager": "c"}, "context_manager has no effect on math_tip_trick"),
        ({"gym_weight": 2.0}, "gym_weight has no effect on math_tip_trick without use_gym_env"),
    ):
        with pytest.raises(ConfigError, match=why):
            scheduler("math_tip_trick", **arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"use_gym_env has no effect on thinking_tips_scheduler, whose run returns no total_reward"
    ):
        scheduler("thinking_tips_scheduler", use_gym_env=True)
    with pytest.raises(ConfigError, match=r"max_turns=3 has no effect without a scheduler"):
        scheduler(max_turns=3)


def test_a_scheduler_that_holds_whole_batches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text(
        "from swift.plugin import MultiTurnScheduler\n"
        "class Tree(MultiTurnScheduler):\n    async def async_infer(self, infer_requests, request_config):\n        ...\n"
    )
    with pytest.raises(ConfigError, match=r"overrides async_infer, which takes a batch of conversations"):
        scheduler(f"{tmp_path}/tree.py:Tree")


def test_without_a_name_there_is_one_turn_and_a_reference_answer_is_left_out() -> None:
    from turnwise.types import Row

    row = Row(id="1", messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "the reference"}])
    trajectory = whole(hold(Says("a"), scheduler, row=row))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a"]


def test_a_scheduler_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "from swift.plugin import MultiTurnScheduler\n"
        "class Picky(MultiTurnScheduler):\n    def __init__(self, size, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n        self.size = size\n"
        "    def check_finished(self, request, *_):\n        return len(request.messages) >= self.size\n"
        "    def step(self, request, *_):\n        request.messages.append({'role': 'user', 'content': self.tokenizer.name})\n"
        "        return {'infer_request': request}\n"
    )
    name = f"{tmp_path}/picky.py:Picky"
    with pytest.raises(
        ConfigError, match=r"environment\.arguments: .*Picky cannot be created: .*missing 1 required .*'size'"
    ):
        scheduler(name)
    assert whole(play(name, "a", arguments={"size": 2})).assistant_texts == ["a"]
    error = play(name, "a", arguments={"size": 3}).error
    assert error is not None
    assert (
        "the scheduler uses a tokenizer, but the recipe names none: set environment.arguments.tokenizer"
        in error.message
    )
    (tmp_path / "empty").mkdir()
    error = play(name, "a", arguments={"size": 3}, tokenizer=str(tmp_path / "empty")).error
    assert error is not None
    assert "environment.arguments.tokenizer: no tokenizer could be loaded from" in error.message
