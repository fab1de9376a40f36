"""What training and fine-tuning have in common: the state of a run, resuming, metrics, evaluation.

Several trained policies: `TrainingRun.policies` are the model of the section `model` and `policies` with `train: true`, each with
a learner, an estimator, a publisher and the recipe as it reads it (`Config.of_policy`); groups are divided among them
(`TrainedPolicy.own`). A further policy is a second adapter on the base weights (`models.lora.with_second_adapter`); in the
embedded engine (`LocalEngine.with_model`), each token of a batch has the adapter of its model, and cached prefixes belong to a
model. Without an adapter in the first model, its weights are the base of the others: it is updated last, and its new weights are
a new version of all policies on it.
"""
