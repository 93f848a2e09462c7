"""All settings of a run as one tree of sections. Checked against each other when they become a `RunConfig`.

Not covered: which combinations work (`config.py`, `config_rules.py`) and which keys count (`config_uses.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from soloist.config_sections import (
    AdvantageConfig,
    EngineConfig,
    EnvironmentConfig,
    EvalConfig,
    HealthConfig,
    LossConfig,
    ModelConfig,
    NotNegative,
    PolicyConfig,
    Positive,
    RolloutConfig,
    Section,
    SftConfig,
    ValueConfig,
    ValuePretrainingConfig,
)
from soloist.estimators import ADV_ESTIMATORS


class RunSettings(Section):
    """One run, from SFT to evaluation."""

    name: Annotated[str, Field(min_length=1)] = "run"
    """Folder under `runs_dir`."""
    runs_dir: str = "runs"
    """Where run folders lie."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything: model, demonstrations, tasks, sampling."""
    steps: Positive = 40
    """Policy updates."""
    rollouts_per_step: Positive = 64
    """Rollouts in one policy update."""
    group_size: Positive = 1
    """Rollouts of one task, trained in one step; SAO has 1."""
    players: Positive = 64
    """Episodes played at the same time."""
    lag: NotNegative | None = None
    """Every rollout is exactly min(step, lag) updates old, for comparisons under a controlled lag; unset bounds it."""
    max_staleness: NotNegative = 2
    """Versions that a trained rollout's oldest token may be behind; 0 is synchronous. With a lag it is the lag."""
    on_stale: Literal["wait", "drop", "train"] = "wait"
    """Rollouts that reach the bound: train waits for them, drop aborts them, train ignores the bound."""
    publish_every: Positive = 1
    """Policy updates between two loads of the engines."""
    checkpoint_every: Positive = 20
    """Steps between two checkpoints; the last step always has one."""
    deterministic: bool = False
    """Same bytes in every run; needs max_staleness = 0 or a lag."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted among rollouts, for critic and policy, so nothing can be learned."""
    token_budget: Positive = 8192
    """Tokens of one micro-batch, padding included."""
    keep_rollouts: NotNegative | None = None
    """Steps whose rollouts stay in the ledger with their tokens; unset keeps all (replay needs them), 0 the least."""
    threads: Positive = 1
    """CPU threads of the learner while engines run beside it."""
    samples: NotNegative = 4
    """Rollouts of a step stored token by token for the report, of up to 33 steps spread over the run; 0 stores none."""
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    sft: SftConfig = SftConfig()
    policy: PolicyConfig = PolicyConfig()
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    value: ValueConfig = ValueConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    eval: EvalConfig = EvalConfig()
    health: HealthConfig = HealthConfig()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.runs_dir) / self.name

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator reads a value model."""
        return ADV_ESTIMATORS[self.advantage.adv_estimator].critic

    @property
    def value_updates(self) -> int:
        """K, or 0 without a value model."""
        return self.value.updates_per_step if self.has_critic else 0
