"""The sections of the config: one class each, with every field's effect, unit and off-value in the line under it.

Limits of single values stand here; combinations of values are checked by `RunConfig` in `config.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from soloist.methods import LOSS_METHODS

# The ceiling catches slips such as `1e9`, which would otherwise end as an allocation that fails far from its cause.
Positive = Annotated[int, Field(ge=1, le=100_000_000)]
NotNegative = Annotated[int, Field(ge=0, le=100_000_000)]
Rate = Annotated[float, Field(gt=0)]
NotNegativeSeconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all config sections: unknown keys are refused, values are fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """Which model to train: a Hugging Face folder, or a tiny one that is built from scratch."""

    path: str = ""
    """Folder with config.json, tokenizer and safetensors; empty builds a tiny model of `family`."""
    family: Literal["qwen3", "qwen3_moe"] = "qwen3"
    """Architecture of the built model."""
    hidden_size: Positive = 96
    """Width of the built model."""
    layers: Positive = 4
    """Decoder layers of the built model."""
    heads: Positive = 4
    """Attention heads of the built model (as many key/value heads)."""
    mlp_size: Positive = 288
    """Inner width of the built model's MLP, or of each expert."""
    experts: Positive = 8
    """Experts per MoE layer (qwen3_moe only)."""
    experts_per_token: Positive = 2
    """Experts that each token uses (qwen3_moe only)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of policy and value backbone; log-probabilities and the value head are fp32 always."""
    device: str = "cpu"
    """Device of the learner, as torch names it."""
    renderer: str = "auto"
    """Messages to tokens: `auto` by the tokenizer, a name of the renderers package, `terse`, or `module.Class`."""


class EnvironmentConfig(Section):
    """The tasks and their tools."""

    name: str = "calculator"
    """Registered environment."""
    preset: Literal["default", "hard"] = "default"
    """Difficulty of calculator problems: default is 2-3 operands of 1-99; hard has 4 of 1-999 and parentheses."""
    tasks: str = ""
    """JSON-lines file of training tasks, one object a line; empty generates them from the seed."""
    distinct_tasks: NotNegative = 0
    """Generated training tasks before they come again, in epochs; 0 never repeats."""
    tool_seconds: Rate = 2.0
    """Seconds of computation a tool call may take before it becomes an error observation."""
    tool_memory_mb: Positive = 64
    """Memory of a tool call, in MB."""
    tool_output_chars: Positive = 200
    """Characters of a tool result that the model sees; more is cut and marked."""


class EngineConfig(Section):
    """What samples the rollouts."""

    kind: Literal["local"] = "local"
    """`local` is the embedded child process."""
    count: Positive = 1
    """Engines that sample for training; evaluation has one of its own while it runs."""
    slots: Positive = 64
    """Requests decoded together (rows of the key/value cache)."""
    max_length: Positive = 256
    """Tokens that one slot holds: prompt, actions and observations of a rollout."""
    on_load: Literal["in_flight", "recompute"] = "in_flight"
    """New weights in the middle of a rollout: keep its cache, or compute the cache anew."""
    threads: Positive = 1
    """CPU threads of each engine process."""
    cores: tuple[NotNegative, ...] = ()
    """CPU cores that engine processes may use, by number; empty leaves the choice to the system."""
    prefill_chunk: Positive = 256
    """Prompt tokens computed in one step beside running requests; more delay their tokens longer."""
    cuda_graphs: bool = False
    """Launch decode steps as recorded CUDA graphs: less waiting for the host, some memory for each width."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights."""
    device: str = "cpu"
    """Device of the engine."""
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Studies of mismatch: normal noise on weights that sample, relative to each tensor's spread; 0 is off."""
    rounding: Literal["none", "bfloat16", "float8_e4m3fn"] = "none"
    """Studies of mismatch: weights that sample are rounded to this type and computed in engine.dtype."""
    restarts: NotNegative = 3
    """Fresh child processes after crashes before the engine counts as lost."""
    request_seconds: Rate = 120.0
    """Deadline of one generate call; beyond it the rollout fails at the engine's boundary."""


class RolloutConfig(Section):
    """Budgets of one episode. Reaching one truncates the rollout, which is scored and trained."""

    temperature: Rate = 1.0
    """Sampling temperature of training rollouts."""
    max_new_tokens: Positive = 64
    """Tokens of one turn."""
    max_tokens: Positive = 200
    """Tokens of the whole rollout, prompt and observations included."""
    max_turns: Positive = 4
    """Actions of one episode."""
    max_seconds: Rate = 60.0
    """Wall-clock seconds of one episode."""
    attempts: Positive = 3
    """Tries of one place before its failure is final."""
    retry_seconds: NotNegativeSeconds = 0.5
    """Pause after a failed try, doubled with each further one, 30 s at most; 0 tries again at once."""


class SftConfig(Section):
    """Supervised stage on demonstrations that are mixed on purpose."""

    steps: NotNegative = 500
    """Optimizer steps; 0 skips the stage and trains from the model as it is."""
    batch_size: Positive = 64
    """Demonstrations in a step."""
    lr: Rate = 3e-3
    """Peak learning rate: linear warm-up, then cosine decay to a tenth."""
    warmup_steps: NotNegative = 30
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW decay."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    good: Share = 0.4
    """Share of demonstrations that use the tool and copy the problem correctly."""
    miscopied: Share = 0.35
    """Share that calls the tool on a wrongly copied problem; the rest guesses without a tool."""
    threads: Positive = 1
    """CPU threads of this stage and of value pretraining. Two gain little on idle cores and lose much on busy ones."""


class PolicyConfig(Section):
    """Optimizer of the policy."""

    lr: Rate = 4e-4
    """Learning rate after warm-up."""
    warmup_steps: NotNegative = 5
    """Updates of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW decay."""
    adam_eps: Rate = 1e-8
    """Size of a parameter's gradient below which its steps shrink; above the noise, noise takes no full steps."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""
    reset_optimizer_at_publish: bool = False
    """Forget the optimizer's moments whenever engines got new weights (GLM-5)."""
    minibatches: Positive = 1
    """Parts of a step, each with an optimizer step of its own."""
    epochs: Positive = 1
    """Passes over a step's rollouts."""


LossName = Literal[
    "dis",
    "ppo",
    "clip_higher",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "tis",
    "icepop",
    "m2po",
    "dppo_tv",
    "decoupled_ppo",
    "a3po",
    "sat_ppo",
    "sat_grpo",
    "sat_gspo",
    "importance_weighting",
]
EstimatorName = Literal[
    "skip_observation_gae",
    "step_gae_mean",
    "step_gae_last",
    "group_relative",
    "group_mean",
    "running_mean",
    "spo",
    "reinforce_pp",
]


class LossConfig(Section):
    """Policy loss and its trust region. Unset keys take the method's own values (docs/algorithms/README.md)."""

    policy_loss: LossName = "dis"
    """The method; each is a ratio, a region, a surrogate and an aggregation."""
    eps_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """Ratio may fall to 1 - eps_low."""
    eps_high: Annotated[float, Field(gt=0)] | None = None
    """Ratio may rise to 1 + eps_high."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"] | None = None
    """How per-token terms become one number, over the whole step."""
    fixed_length: NotNegative = 0
    """Denominator per rollout of `fixed-length`, in tokens; 0 takes rollout.max_tokens."""
    old_log_probs: Literal["rollout", "recompute"] | None = None
    """Old policy of the ratio: as the engine recorded it, or the weights at the start of the step."""
    sat_kernel: Literal["hill", "hill_half", "hill_excess"] | None = None
    """How SAT's interval shrinks beyond the quantile."""
    sat_quantile: Share | None = None
    """Share of tokens whose interval SAT leaves alone."""
    sat_over: Literal["step", "micro_batch"] | None = None
    """Tokens that SAT's quantile is taken over."""
    truncation_cap: Rate | None = None
    """Largest correction factor of `tis`."""
    icepop_low: Rate | None = None
    """Smallest correction factor that `icepop` keeps."""
    icepop_high: Rate | None = None
    """Largest correction factor that `icepop` keeps."""
    correction_over: Literal["token", "sequence", "sequence_mean"] | None = None
    """Correction factor of each token, of its sequence (a product), or the geometric mean over its sequence."""
    m2_threshold: Rate | None = None
    """Mean squared log-ratio that `m2po` keeps below."""
    tv_delta: Rate | None = None
    """Difference of probabilities at which `dppo_tv` masks."""
    ratio_cap: Rate | None = None
    """Largest ratio of `dppo_tv`."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the SFT policy (k3); 0 is off."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus; 0 is off."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """The method's own values for what isn't set, so that a resolved config says what counts."""
        method = LOSS_METHODS.get(raw.get("policy_loss", "dis")) if isinstance(raw, dict) else None
        if method is None:
            return raw
        own = {"loss_agg_mode": method.loss_agg_mode, "old_log_probs": method.old_log_probs[0], **method.settings}
        return own | {key: value for key, value in raw.items() if value is not None or key not in own}


class AdvantageConfig(Section):
    """Advantage estimator (docs/algorithms/README.md)."""

    adv_estimator: EstimatorName = "skip_observation_gae"
    """The method; GAE of all kinds needs a value model, the others none."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per action token (per turn for step_gae_*)."""
    lambda_policy: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fixed λ of the policy's advantages; unset takes 1 - 1/(length_adaptive_alpha · action tokens, or turns)."""
    length_adaptive_alpha: Rate = 1.5
    """α of the length-adaptive λ."""
    bootstrap_truncated: bool = False
    """Add γ·V of the state after the last token when a budget cut the rollout."""
    order: Literal["value_first", "advantages_first"] = "value_first"
    """Advantages from the critic after its K updates, or before them."""
    whiten: bool = False
    """Scale the policy's advantages to mean 0 and standard deviation 1 over the step."""
    running_mean_over: Literal["global", "task"] = "global"
    """Whose rewards `running_mean` averages: all, or those of the same task."""
    running_mean_window: NotNegative = 0
    """Rewards in the running mean; 0 takes 128 (global) or 8 (task)."""
    spo_offline_samples: NotNegative = 0
    """Rollouts of each task played by the SFT policy before the first step, for a start of `spo`; 0 starts at 1/2."""
    drop_uniform_groups: bool = False
    """Groups whose rewards are all equal are not trained; the next task takes their place (DAPO)."""
    overlong_buffer: NotNegative = 0
    """Tokens before rollout.max_tokens over which the reward falls by up to 1 (DAPO's shaping); 0 is off."""


class ValueConfig(Section):
    """Value model: same backbone as the policy, scalar head in fp32 (methods §1.3)."""

    lr: Rate = 1.5e-3
    """Learning rate after warm-up."""
    updates_per_step: NotNegative = 2
    """K: value updates for each policy update; estimators without a value model make none."""
    warmup_steps: NotNegative = 10
    """Updates of linear warm-up."""
    lambda_value: Annotated[float, Field(ge=0, le=1)] = 1.0
    """λ of the value target; 1 is the Monte-Carlo return."""
    freeze: tuple[str, ...] = (r"\.self_attn\.", r"\.embed_tokens\.")
    """Regular expressions of parameter names that do not train during RL."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW decay."""
    max_grad_norm: Rate = 1.0
    """Gradients are scaled down to this norm."""


class ValuePretrainingConfig(Section):
    """Stage that fits the value model to rollouts of the fixed SFT policy."""

    rollouts: Positive = 960
    """Rollouts made once and stored."""
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of them that is never trained on."""
    epochs: Positive = 8
    """Passes at most."""
    patience: Positive = 2
    """Epochs without a better held-out skill before the stage stops."""
    batch_size: Positive = 64
    """Rollouts in one update."""
    lr: Rate = 1.5e-3
    """Learning rate; everything trains, nothing is frozen."""
    gate: float = 0.0
    """Held-out skill must exceed this, or the stage fails."""


class EvalConfig(Section):
    """Held-out evaluation of exactly one version."""

    problems: Positive = 256
    """Held-out tasks."""
    samples: Positive = 4
    """Rollouts of each."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0 is greedy."""


class HealthConfig(Section):
    """When the run speaks up, and when it stops."""

    stall_report_seconds: Rate = 30.0
    """Waiting longer than this is reported with queue sizes, versions and the oldest rollout."""
    stall_limit_seconds: Rate = 300.0
    """Waiting longer than this ends the run with exit code 1."""
    lease_seconds: Rate = 180.0
    """A rollout without a sign of life for so long is given up and its place played again; a late result is refused."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite, with its rollouts named: stop ends the run, skip leaves the update out."""
    max_failed_ratio: Share = 0.5
    """Share of failed rollouts, over the last 20 or more, above which the run stops."""
