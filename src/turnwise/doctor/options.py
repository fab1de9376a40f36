"""Whether each option of a recipe takes effect.

The value of many options reaches plain data: sampling, limits, learning rates, rows, advantages, turn weights. For these the
doctor computes the data twice: from the recipe, and from the recipe without the option. The data must differ. The other
options are read only while a run goes on; the test suite of turnwise has a test for each of them (tests/doctor/evidence.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin

from turnwise import assembly
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward, training_warnings
from turnwise.data.order import Order
from turnwise.doctor.check import Check, wrong
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary
from turnwise.options.algorithm import ESTIMATORS, LOSSES, CorrectionSection, RejectionSection
from turnwise.options.schema import Config
from turnwise.options.section import Section, Use, changed_options, section_classes
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group
from turnwise.types import Completion, Group, LogprobKind, Row, Segment, Trajectory, Turn


def _model(config: Config) -> list[Any]:
    """Of the model without its weights: what is trained, the scale of the adapter, and how the layers compute."""
    from turnwise.doctor.memory import empty_model, read_model_config  # torch

    try:
        with boundary("model"):
            model = empty_model(assembly.model_source(config), read_model_config(config.model.path))
    except Failed:  # other checks say that there is no model, or none of which this is known
        return [config.model]
    trained = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters() if tensor.requires_grad]
    modules = list(model.modules())
    scales = [module.scaling for module in modules if isinstance(getattr(module, "scaling", None), dict)]
    return [trained, scales, [type(module.forward).__name__ for module in modules]]


def _rates(config: Config) -> list[float]:
    if config.train.epochs is not None:
        config = config.with_known_steps(len(assembly.rows(config)))
    steps = config.train.total_steps
    return [config.train.lr_at(step, steps=steps) for step in range(steps)]


def _loss(config: Config) -> list[Any]:
    """The loss of tokens whose ratios lie far apart, by the formulas of the recipe: of policy, correction and average."""
    import torch

    from turnwise.training.batch import token_shares
    from turnwise.training.correction import correct
    from turnwise.training.losses import Targets, make_loss
    from turnwise.training.selection import MeasuredTokens, select_tokens

    if config.loss.normalizer == "constant" and config.loss.constant_length is None:
        return ["there is no loss without loss.constant_length"]
    loss = make_loss(config.loss, config.correction)
    sequence_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])  # sequences 0 and 1 are segments of one conversation
    shares = [share for one in token_shares([[3.0, 2.0], [4.0]], config.loss) for share in one]
    logprob_N = torch.tensor([-0.5, -4.0, -1.0, -1.0005, -0.2, -2.0, -0.9, -1.1, -0.4])
    targets = Targets(
        token_N=sequence_N,
        sequence_N=sequence_N,
        turn_N=torch.tensor([0, 0, 1, 0, 0, 0, 1, 1, 1]),
        version_N=torch.zeros_like(sequence_N),
        behaviour_logprob_N=torch.tensor([-1.0, -1.0, -1.0, -1.0, -3.0, -1.0, -1.0, -1.0, -3.5]),
        known_N=torch.ones_like(sequence_N, dtype=torch.bool),
        proximal_logprob_N=torch.tensor([-0.6, -5.0, -1.0, -1.0, -2.7, -1.7, -1.0, -1.2, -1.0]),
        old_is_proximal=loss.corrects and config.correction.decoupled,
        advantage_N=torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -0.5, -0.5, -0.5, -0.5]),
        value_N=-logprob_N,
        weight_N=torch.tensor(shares)[sequence_N],
    )
    kept_N = torch.ones_like(targets.known_N)
    if loss.corrects:
        done = correct([targets], config.correction, rescale=config.loss.normalizer != "constant")
        (targets,), (kept_N,) = done.targets, done.kept
    if loss.selects:
        value_NK = torch.stack([logprob_N, -logprob_N], dim=-1)
        sources = {number: [("", number)] for number in range(3)}
        measured = MeasuredTokens(targets=targets, value_NK=value_NK, sources=sources)
        (targets,) = select_tokens([measured], config.loss).targets
    terms = loss(logprob_N, targets, reference_logprob_N=logprob_N * 1.5, entropy_N=-logprob_N)
    return [(terms.loss_N * targets.weight_N).tolist(), kept_N.tolist(), config.loss.kl_coef, config.loss.entropy_coef]


def _optimizer_steps(config: Config) -> list[Any]:
    """A parameter after two steps, the first of them with a large gradient; each gradient is the sum of two passes."""
    import torch

    from turnwise.training.optimizer import Optimizer

    chosen = config.train.optimizer  # its state is moved from a GPU only
    options = config.train.model_copy(update={"optimizer": chosen.model_copy(update={"offload": "none"})})
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16))
    optimizer = Optimizer([parameter], options)
    sums: list[Any] = []
    for gradient in ([30.0, 40.0, -5.0], [1e-3, 2e-3, 0.0]):
        optimizer.zero_grad()
        for share in (1.0, 2**-9):
            (parameter * torch.tensor(gradient, dtype=torch.bfloat16) * share).sum().backward()
        sums.append(None if parameter.grad is None else parameter.grad.tolist())
        optimizer.step(1e-3)
    return [chosen.offload, sums, *(tensor.tolist() for tensor in optimizer.masters), parameter.tolist()]


def _advantages(config: Config) -> list[Any]:
    """Of two groups with these rewards, states, scores of states and values."""
    trajectories = [_trajectory(str(n)) for n in range(5)]
    for trajectory, reward in zip(trajectories, (1.0, 0.0, 0.0, 3.0, 0.5), strict=True):
        for turn in trajectory.turns:
            turn.add_reward(0.25 * turn.index * reward, "environment")
            turn.info = {"potential": reward * turn.index, "state": turn.index % 2, "other": -reward}
        trajectory.rewards = {"turns": sum(turn.reward for turn in trajectory.turns), "judge": reward}
        trajectory.reward = sum(trajectory.rewards.values())
        trajectory.values = [[0.5], [0.25], [0.125]]
    greedy = trajectories.pop()
    shorter = [
        replace(trajectory, turns=trajectory.turns[:2], values=trajectory.values[:2]) for trajectory in trajectories[2:]
    ]
    groups = [
        Group(id="g", row=_ROW, trajectories=trajectories[:2] + shorter, baseline=greedy),
        Group(id="h", row=_ROW, trajectories=[replace(trajectory) for trajectory in trajectories], baseline=greedy),
    ]
    credit = assembly.credit(config, assembly.scorer(config))
    credit(groups)
    if credit.tracker is not None:  # the row is visited again, and what is kept of it shows in the third step
        for _ in range(2):
            credit.tracker.move(0.01)
            credit.tracker.advance()
            credit(groups)
    return [trajectory.advantages for group in groups for trajectory in group.trajectories]


def _weights(config: Config) -> list[float] | str:
    """Of the turns of a conversation with a tool and a user in it; a rule of the user's own is its name."""
    if ":" in config.loss_mask.use:
        return f"{config.loss_mask.use}({config.loss_mask.arguments})"
    trajectory = _trajectory("1")
    assembly.turn_weighting(config)(trajectory)
    return [turn.weight for turn in trajectory.turns]


def _streams(config: Config) -> list[Any]:
    """Which rows come when, and with which random streams."""
    group = new_group(_ROW, size=2, seed=config.seed)
    order = Order(64, seed=config.seed, shuffle=config.data.shuffle)
    return [list(order.take(0, 64)), [trajectory.seed for trajectory in group.trajectories]]


def _rows(config: Config, held_out: bool = False) -> list[Any]:
    rows = assembly.rows(config, held_out=held_out)
    return [config.data.subset, *((row.id, list(row.messages), dict(row.fields)) for row in rows)]


def _held_out(config: Config) -> list[Any]:
    return _rows(config, held_out=True)


def _reward_functions(config: Config) -> list[Any]:
    scorer = assembly.scorer(config)
    reward = config.reward
    pairs = zip(scorer.functions, reward.functions, strict=True)
    return [scorer.timeout, *((function.name, function.weight, use.use, use.arguments) for function, use in pairs)]


_ROW = Row(id="r", messages=[{"role": "user", "content": "?"}])


def _trajectory(name: str) -> Trajectory:
    """Three turns: a tool call, an answer, and an answer to a user who asks back."""
    answers = [{"role": "assistant", "content": str(n)} for n in range(3)]
    trajectory = Trajectory(id=name, group="g", row=_ROW)
    trajectory.messages = [
        *_ROW.messages,
        answers[0],
        {"role": "tool", "content": "!"},
        answers[1],
        {"role": "user", "content": "Sure?"},
        answers[2],
    ]
    segment = Segment()
    for index, message in enumerate(answers):
        completion = Completion(
            token_ids=[index], logprobs=[0.0], versions=[0], finish_reason="stop", logprob_kind=LogprobKind.NONE
        )
        segment.append_context([9])
        segment.append_completion(index, completion)
        trajectory.turns.append(Turn(index=index, message=message, text=str(index), completion=completion))
    trajectory.segments.append(segment)
    return trajectory


def _limits(config: Config) -> Limits:
    return assembly.limits(config, longest=None)


EFFECTS: Mapping[str, Callable[[Config], Any]] = {
    "model.gradient_checkpointing": _model,
    **{f"model.lora.{name}": _model for name in ("rank", "alpha", "target_modules", "rslora", "dora")},
    **{f"data.{name}": _rows for name in ("split", "subset", "columns", "system_prompt", "max_rows")},
    "data.eval_split": _held_out,
    "data.shuffle": _streams,
    **{f"sampling.{name}": assembly.sampling for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
    **{
        f"limits.{name}": _limits
        for name in ("turns", "tokens_per_turn", "tokens", "response_tokens", "context", "seconds_per_turn", "seconds")
    },
    **{f"limits.{name}": _limits for name in ("agents", "agent_turns", "agent_tokens")},
    **{
        f"reward.{kind}[].{name}": _reward_functions
        for kind in ("trajectory", "turns", "group", "batch")
        for name in ("use", "arguments", "weight", "name")
    },
    "reward.timeout": _reward_functions,
    **{f"credit.{name}": _advantages for cls in ESTIMATORS for name in cls.model_fields if name != "name"},
    "loss_mask": _weights,
    **{
        f"train.optimizer.{name}": _optimizer_steps
        for name in ("name", "master_weights", "offload", "grad_accum_dtype")
    },
    **{f"train.{name}": _rates for name in ("steps", "epochs", "lr", "lr_schedule", "warmup_steps")},
    **{f"train.{name}": _optimizer_steps for name in ("weight_decay", "betas", "max_grad_norm")},
    **{f"correction.{name}": _loss for name in CorrectionSection.model_fields if name != "reject"},
    **{f"correction.reject.{name}": _loss for name in RejectionSection.model_fields},
    **{
        f"loss.{name}": _loss
        for cls in LOSSES
        for name in cls.model_fields
        if name not in ("name", "router_aux_loss_coef")
    },
    "seed": _streams,
}
"""Options whose value reaches plain data, and the function that computes that data from a recipe."""


NULL_IS_A_VALUE = frozenset(
    {
        "model.lora.target_modules",
        "train.steps",
        *(f"reward.{kind}[].name" for kind in ("trajectory", "turns", "group", "batch")),
    }
)
"""Options whose null stands for a value, so that one which makes no difference has this value: a recipe may write it down."""


def schema(part: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """Every option, dotted; `tools[].timeout` is that of each tool. A reference is one option, whatever is in it."""
    for name, field in part.model_fields.items():
        absent = type(None) in get_args(field.annotation)  # a section that may be missing is one option
        parts = [section for section in ([] if absent else section_classes(field)) if section is not Use]
        many = "[]" if get_origin(field.annotation) is list else ""
        for section in parts:
            yield from schema(section, f"{prefix}{name}{many}.")
        if not parts:
            yield f"{prefix}{name}"


def options_of(config: Config) -> dict[str, Config]:
    """The options of a recipe that are not at their defaults, each with the recipe as it is without it."""
    return dict(_changed(config, "", lambda part: part))


def _changed(part: Section, prefix: str, rebuild: Callable[[Any], Any]) -> Iterator[tuple[str, Config]]:
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)

        def put(new: Any, name: str = name) -> Any:
            return rebuild(part.model_copy(update={name: new}))

        if not field.is_required() and value == field.default:
            continue
        if isinstance(value, Section) and type(value) is not Use:
            yield from _changed(value, f"{prefix}{name}.", put)
        elif isinstance(value, list) and value and all(isinstance(item, Section) for item in value):
            for place, item in enumerate(value):

                def put_one(new: Any, place: int = place, value: list[Any] = value, put: Any = put) -> Any:
                    return put([*value[:place], new, *value[place + 1 :]])

                yield from _changed(item, f"{prefix}{name}[].", put_one)
        elif field.is_required():
            yield f"{prefix}{name}", rebuild(part)
        else:
            yield f"{prefix}{name}", put(field.default)


def take_effect(config: Config) -> Check:
    """Whether each option that the recipe sets has an effect. A combination in which an option has none fails."""
    name, warnings = "options", []
    try:
        if fine_tunes(config):
            refuse_sft_without_effect(config)
        elif config.engine.has_weights:
            refuse_without_effect(config)
            refuse_without_reward(config)
            warnings = training_warnings(config)
    except ConfigError as error:
        return wrong(name, error)
    options = options_of(config)
    compared = {option: without for option, without in options.items() if option in EFFECTS}
    # once for all options whose effect the same function computes: some make the model without its weights
    own = {compute: _data(compute, config) for compute in {EFFECTS[option] for option in compared}}
    same = {
        option
        for option, without in compared.items()
        if without != config and own[EFFECTS[option]] == _data(EFFECTS[option], without)
    }
    options = {option: without for option, without in options.items() if option not in same & NULL_IS_A_VALUE}
    idle = [option for option in compared if option in same - NULL_IS_A_VALUE]
    changing = len(compared) - len(same)
    summary = (
        f"{len(options)} are set: {changing} were left out one by one, and each changes what is built; the "
        f"others act while a run goes on"
    )
    if idle:
        # with these rows, or in so few steps: a limit that nothing reaches, a system prompt where all rows have one
        warnings.append(f"it makes no difference here to leave out {', '.join(idle)}")
    if warnings:
        return Check(name, "note", "; ".join([summary, *warnings]))
    return Check(name, "ok", summary)


def fine_tunes(config: Config) -> bool:
    """Whether the recipe is one for `turnwise sft`: it sets an option of that command."""
    return bool(changed_options(config.sft))


def _data(compute: Callable[[Config], Any], config: Config) -> Any:
    try:
        return compute(config)
    except TurnwiseError as error:  # without the option the recipe is invalid: the option has an effect
        return str(error)
