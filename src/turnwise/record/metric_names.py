"""Every metric that turnwise writes: its name, unit and meaning, and what it is called in TRL, verl and ms-swift.

This is the one list of metrics: docs/metrics.md is made from it, and a metric name that a person gives is looked up in it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `<...>` in a name stands for a part that depends on the run, such as the name of a reward function."""

    name: str
    unit: str
    over: str
    """What it is a mean over, unless this says something else than a mean; empty where there is nothing to average."""
    meaning: str
    same: tuple[str, ...] = ()
    """Names of the same figure in TRL, verl, ms-swift and earlier versions of turnwise."""
    near: tuple[str, ...] = ()
    """Names of figures that are computed in another way and answer the same question."""
    lines: str = "train, eval, rollout"
    """The lines of the files that hold it, by command: docs/metrics.md explains the names."""

    def matches(self, name: str) -> bool:
        """Whether the metric has this name in a run."""
        return _pattern(self.name).fullmatch(name) is not None


_FINISHED = "finished conversations"
_ALL = "all conversations"
_STEPS = "optimizer steps"
_TRAIN, _SFT = "train", "sft"
_BOTH = "train, sft"
_ROLLOUTS_AND_SFT = "train, eval, rollout, sft"

METRICS = (
    Metric(
        "step", "steps", "", "Number of finished training steps.",
        same=("training/global_step", "global_step"), lines="train, eval, rollout, sft, sft eval",
    ),
    Metric("epoch", "passes", "", "Passes over the rows so far.", near=("training/epoch",), lines=_BOTH),
    Metric(
        "conversations", "count", "", "Conversations. In fine-tuning: held-out ones that have a loss.",
        lines="eval, rollout, sft eval",
    ),
    Metric(
        "reward/mean", "reward", _FINISHED, "Total reward of a conversation.",
        same=("reward", "rewards/mean", "mean_reward", "critic/rewards/mean", "critic/score/mean"),
    ),
    Metric(
        "reward/none", "reward", "finished conversations",
        "Share without a reward, in no mean.",
    ),
    Metric(
        "reward/q10", "reward", "finished conversations",
        "10 % have at most this reward.",
    ),
    Metric(
        "reward/median", "reward", "finished conversations", "Median of the rewards.",
        same=("reward_median",),
    ),
    Metric(
        "reward/q90", "reward", "finished conversations",
        "90 % have at most this reward.",
    ),
    Metric(
        "reward/std", "reward", "finished conversations",
        "Standard deviation of all rewards.", near=("reward_std",),
    ),
    Metric(
        "rewards/<part>/mean", "reward", _FINISHED,
        "A part of the reward, from the first step with it on (docs/rewards.md): a reward function times its weight, what the "
        "environment named, or as `turns` the rest. Of several data sets or kinds, those count in which the environment gave it.",
        same=("rewards/<part>", "reward/<part>"),
    ),
    Metric(
        "rewards/<part>/std", "reward", "as its mean",
        "Its standard deviation.",
    ),
    Metric(
        "metrics/<name>", "any", "those that reported it",
        "A number that a reward function or an environment reported.",
    ),
    Metric(
        "pass_rate", "share", "finished conversations",
        "Reward of at least `eval.pass_reward`.", same=("accuracy", "pass@1"), lines="eval",
    ),
    Metric(
        "reward/correlation", "", "finished conversations",
        "Lowest correlation of two parts of the reward.",
    ),
    Metric(
        "groups/duplicates", "share", "conversations that did not fail, in groups of several",
        "With the answers of another of the group.",
    ),
    Metric(
        "groups/zero_std", "share", "groups",
        "Groups of equal rewards (advantages of 0, but where turns have returns of their own).",
        same=("frac_reward_zero_std", "groups/all_equal"),
    ),
    Metric(
        "groups/replaced", "count", "",
        "Groups replaced by `train.dynamic_sampling` or `train.replace_failed`.",
        lines=_TRAIN,
    ),
    Metric(
        "record/dropped", "count", "",
        "Conversations that are not recorded.",
        lines=_TRAIN,
    ),
    Metric(
        "groups/too_small", "count", "",
        "Groups below `train.min_group_size`.",
        lines=_TRAIN,
    ),
    Metric("workers/lost", "count", "", "Rollout workers (`cluster=ray`) lost since the last step.", lines=_TRAIN),
    Metric("workers/restarted_conversations", "count", "", "Conversations that ran again after that.", lines=_TRAIN),
    Metric(
        "groups/timed_out", "count", "", "Groups that `train.group_timeout` ended.", lines=_TRAIN,
    ),
    Metric(
        "rows/skipped", "count", "", "Rows that `data.curriculum` skipped.", lines=_TRAIN,
    ),
    Metric(
        "reward/source/<name>", "reward", _FINISHED,
        "Reward on the rows of one of several data sets, or of a kind (`data.columns.source`).",
    ),
    Metric(
        "turns/mean", "turns", _FINISHED, "Turns of the model in a conversation.",
        same=("num_turns/mean", "num_turns"), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "agents/<name>/conversations", "count", _ALL,
        "Conversations of this agent, for each of a row.",
    ),
    Metric(
        "agents/<name>/reward/mean", "reward", _FINISHED, "Their reward.",
    ),
    Metric(
        "agents/<name>/reward/std", "reward", _FINISHED, "Its standard deviation.",
    ),
    Metric(
        "agents/<name>/turns/mean", "turns", _FINISHED, "Turns in one of their conversations.",
    ),
    Metric(
        "agents/<name>/tokens/sampled", "tokens", _ALL,
        "Tokens that they sampled (not in `tokens/sampled`).",
    ),
    Metric(
        "agents/<name>/failed", "fraction", _ALL, "Their conversations that failed.",
    ),
    Metric(
        "policies/<policy>/<metric>", "", "",
        "Metrics of the update of a further trained policy.", lines=_TRAIN,
    ),
    Metric(
        "segments/mean", "segments", _FINISHED,
        "Token sequences of a conversation ([segments](tokens.md)).",
    ),
    Metric(
        "tool_calls/mean", "calls", _FINISHED,
        "Tool calls, also malformed ones, and those in a turn that a limit cut, which are never made.",
        same=("tools/call_frequency",), near=("tool_call_counts/mean",),
    ),
    Metric(
        "tool_errors/mean", "calls", _FINISHED, "Failed tool calls, also malformed ones.",
        near=("tools/failure_frequency",),
    ),
    Metric(
        "stop/<reason>", "share", _ALL,
        "Ended so ([record](record.md#conversations)).",
    ),
    Metric(
        "stop/length", "share", _ALL, "Cut by `limits.tokens_per_turn`.",
        near=("completions/clipped_ratio", "response_length/clip_ratio"),
    ),
    Metric(
        "failed", "share", _ALL, "Failed with an error: in no mean, and not trained on.",
        lines="train, eval, rollout, sft, sft eval",
    ),
    Metric(
        "template_mismatch", "share", _ALL,
        "Tokens differ from the template's rendering ([check](tokens.md#the-sanity-check)).",
        same=("drift",), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "left_out", "share", _ALL, "Longer than `limits.context`: not trained on.",
        lines="sft, sft eval",
    ),
    Metric(
        "tokens/sampled", "tokens", f"sum over {_ALL}", "Tokens that the model sampled.",
    ),
    Metric(
        "tokens/mean", "tokens", _FINISHED, "Tokens that the model sampled in a conversation.",
        near=("completions/mean_length", "completions/mean_terminated_length", "response_length/mean", "completion_length"),
    ),
    Metric(
        "tokens/max", "tokens", f"maximum over {_FINISHED}", "The most tokens that it sampled in one.",
        near=("completions/max_length", "completions/max_terminated_length", "response_length/max"),
    ),
    Metric(
        "tokens/all", "tokens", f"sum over {_ALL}",
        "Also prompts, tool results and user messages.",
        same=("perf/total_num_tokens",), near=("num_tokens", "prompt_length/mean"), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "tokens/trained", "tokens", "sum over optimizer steps",
        "Targets of the loss, without those of weight or advantage 0.",
        lines="train, sft, sft eval",
    ),
    Metric(
        "tokens/prefix_saved", "share", "tokens of the training sequences",
        "Tokens not computed, because sequences share them.",
        lines=_BOTH,
    ),
    Metric(
        "ranks/slowest", "", "ranks that computed in the update",
        "Time of the slowest rank's layers / that of the median rank's, without waiting (in all or for each token, the "
        "smaller of both).",
        lines="train, sft",
    ),
    Metric("ranks/slowest_rank", "", "", "The number of this rank.", lines="train, sft"),
    Metric(
        "micro_batches/out_of_memory", "count", "",
        "How often memory ran out.",
        lines=_BOTH,
    ),
    Metric(
        "engine/prefix_hit_rate", "share", "prompt tokens of all turns",
        "Prompt tokens from the engine's prefix cache.",
    ),
    Metric(
        "entropy", "nats", "sampled tokens",
        "-log p of sampled tokens. Null with SGLang and `openai`.",
        near=("actor/entropy", "actor/entropy_loss"),
    ),
    Metric(
        "loss", "", _STEPS,
        "What is minimized; in fine-tuning: the negative log-likelihood.",
        same=("actor/loss", "train/loss", "train_loss", "eval_loss", "val/loss"), near=("actor/pg_loss", "policy_loss"),
        lines="train, sft, sft eval",
    ),
    Metric(
        "kl", "nats", "trained tokens",
        "KL divergence (k3) from the reference model with `loss.kl_coef`, else from the policy that sampled.",
        same=("actor/kl_loss",), near=("actor/ppo_kl", "objective/kl"), lines=_TRAIN,
    ),
    Metric("grad_norm", "", _STEPS, "Norm of the gradient before clipping.", same=("actor/grad_norm",), lines=_BOTH),
    Metric("lr", "", "", "Learning rate of the step.", same=("learning_rate", "actor/lr"), lines=_BOTH),
    Metric(
        "ratio/max_deviation", "ratio", "maximum over trained tokens",
        "Difference from 1 of the ratio of trainer to engine before the first optimizer step.",
        near=(
            "training/rollout_probs_diff_max", "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/max",
        ),
        lines=_TRAIN,
    ),
    Metric(
        "experts/max_share", "share", "the layers with experts",
        "Share of a layer's most loaded expert.", lines=_TRAIN,
    ),
    Metric(
        "experts/min_share", "share", "the layers with experts", "Share of the least loaded expert.",
        lines=_TRAIN,
    ),
    Metric(
        "experts/entropy", "", "the layers with experts",
        "Entropy of the shares: 1 if all are equal.",
        lines=_TRAIN,
    ),
    Metric(
        "experts/aux_loss", "", _STEPS,
        "The loss that balances experts, without its coefficient.",
        near=("aux_loss", "load_balancing_loss"), lines=_TRAIN,
    ),
    Metric(
        "experts/rerouted", "share", "tokens whose experts were recorded",
        "Tokens for which the trainer would choose other experts.", lines=_TRAIN,
    ),
    Metric(
        "ratio/clip_fraction", "share", "trained tokens", "Tokens whose probability ratio is outside the clip bounds.",
        same=("clip_ratio/region_mean", "clip_ratio", "ratio/clipped"),
        near=("clip_ratio/low_mean", "clip_ratio/high_mean", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"), lines=_TRAIN,
    ),
    Metric(
        "correction/k1", "nats", "trained tokens",
        "KL divergence of the trainer's policy from the engine's (k1). `correction/...` needs `correction.action`.",
        same=("rollout_corr/kl", "rollout_correction/kl"), lines=_TRAIN,
    ),
    Metric(
        "correction/k3", "nats", "trained tokens", "The same with k3.",
        same=("rollout_corr/k3_kl", "rollout_correction/k3_kl"), lines=_TRAIN,
    ),
    Metric(
        "correction/k1/turn_<n>", "nats", "trained tokens of the turns with this index",
        "The same for turns with this index.", lines=_TRAIN,
    ),
    Metric(
        "correction/k3/turn_<n>", "nats", "trained tokens of the turns with this index",
        "The same with k3.", lines=_TRAIN,
    ),
    Metric(
        "correction/ppl_ratio", "ratio", "token sequences",
        "Perplexity under the trainer's policy / under the engine's.",
        same=("rollout_corr/ppl_ratio", "rollout_correction/ppl_ratio"), lines=_TRAIN,
    ),
    Metric(
        "correction/chi2_token", "", "trained tokens", "Chi-square divergence: mean squared ratio of a token, minus 1.",
        same=("rollout_corr/chi2_token", "rollout_correction/chi2_token"), lines=_TRAIN,
    ),
    Metric(
        "correction/chi2_sequence", "", "token sequences",
        "The same for a sequence's product of ratios.",
        same=("rollout_corr/chi2_seq",), near=("rollout_correction/chi2_seq",), lines=_TRAIN,
    ),
    Metric(
        "correction/weight", "", "trained tokens", "Importance weight.",
        near=("rollout_corr/rollout_is_mean", "rollout_correction/is_weight_mean"), lines=_TRAIN,
    ),
    Metric(
        "correction/ess", "share", "trained tokens",
        "Effective sample size of the weights.",
        near=("rollout_corr/rollout_is_eff_sample_size", "rollout_correction/ess"), lines=_TRAIN,
    ),
    Metric(
        "correction/clip_fraction", "share", "trained tokens", "Tokens with a ratio outside the bounds of `correction`.",
        near=("rollout_corr/rollout_is_ratio_fraction_high", "rollout_correction/clipped_frac"), lines=_TRAIN,
    ),
    Metric(
        "correction/rejected", "share", "trained tokens", "Tokens removed from the loss and its average.",
        same=("rollout_corr/rollout_rs_masked_fraction",), lines=_TRAIN,
    ),
    Metric(
        "correction/unknown", "share", "trained tokens",
        "Tokens of unknown log-probability: their ratio is 1.",
        lines=_TRAIN,
    ),
    Metric(
        "selection/without_loss", "share", "trained tokens",
        "Tokens without policy loss.",
        lines=_TRAIN,
    ),
    Metric(
        "selection/entropy_threshold", "nats", "step", "Least entropy of a token with a policy loss.", lines=_TRAIN,
    ),
    Metric(
        "selection/covariance", "", "mean over trained tokens",
        "Covariance of log-probability and advantage.", lines=_TRAIN,
    ),
    Metric(
        "selection/with_divergence", "share", "trained tokens", "Tokens with the divergence of `loss.kl_cov_ratio`.",
        lines=_TRAIN,
    ),
    Metric(
        "kl_reward/divergence", "nats", "conversations, of means over their trained tokens",
        "With `reward.kl`: the policy's KL divergence from the reference model.",
        same=("actor/reward_kl_penalty",), lines=_TRAIN,
    ),
    Metric(
        "kl_reward/penalty", "reward", "the finished conversations",
        "What `reward.kl` subtracts (not in `reward/mean`).",
        near=("objective/non_score_reward",), lines=_TRAIN,
    ),
    Metric(
        "kl_reward/coef", "", "", "The coefficient (`reward.kl.coef`).",
        same=("actor/reward_kl_penalty_coeff",), lines=_TRAIN,
    ),
    Metric(
        "teacher/divergence", "nats", "trained tokens",
        "The student's log-probability minus the (mean) teacher's: KL(student || teacher).",
        lines=_TRAIN,
    ),
    Metric(
        "teacher/divergence_turn", "nats", "trained turns",
        "The same, added up over a turn.", lines=_TRAIN,
    ),
    Metric(
        "teacher/agreement", "share", "trained tokens",
        "Student and (main) teacher find the same token most likely.",
        lines=_TRAIN,
    ),
    Metric(
        "teacher/loss", "nats", "trained tokens",
        "The divergence in the loss, without `teacher.coef`.", lines=_TRAIN,
    ),
    Metric(
        "policy_shift", "nats", "tokens of up to 16 conversations",
        "KL divergence of the policy before the update from that after it (`spo`).", lines=_TRAIN,
    ),
    Metric(
        "critic/loss", "", _STEPS, "Half the squared error, with value clipping.",
        same=("critic/vf_loss", "loss/value_avg"), lines=_TRAIN,
    ),
    Metric(
        "critic/explained_variance", "share", "states that the critic is trained on",
        "Share of the returns' variance that its estimates explain.",
        same=("critic/vf_explained_var",), lines=_TRAIN,
    ),
    Metric(
        "critic/clip_fraction", "share", "states that the critic is trained on",
        "States whose loss value clipping makes larger.", same=("critic/vf_clipfrac", "val/clipfrac_avg"), lines=_TRAIN,
    ),
    Metric(
        "critic/grad_norm", "", _STEPS, "Norm of its gradient before clipping.", lines=_TRAIN,
    ),
    Metric(
        "critic/value_mean", "reward", "states that the critic is trained on", "Its estimate before the update.",
        same=("critic/values/mean",), lines=_TRAIN,
    ),
    Metric(
        "version/oldest", "steps", f"minimum over the tokens of {_ALL}",
        "Version (finished steps) of the oldest weights that sampled a token.",
        same=("version",),
    ),
    Metric(
        "staleness/mean", "steps", "trained groups' sampled tokens",
        "Steps from a token's weights to the step that trains on it.",
        lines=_TRAIN,
    ),
    Metric(
        "staleness/max", "steps", "maximum over trained groups' sampled tokens",
        "The same for the oldest token.", lines=_TRAIN,
    ),
    Metric(
        "version/newest", "steps", f"maximum over the tokens of {_ALL}", "Of the newest.",
    ),
    Metric(
        "seconds/rollout", "seconds", "",
        "From the first start to the last end, with rewards.",
        near=("timing_s/gen",),
    ),
    Metric(
        "seconds/waiting", "seconds", "",
        "How long the trainer waited for conversations.",
        lines=_TRAIN,
    ),
    Metric(
        "seconds/conversation/<part>", "seconds", _FINISHED,
        "How long a conversation waited for the `engine`, its `environment`, or `other`.",
        lines=_TRAIN,
    ),
    Metric("seconds/replay", "seconds", "", "Turning conversations into tokens.", lines=_SFT),
    Metric(
        "seconds/train", "seconds", "", "Packing, gradients and update.",
        near=("timing_s/update_actor",), lines=_BOTH,
    ),
    Metric(
        "seconds/checkpoint", "seconds", "", "Writing a checkpoint.",
        same=("timing_s/save_checkpoint",), lines=_BOTH,
    ),
    Metric(
        "seconds/step", "seconds", "",
        "Wall-clock time of the step.",
        same=("timing_s/step", "perf/time_per_step", "step_time"), lines=_BOTH,
    ),
)  # fmt: skip
"""All metrics, in the order of docs/metrics.md."""


def metric_of(name: str) -> Metric | None:
    """The metric that a name in a run belongs to, or None for an unknown name. A name without a variable part comes first."""
    matching = [metric for metric in METRICS if metric.matches(name)]
    return min(matching, key=lambda metric: "<" in metric.name, default=None)


def metric_hint(name: str, known: Sequence[str] = ()) -> str:
    """A hint for an unknown metric name: `; it is called reward/mean here`, or the empty text.

    `known` are the names in the run at hand, which a misspelled name is compared with.
    """
    for text, our_name in _counterparts(name):
        if not known or our_name in known:
            return f"; {text} {our_name}"
    if asked := reward_part(name):
        parts = {of[0]: one for one in known if (of := reward_part(one)) and of[1] == asked[1]}
        near = difflib.get_close_matches(asked[0], parts, n=1, cutoff=0.75)  # another part is not what was meant
        return f"; did you mean {parts[near[0]]}" if near else f"; no conversation had a part {asked[0]} of the reward"
    close = difflib.get_close_matches(name, known or [metric.name for metric in METRICS], n=1)
    return f"; did you mean {close[0]}" if close else ""


def metric_here(name: str, known: Sequence[str]) -> str | None:
    """The metric of `known` that another library calls by this name and that is the same number; None if there is none."""
    same = (ours for text, ours in _counterparts(name) if text == _SAME and ours in known)
    return next(same, None)


def reward_part(name: str) -> tuple[str, str] | None:
    """The part of the reward that a metric is of, and `mean` or `std`; None for another metric.

    Example: `rewards/answer/mean`: `("answer", "mean")`.
    """
    found = _PART.fullmatch(name)
    return None if found is None else (found[1], found[2])


_PART = re.compile(r"(?:eval/)?rewards/(.+)/(mean|std)")


_SAME = "its name here is"


def _counterparts(name: str) -> Iterator[tuple[str, str]]:
    """The metrics that have this name elsewhere; exact names before names with a variable part."""
    for variable in (False, True):
        for metric in METRICS:
            for text, others in ((_SAME, metric.same), ("the nearest metric here is", metric.near)):
                for other in others:
                    match = _pattern(other).fullmatch(name)
                    if match is not None and variable == ("<" in other):
                        yield text, re.sub(r"<\w+>", match[1], metric.name) if variable else metric.name


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", "(.+)", re.escape(name)))
