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
        "conversations", "count", "", "Number of conversations. In an evaluation: failed ones included; evaluations of another "
        "number are not compared. In fine-tuning: of the held-out conversations that have a loss.",
        lines="eval, rollout, sft eval",
    ),
    Metric(
        "reward/mean", "reward", _FINISHED, "Total reward of a conversation.",
        same=("reward", "rewards/mean", "mean_reward", "critic/rewards/mean", "critic/score/mean"),
    ),
    Metric(
        "reward/none", "reward", "finished conversations",
        "Share without a reward: no reward function applied and the environment gave none. They are in no mean of rewards, and "
        "get no advantage.",
    ),
    Metric(
        "reward/q10", "reward", "finished conversations",
        "10 % of the conversations of the step have at most this total reward.",
    ),
    Metric(
        "reward/median", "reward", "finished conversations", "Median of the total rewards of the step.",
        same=("reward_median",),
    ),
    Metric(
        "reward/q90", "reward", "finished conversations",
        "90 % of the conversations of the step have at most this total reward.",
    ),
    Metric(
        "reward/std", "reward", "finished conversations",
        "Standard deviation of the total rewards of all groups of the step together.", near=("reward_std",),
    ),
    Metric(
        "rewards/<function>/mean", "reward", "those that the function applies to",
        "Result of one reward function, multiplied by its weight, or a part named in `Reply.rewards`.",
        same=("rewards/<function>", "reward/<function>"),
    ),
    Metric(
        "rewards/<function>/std", "reward", "those that the function applies to",
        "Standard deviation of these results.",
    ),
    Metric(
        "metrics/<name>", "any", "those that reported it",
        "A number that a reward function or an environment reported (TRL: `log_metric`). It is not part of the reward.",
    ),
    Metric(
        "pass_rate", "share", "finished conversations",
        "Conversations whose reward is at least `eval.pass_reward`.", same=("accuracy", "pass@1"), lines="eval",
    ),
    Metric(
        "reward/correlation", "", "finished conversations",
        "Lowest correlation of two parts of the reward. Below 0: a conversation with more of one part has less of the other. "
        "Null if no two parts differ between conversations.",
    ),
    Metric(
        "groups/duplicates", "share", "conversations that did not fail, in groups of several",
        "Conversations whose answers equal those of another conversation of the group.",
    ),
    Metric(
        "groups/zero_std", "share", "groups",
        "Groups whose finished conversations all have the same reward, so that their advantages are 0.",
        same=("frac_reward_zero_std", "groups/all_equal"),
    ),
    Metric(
        "groups/replaced", "count", "",
        "Groups replaced by those of other rows: by `train.dynamic_sampling` (equal rewards) or `train.replace_failed` (too "
        "many failed conversations).",
        lines=_TRAIN,
    ),
    Metric(
        "record/dropped", "count", "",
        "Conversations that `record.every` or `record.best_and_worst` keeps out of `trajectories.jsonl`.",
        lines=_TRAIN,
    ),
    Metric(
        "groups/too_small", "count", "",
        "Groups that are not trained on: fewer than `train.min_group_size` of their conversations did not fail.",
        lines=_TRAIN,
    ),
    Metric("workers/lost", "count", "", "Rollout workers (`cluster=ray`) lost since the last step.", lines=_TRAIN),
    Metric("workers/restarted_conversations", "count", "", "Conversations that ran again after that.", lines=_TRAIN),
    Metric(
        "groups/timed_out", "count", "", "Groups with conversations that `train.group_timeout` ended.", lines=_TRAIN,
    ),
    Metric(
        "rows/skipped", "count", "", "Rows that `data.curriculum` skipped as too hard or too easy.", lines=_TRAIN,
    ),
    Metric(
        "reward/source/<name>", "reward", _FINISHED,
        "Total reward on the rows of one of several data sets of `data.train`.",
    ),
    Metric(
        "turns/mean", "turns", _FINISHED, "Turns of the model in a conversation.",
        same=("num_turns/mean", "num_turns"), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "agents/<name>/conversations", "count", _ALL,
        "Conversations of opened agents of this name, for each conversation of a row (docs/agents_in_episodes.md).",
    ),
    Metric(
        "agents/<name>/reward/mean", "reward", _FINISHED, "Mean reward of these agents' conversations.",
    ),
    Metric(
        "agents/<name>/reward/std", "reward", _FINISHED, "Standard deviation of that reward.",
    ),
    Metric(
        "agents/<name>/turns/mean", "turns", _FINISHED, "Turns in one of these agents' conversations.",
    ),
    Metric(
        "agents/<name>/tokens/sampled", "tokens", _ALL,
        "Tokens that these agents sampled. `tokens/sampled` does not contain them.",
    ),
    Metric(
        "agents/<name>/failed", "fraction", _ALL, "Share of these agents' conversations that failed.",
    ),
    Metric(
        "policies/<policy>/<metric>", "as of the metric", "as of the metric",
        "What the step has learnt for a further trained policy: its `loss`, `kl`, `grad_norm`, `lr`, `ratio/...`, "
        "`tokens/trained` and `correction/...`. Missing in a step without conversations of the policy. Without this prefix: "
        "of the model of the section `model` (docs/agents_in_episodes.md).", lines=_TRAIN,
    ),
    Metric(
        "segments/mean", "segments", _FINISHED,
        "Token sequences of a conversation: more than 1 if the history was rewritten, tools changed or reasoning was removed.",
    ),
    Metric(
        "tool_calls/mean", "calls", _FINISHED, "Tool calls in a conversation, including malformed calls.",
        same=("tools/call_frequency",), near=("tool_call_counts/mean",),
    ),
    Metric(
        "tool_errors/mean", "calls", _FINISHED, "Failed tool calls in a conversation, including malformed calls.",
        near=("tools/failure_frequency",),
    ),
    Metric(
        "stop/<reason>", "share", _ALL,
        "Conversations that ended for this reason ([record](record.md) lists the reasons).",
    ),
    Metric(
        "stop/length", "share", _ALL, "Conversations whose last turn was cut by `limits.tokens_per_turn`.",
        near=("completions/clipped_ratio", "response_length/clip_ratio"),
    ),
    Metric(
        "failed", "share", _ALL, "Conversations that failed with an error. They are excluded from all means and not trained on.",
        lines="train, eval, rollout, sft, sft eval",
    ),
    Metric(
        "template_mismatch", "share", _ALL,
        "Conversations whose tokens differ from the chat template's rendering of the same messages.",
        same=("drift",), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "left_out", "share", _ALL, "Conversations that are longer than `limits.context`. They are not trained on.",
        lines="sft, sft eval",
    ),
    Metric(
        "tokens/sampled", "tokens", f"sum over {_ALL}", "Tokens that the model sampled, in all turns.",
        near=("completions/mean_length", "completions/mean_terminated_length", "response_length/mean", "completion_length"),
    ),
    Metric(
        "tokens/all", "tokens", f"sum over {_ALL}",
        "All tokens: prompts, completions, tool results, user messages. In fine-tuning: of the conversations trained on.",
        same=("perf/total_num_tokens",), near=("num_tokens", "prompt_length/mean"), lines=_ROLLOUTS_AND_SFT,
    ),
    Metric(
        "tokens/trained", "tokens", "sum over optimizer steps",
        "Targets of the loss. Tokens with weight 0 or advantage 0 are not counted; equal turns of a group are counted once.",
        lines="train, sft, sft eval",
    ),
    Metric(
        "tokens/prefix_saved", "share", "tokens of the training sequences",
        "Tokens that training does not compute, because they are in a prefix that sequences of a micro-batch share.",
        lines=_BOTH,
    ),
    Metric(
        "micro_batches/out_of_memory", "count", "",
        "How often the GPU's memory ran out in the update, which went on in smaller micro-batches. Only in such steps.",
        lines=_BOTH,
    ),
    Metric(
        "engine/prefix_hit_rate", "share", "prompt tokens of all turns",
        "Prompt tokens that the engine took from its prefix cache. Null if it does not report them.",
    ),
    Metric(
        "entropy", "nats", "the sampled tokens of finished conversations",
        "Estimate of the entropy: -log p of each sampled token. Null without log-probabilities of the sampled distribution, "
        "which SGLang and `openai` do not report (docs/engines.md).",
        near=("actor/entropy", "actor/entropy_loss"),
    ),
    Metric(
        "loss", "", _STEPS,
        "The loss that is minimized. In fine-tuning: the negative log-likelihood of a token. Null in `critic.warmup_steps`.",
        same=("actor/loss", "train/loss", "train_loss", "eval_loss", "val/loss"), near=("actor/pg_loss", "policy_loss"),
        lines="train, sft, sft eval",
    ),
    Metric(
        "kl", "nats", "trained tokens",
        "KL divergence (estimator k3). With `loss.kl_coef`: from the reference model; otherwise: from the policy that sampled.",
        same=("actor/kl_loss",), near=("actor/ppo_kl", "objective/kl"), lines=_TRAIN,
    ),
    Metric("grad_norm", "", _STEPS, "Norm of the gradient before clipping.", same=("actor/grad_norm",), lines=_BOTH),
    Metric("lr", "", "", "Learning rate of the step.", same=("learning_rate", "actor/lr"), lines=_BOTH),
    Metric(
        "ratio/max_deviation", "ratio", "maximum over trained tokens",
        "Largest difference from 1 of the probability ratio of trainer to engine, before the first optimizer step. "
        "If it is 1e-4 or less, trainer and engine compute the same probabilities.",
        near=(
            "training/rollout_probs_diff_max", "sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/max",
        ),
        lines=_TRAIN,
    ),
    Metric(
        "experts/max_share", "share", "the layers with experts",
        "Share of a layer's most loaded expert in the choices of all tokens (mixture of experts).", lines=_TRAIN,
    ),
    Metric(
        "experts/min_share", "share", "the layers with experts", "Share of the least loaded expert of a layer.",
        lines=_TRAIN,
    ),
    Metric(
        "experts/entropy", "", "the layers with experts",
        "Entropy of the shares of a layer's experts / the logarithm of their number: 1 if all have the same load.",
        lines=_TRAIN,
    ),
    Metric(
        "experts/aux_loss", "", _STEPS,
        "The loss that balances experts, without `loss.router_aux_loss_coef`. If all have the same load, about the number of "
        "experts of a token.",
        near=("aux_loss", "load_balancing_loss"), lines=_TRAIN,
    ),
    Metric(
        "experts/rerouted", "share", "tokens whose experts were recorded",
        "Tokens for which the trainer would have chosen other experts in a layer than were recorded. Needs "
        "`model.router_replay`.", lines=_TRAIN,
    ),
    Metric(
        "ratio/clip_fraction", "share", "trained tokens", "Tokens whose probability ratio is outside the clip bounds.",
        same=("clip_ratio/region_mean", "clip_ratio", "ratio/clipped"),
        near=("clip_ratio/low_mean", "clip_ratio/high_mean", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"), lines=_TRAIN,
    ),
    Metric(
        "correction/k1", "nats", "trained tokens",
        "KL divergence of the trainer's policy from the engine's: log(engine's / trainer's probability), before the first "
        "optimizer step. All of `correction` need `correction.action`, and include conversations with advantage 0.",
        same=("rollout_corr/kl", "rollout_correction/kl"), lines=_TRAIN,
    ),
    Metric(
        "correction/k3", "nats", "trained tokens", "The same with estimator k3.",
        same=("rollout_corr/k3_kl", "rollout_correction/k3_kl"), lines=_TRAIN,
    ),
    Metric(
        "correction/k1/turn_<n>", "nats", "trained tokens of the turns with this index",
        "`correction/k1` of one turn index, counted from 0.", lines=_TRAIN,
    ),
    Metric(
        "correction/k3/turn_<n>", "nats", "trained tokens of the turns with this index",
        "`correction/k3` of one turn index, counted from 0.", lines=_TRAIN,
    ),
    Metric(
        "correction/ppl_ratio", "ratio", "token sequences",
        "Perplexity of a token sequence under the trainer's policy, divided by that under the engine's.",
        same=("rollout_corr/ppl_ratio", "rollout_correction/ppl_ratio"), lines=_TRAIN,
    ),
    Metric(
        "correction/chi2_token", "", "trained tokens", "Chi-square divergence: mean squared ratio of a token, minus 1.",
        same=("rollout_corr/chi2_token", "rollout_correction/chi2_token"), lines=_TRAIN,
    ),
    Metric(
        "correction/chi2_sequence", "", "token sequences",
        "The same for the product of the ratios of a token sequence.",
        same=("rollout_corr/chi2_seq",), near=("rollout_correction/chi2_seq",), lines=_TRAIN,
    ),
    Metric(
        "correction/weight", "", "trained tokens", "Importance weight of a token.",
        near=("rollout_corr/rollout_is_mean", "rollout_correction/is_weight_mean"), lines=_TRAIN,
    ),
    Metric(
        "correction/ess", "share", "trained tokens",
        "Effective sample size: squared mean of the weights, divided by the mean of their squares. 1: all weights are equal.",
        near=("rollout_corr/rollout_is_eff_sample_size", "rollout_correction/ess"), lines=_TRAIN,
    ),
    Metric(
        "correction/clip_fraction", "share", "trained tokens", "Tokens whose ratio is outside the bounds of `correction`.",
        near=("rollout_corr/rollout_is_ratio_fraction_high", "rollout_correction/clipped_frac"), lines=_TRAIN,
    ),
    Metric(
        "correction/rejected", "share", "trained tokens", "Tokens that were removed from the loss and its average.",
        same=("rollout_corr/rollout_rs_masked_fraction",), lines=_TRAIN,
    ),
    Metric(
        "correction/unknown", "share", "trained tokens",
        "Tokens without a log-probability of the kind that the loss needs: the trainer's is used, and their ratio is 1. Of other "
        "metrics of `correction`, they count only in denominators of shares.",
        lines=_TRAIN,
    ),
    Metric(
        "selection/without_loss", "share", "trained tokens",
        "Tokens that have no policy loss, by `loss.top_entropy_quantile` or `loss.clip_cov_ratio`. The metrics of `selection` "
        "need these options or `loss.kl_cov_ratio`. They are of all conversations, also of those whose advantages are 0.",
        lines=_TRAIN,
    ),
    Metric(
        "selection/entropy_threshold", "nats", "step", "The least entropy of a token with a policy loss.", lines=_TRAIN,
    ),
    Metric(
        "selection/covariance", "", "mean over trained tokens",
        "Covariance of log-probability and advantage. The larger it is, the more the step lowers the entropy.", lines=_TRAIN,
    ),
    Metric(
        "selection/with_divergence", "share", "trained tokens", "Tokens with the divergence of `loss.kl_cov_ratio`.",
        lines=_TRAIN,
    ),
    Metric(
        "kl_reward/divergence", "nats", "conversations, of means over their trained tokens",
        "With `reward.kl`: the estimate of the KL divergence of the policy from the reference model.",
        same=("actor/reward_kl_penalty",), lines=_TRAIN,
    ),
    Metric(
        "kl_reward/penalty", "reward", "the finished conversations",
        "What `reward.kl` subtracts from the reward of a conversation. `reward/mean` does not contain it.",
        near=("objective/non_score_reward",), lines=_TRAIN,
    ),
    Metric(
        "kl_reward/coef", "", "", "The coefficient of the KL divergence in the reward (`reward.kl.coef`).",
        same=("actor/reward_kl_penalty_coeff",), lines=_TRAIN,
    ),
    Metric(
        "teacher/divergence", "nats", "trained tokens",
        "The student's log-probability of each sampled token minus the teacher's (of several: of their weighted mean), an "
        "estimate of KL(student || teacher).",
        lines=_TRAIN,
    ),
    Metric(
        "teacher/divergence_turn", "nats", "trained turns",
        "The same, added up over the tokens of a turn.", lines=_TRAIN,
    ),
    Metric(
        "teacher/agreement", "share", "trained tokens",
        "Tokens at which student and teacher find the same token most likely. Of several teachers that score before the update: "
        "the one with the largest weight.",
        lines=_TRAIN,
    ),
    Metric(
        "teacher/loss", "nats", "trained tokens",
        "With `teacher.signal: divergence`: the divergence that is in the loss, without `teacher.coef`.", lines=_TRAIN,
    ),
    Metric(
        "policy_shift", "nats", "tokens of up to 16 conversations",
        "KL divergence of the policy before the update from that after it. Needs `credit.name: spo`.", lines=_TRAIN,
    ),
    Metric(
        "critic/loss", "", _STEPS, "Loss of the critic: half of the squared error of its estimates, with value clipping.",
        same=("critic/vf_loss", "loss/value_avg"), lines=_TRAIN,
    ),
    Metric(
        "critic/explained_variance", "share", "states that the critic is trained on",
        "Share of the returns' variance that estimates before the update explain: 1 is exact, 0 as good as a constant. Null if "
        "all returns are equal.",
        same=("critic/vf_explained_var",), lines=_TRAIN,
    ),
    Metric(
        "critic/clip_fraction", "share", "states that the critic is trained on",
        "States whose loss is larger by value clipping.", same=("critic/vf_clipfrac", "val/clipfrac_avg"), lines=_TRAIN,
    ),
    Metric(
        "critic/grad_norm", "", _STEPS, "Norm of the critic's gradient before clipping.", lines=_TRAIN,
    ),
    Metric(
        "critic/value_mean", "reward", "states that the critic is trained on", "Estimate of the critic before the update.",
        same=("critic/values/mean",), lines=_TRAIN,
    ),
    Metric(
        "version/oldest", "steps", f"minimum over the tokens of {_ALL}",
        "Version (finished steps) of the oldest weights that sampled a token: at most `train.max_staleness` older than the step.",
        same=("version",),
    ),
    Metric(
        "staleness/mean", "steps", "the sampled tokens of the groups that are trained on",
        "Training steps from the weights that sampled a token to the step that trains on it; 0 without `train.max_staleness`.",
        lines=_TRAIN,
    ),
    Metric(
        "staleness/max", "steps", "maximum over the sampled tokens of the groups that are trained on",
        "The same for the oldest token. It is at most `train.max_staleness`.", lines=_TRAIN,
    ),
    Metric(
        "version/newest", "steps", f"maximum over the tokens of {_ALL}", "Version of the newest weights that sampled a token.",
    ),
    Metric(
        "seconds/rollout", "seconds", "",
        "Time from the start of the first conversation to the end of the last, with rewards.",
        near=("timing_s/gen",),
    ),
    Metric(
        "seconds/waiting", "seconds", "",
        "Time for which the trainer waited for conversations. Without `train.max_staleness`, all of the step run in it.",
        lines=_TRAIN,
    ),
    Metric(
        "seconds/conversation/<part>", "seconds", _FINISHED,
        "Time for which a conversation waited for the `engine`, for its `environment` and tools, or for `other` things such as "
        "encoding prompts. [record](record.md#timeline) has the times of each step.",
        lines=_TRAIN,
    ),
    Metric("seconds/replay", "seconds", "", "Time to turn conversations into tokens.", lines=_SFT),
    Metric(
        "seconds/train", "seconds", "", "Time to pack the batch, compute gradients and update the weights.",
        near=("timing_s/update_actor",), lines=_BOTH,
    ),
    Metric(
        "seconds/checkpoint", "seconds", "", "Time to write a checkpoint; 0 in a step without a checkpoint.",
        same=("timing_s/save_checkpoint",), lines=_BOTH,
    ),
    Metric(
        "seconds/step", "seconds", "",
        "Wall-clock time of the step. With `train.max_staleness`, it is less than the sum of the other times.",
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
    close = difflib.get_close_matches(name, known or [metric.name for metric in METRICS], n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _counterparts(name: str) -> Iterator[tuple[str, str]]:
    """The metrics that have this name elsewhere; exact names before names with a variable part."""
    for variable in (False, True):
        for metric in METRICS:
            for text, others in (("its name here is", metric.same), ("the nearest metric here is", metric.near)):
                for other in others:
                    match = _pattern(other).fullmatch(name)
                    if match is not None and variable == ("<" in other):
                        yield text, re.sub(r"<\w+>", match[1], metric.name) if variable else metric.name


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", "(.+)", re.escape(name)))
