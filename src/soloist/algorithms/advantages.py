"""Skip-observation GAE: advantages and value targets on the trainable tokens of a rollout (methods.md §1.4).

    δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1}

SAO, arXiv 2607.07508, eqs 4–5. t runs over the trainable tokens only, in time order, so an observation between two
actions costs no extra γλ, and nothing that the critic says about it can matter. V_t is the value of the state *before*
token t is emitted: for the first token of an action it is read at the position just before it and has seen the
observation.

A rollout with several segments is handed over as one sequence, its segments in time order: a rewrite of the history
counts as an observation (ours). Everything is computed in fp64, returned in fp32 (fp64 if an input is) and detached.
Also here: returns without a critic (`returns_to_go`), and the bookkeeping between rollouts and their packed tokens.
Not covered: whitening (`masked.py`), advantages of whole turns (`step_gae.py`), whether truncated rollouts bootstrap at
all (a setting).
Legend: T packed trainable tokens, rollout after rollout, each in time order; R rollouts; S positions of one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.algorithms.tensors import at_least_float32, check_packed


def gae_over_rollouts(
    rewards_T: Tensor,
    values_T: Tensor,
    lengths_R: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_R: Tensor | None = None,
) -> Tensor:
    """A_t of all rollouts at once; formula in the module's docstring.

    `lengths_R` (int) are the trainable tokens of each rollout, 0 allowed, and sum to T. `lam` is one λ or one for each
    rollout, [R]. `bootstrap_R` is V after the last token, 0 where the episode ended by itself (the default): it takes
    the place of V_{t+1} at the last token. Returns advantages_T in units of the reward.
    Raises ValueError when the shapes don't fit.
    """
    check_packed(rewards_T=rewards_T, values_T=values_T)
    rollout_T = rollout_index(lengths_R, rewards_T.numel())
    rewards = rewards_T.detach().to(torch.float64)
    values = values_T.detach().to(torch.float64)
    decay_R = gamma * _per_rollout("lam", lam, lengths_R)
    bootstrap = _per_rollout("bootstrap_R", 0.0 if bootstrap_R is None else bootstrap_R, lengths_R)

    ends_R, filled_R = lengths_R.cumsum(0), lengths_R > 0
    # Rolled over all rollouts at once; what comes from a neighbour stands at last tokens only, and is replaced.
    next_values = values.roll(-1)
    next_values[ends_R[filled_R] - 1] = bootstrap[filled_R]

    # Time-major and padded at the end with δ = 0, which keeps A at 0 until a rollout's last token is reached.
    time_T = torch.arange(rewards.numel(), device=lengths_R.device) - (ends_R - lengths_R)[rollout_T]
    longest = int(lengths_R.max()) if len(lengths_R) else 0
    table = rewards.new_zeros(longest, len(lengths_R))
    table[time_T, rollout_T] = rewards + gamma * next_values - values
    for time in range(longest - 2, -1, -1):
        table[time].addcmul_(decay_R, table[time + 1])
    return table[time_T, rollout_T].to(result_dtype(rewards_T, values_T))


def value_targets(
    rewards_T: Tensor,
    values_T: Tensor,
    lengths_R: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_R: Tensor | None = None,
) -> Tensor:
    """R_t = A_t(λ_value) + V_t, the λ-return; arguments as in `gae_over_rollouts`.

    With λ = γ = 1 it is the Monte-Carlo return Σ_{k ≥ t} r_k, plus the bootstrap, whatever the values are. Targets
    are never whitened. Returns targets_T in units of the reward. Raises ValueError when the shapes don't fit.
    """
    # Added before rounding to fp32: a critic that is off by 1e9 would otherwise swallow the return.
    values = values_T.detach().to(torch.float64)
    advantages_T = gae_over_rollouts(rewards_T, values, lengths_R, gamma=gamma, lam=lam, bootstrap_R=bootstrap_R)
    return (advantages_T + values).to(result_dtype(rewards_T, values_T))


def returns_to_go(rewards_T: Tensor, lengths_R: Tensor, *, gamma: float) -> Tensor:
    """G_t = Σ_{k ≥ t} γ^{k−t}·r_k over the later trainable tokens of the same rollout, without any critic.

    REINFORCE++ (arXiv 2501.03262) trains on these, whitened over the batch by `masked.whiten`; its penalty per token
    for leaving the reference policy is not part of it. It is GAE with V = 0 and λ = 1, so an observation costs no γ
    (ours). `lengths_R` as in `gae_over_rollouts`. Returns [T] in units of the reward. Raises ValueError on shapes.
    """
    return gae_over_rollouts(rewards_T, torch.zeros_like(rewards_T), lengths_R, gamma=gamma, lam=1.0)


def skip_observation_gae(
    rewards_T: Tensor, values_T: Tensor, *, gamma: float, lam: float, bootstrap: float | Tensor = 0.0
) -> Tensor:
    """A_t of one rollout, given its trainable tokens only: `gae_over_rollouts` with R = 1. Raises ValueError."""
    lengths_R = torch.tensor([rewards_T.numel()], device=rewards_T.device)
    bootstrap_R = torch.as_tensor(bootstrap, dtype=torch.float64, device=rewards_T.device).reshape(1)
    return gae_over_rollouts(rewards_T, values_T, lengths_R, gamma=gamma, lam=lam, bootstrap_R=bootstrap_R)


def gae_with_observations(
    rewards_S: Tensor,
    values_S: Tensor,
    action_mask_S: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: float | Tensor = 0.0,
    terminated: bool = False,
) -> Tensor:
    """Gather the trainable tokens, `skip_observation_gae`, scatter back: A at action positions, exactly 0 elsewhere.

    Rewards may stand anywhere (`rewards_to_actions`); values at masked positions may be anything, NaN included.
    `bootstrap` is V after the last token of a truncated rollout; a terminated one ignores it. λ_policy needs the number
    of trainable tokens: take it from `length_adaptive_lambda(action_mask_S.sum(), alpha)`.
    Returns advantages_S. Raises ValueError when shapes differ, or when a reward has no trainable token to go to.
    """
    check_packed(rewards_S=rewards_S, values_S=values_S, action_mask_S=action_mask_S)
    rewards_T = rewards_to_actions(rewards_S, action_mask_S)
    advantages_T = skip_observation_gae(
        rewards_T, values_S[action_mask_S], gamma=gamma, lam=lam, bootstrap=0.0 if terminated else bootstrap
    )
    advantages_S = advantages_T.new_zeros(action_mask_S.shape)
    advantages_S[action_mask_S] = advantages_T
    return advantages_S


def rewards_to_actions(rewards_S: Tensor, action_mask_S: Tensor) -> Tensor:
    """Move every reward to the last trainable token at or before it; one before the first action goes to the first.

    `action_mask_S` is bool, True for tokens that the policy sampled. Returns rewards_T of the trainable tokens,
    whose sum is the sum of all rewards: none is lost. Raises ValueError when a reward has no trainable token to go to.
    """
    check_packed(rewards_S=rewards_S, action_mask_S=action_mask_S)
    if action_mask_S.dtype != torch.bool:
        raise ValueError(f"action_mask_S must be bool, found {action_mask_S.dtype}")
    n_actions = int(action_mask_S.sum())
    if n_actions == 0 and bool((rewards_S != 0).any()):
        raise ValueError(
            f"rewards of {float(rewards_S.sum())} in all, but no trainable token to credit; "
            "such a rollout is failed (empty) and must not be trained"
        )
    rewards_T = rewards_S.new_zeros(n_actions)
    if n_actions == 0:
        return rewards_T
    # Counting actions up to a position names the last one; before the first it gives −1, hence the clamp.
    owner_S = (action_mask_S.cumsum(0) - 1).clamp(min=0)
    return rewards_T.index_add(0, owner_S, rewards_S.detach())


def bootstrap_values(last_values_R: Tensor, terminated_R: Tensor, truncated_R: Tensor) -> Tensor:
    """V after the last token where a budget cut the rollout and it did not end by itself, else 0 (termination wins).

    All [R], flags bool. `last_values_R` may be anything where it is not used. Raises ValueError on shapes.
    """
    check_packed(last_values_R=last_values_R, terminated_R=terminated_R, truncated_R=truncated_R)
    return torch.where(truncated_R & ~terminated_R, last_values_R.detach(), 0.0)


def length_adaptive_lambda(lengths_R: Tensor, alpha: float) -> Tensor:
    """λ = max(0, 1 − 1/(α·l)), l trainable tokens of a rollout (VAPO, arXiv 2504.05118; SAO has α = 1.5).

    Clamped at 0, since α·l < 1 would make it negative; 0 for l = 0. fp64 of the shape of `lengths_R`: in fp32, λ of a
    long rollout would lose digits that the power λ^l shows. Raises ValueError unless alpha > 0.
    """
    if not alpha > 0:
        raise ValueError(f"length_adaptive_alpha must be above 0, found {alpha}")
    return (1.0 - 1.0 / (alpha * lengths_R.to(torch.float64))).clamp(min=0.0)


def rollout_index(lengths_R: Tensor, tokens: int) -> Tensor:
    """rollout_T: to which rollout 0 … R − 1 each of `tokens` packed tokens belongs, int64, ascending.

    Raises ValueError unless `lengths_R` (int, 0 allowed) is one-dimensional and sums to `tokens`.
    """
    if lengths_R.ndim != 1 or int(lengths_R.sum()) != tokens or bool((lengths_R < 0).any()):
        raise ValueError(f"lengths_R {lengths_R.tolist()} must be one-dimensional and sum to {tokens} tokens")
    return torch.repeat_interleave(torch.arange(len(lengths_R), device=lengths_R.device), lengths_R)


def on_tokens(numbers_R: Tensor, rollout_T: Tensor) -> Tensor:
    """x_t = x of the rollout that token t belongs to: one number per rollout, given to all its trainable tokens.

    `rollout_T` (int) says to which rollout a token belongs, in any order. Returns [T] in fp32 (fp64 if the input is),
    detached. Raises ValueError for an index outside 0 … R − 1, which would otherwise wrap around.
    """
    check_packed(numbers_R=numbers_R)
    check_packed(rollout_T=rollout_T)
    if rollout_T.numel() > 0:
        lowest, highest = int(rollout_T.min()), int(rollout_T.max())
        if lowest < 0 or highest >= len(numbers_R):
            raise ValueError(f"rollout_T must lie in 0 … {len(numbers_R) - 1}, found {lowest} … {highest}")
    return at_least_float32(numbers_R.detach())[rollout_T]


def sums_of_runs(x_T: Tensor, lengths_N: Tensor) -> Tensor:
    """Σ x over each run of neighbours, in fp64, [N]; `lengths_N` (int64, 0 allowed) are the runs, and sum to T.

    Added up one after the other: unlike scattered additions it gives the same bits each time, on a GPU too, and no
    run sees what stands in another.
    """
    if x_T.numel() == 0:
        return torch.zeros(len(lengths_N), dtype=torch.float64, device=x_T.device)
    return torch.segment_reduce(x_T.detach().to(torch.float64), "sum", lengths=lengths_N)


def result_dtype(*inputs: Tensor) -> torch.dtype:
    """fp64 if an input is fp64, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def _per_rollout(name: str, given: float | Tensor, lengths_R: Tensor) -> Tensor:
    """A number for all rollouts, or a tensor [R], as fp64 [R]."""
    tensor = torch.as_tensor(given, dtype=torch.float64, device=lengths_R.device).detach()
    if tensor.ndim > 0 and tensor.shape != lengths_R.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but there are {len(lengths_R)} rollouts")
    return tensor.expand(lengths_R.shape)
