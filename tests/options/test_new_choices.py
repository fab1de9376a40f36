"""A new loss and a new estimator are two files each: the class of the options, and the function with its line in a table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOSS = {
    "options/algorithm.py": [
        (
            "LOSSES = (",
            '''class Powers(LossSection):
    """A loss of this test."""

    name: Literal["powers"] = "powers"
    power: Positive = 3
    """The power of the log-probability."""


''',
        ),
        ("PpoClip, Gspo, ", "Powers, "),
    ],
    "training/losses.py": [
        (
            "LOSSES: Mapping",
            """from turnwise.options.algorithm import Powers


def powers(logprob_N: torch.Tensor, targets: Targets, options: Powers) -> LossTerms:
    return _terms(logprob_N, targets, loss_N=-targets.advantage_N * logprob_N**options.power)


""",
        ),
        ("    PpoClip: ppo_clip,", "    Powers: powers,\n"),
    ],
}
ESTIMATOR = {
    "options/algorithm.py": [
        (
            "ESTIMATORS = (",
            '''class Doubled(CreditSection):
    """An estimator of this test."""

    name: Literal["doubled"] = "doubled"
    factor: Factor = 2.0
    """The factor of the reward."""


''',
        ),
        ("    Grpo,\n    Rloo,", "    Doubled,\n"),
    ],
    "rewards/credit/outcome.py": [
        (
            "ESTIMATORS: Mapping",
            """from turnwise.options.algorithm import Doubled


def doubled(batch: EpisodeGroups, options: Doubled) -> Advantages:
    return _for_all_turns(batch, [[options.factor * reward for reward in group] for group in _rewards(batch)])


""",
        ),
        ("    Grpo: Estimator(grpo),", "    Doubled: Estimator(doubled),\n"),
    ],
}

PROGRAM = """
import asyncio
import sys

from generated_pages import option_table

import turnwise
from support.tiny import tiny_model
from training.test_batch import group
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.config.resume_rules import RULES, option_values
from turnwise.config.train_checks import refuse_without_effect
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Group, Sampling

recipe = {"model": "m", "data": {"train": "rows.jsonl"}, "train": {"steps": 1}}
recipe |= {"loss": {"name": "powers", "power": 5}, "credit": {"name": "doubled", "factor": 3.0}}
config = checked(recipe, source="the test")
refuse_without_effect(config)
assert {"loss.power", "credit.factor"} <= option_values(config).keys() <= RULES.keys()
text = option_table()
assert "`powers`" in text and "The power of the log-probability." in text
assert "`doubled`" in text and "The factor of the reward." in text

trajectories = group()
for number, one in enumerate(trajectories):
    one.reward = 0.5 * number
assembly.credit(config, assembly.scorer(config))([Group(id="g", row=trajectories[0].row, trajectories=trajectories)])
assert [set(one.advantages) for one in trajectories] == [{1.5 * number} for number in range(len(trajectories))]

learner = LocalLearner(tiny_model(), sampling=Sampling(), loss=make_loss(config.loss, config.correction), threads=1)
update = asyncio.run(learner.update([pack(trajectories, loss=config.loss)], lr=1e-2))
assert update.grad_norm > 0.0
print(turnwise.__file__)
"""


def put(source: Path, changes: dict[str, list[tuple[str, str]]]) -> None:
    """Write text before the first occurrence of another text."""
    for name, pairs in changes.items():
        file = source / name
        text = file.read_text(encoding="utf-8")
        for before, new in pairs:
            assert before in text
            text = text.replace(before, new + before, 1)
        file.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_a_loss_and_an_estimator_are_two_files_each(tmp_path: Path) -> None:
    copy = tmp_path / "turnwise"
    shutil.copytree(ROOT / "src" / "turnwise", copy)  # with the compiled files of what does not change
    put(copy, LOSS)
    put(copy, ESTIMATOR)
    path = os.pathsep.join(str(folder) for folder in (tmp_path, ROOT / "tests", ROOT / "scripts"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(copy / "__init__.py")]  # the changed copy has run
    assert len(LOSS) == len(ESTIMATOR) == 2
