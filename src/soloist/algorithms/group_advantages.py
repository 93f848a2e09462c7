"""Advantages of rollouts that are compared with others of the same prompt: GRPO and its relatives (methods.md §8).

    GRPO       A_i = (R_i − mean) / std        DeepSeekMath, arXiv 2402.03300
    Dr. GRPO   A_i = R_i − mean                arXiv 2503.20783

mean and std are those of the rewards of i's group, i included.

Guarantees: groups may be of any size from 2 on, numbered and mixed in any way; permuting the rollouts permutes the
result, bit for bit, because rewards are sorted before they are added up. A group without variance gets exactly 0, and a
group of one is refused: it would get 0 for ever and teach nothing. Computed in fp64, returned in fp32 (fp64 if the
rewards are) and detached.
Open: std divides by n − 1 as TRL and verl do, since DeepSeekMath doesn't say. No ε is added to it; rewards that differ
by a rounding only, as sums of the same turns may, are equal, or GRPO would make advantages of ±1 out of it.
Not covered: who is in a group, waiting for it to be complete, and what to draw instead of a dropped group.
Legend: R rollouts; G groups, in ascending order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soloist.algorithms.advantages import result_dtype, sums_of_runs
from soloist.algorithms.tensors import check_packed

# Rewards of a group that lie within so many roundings of their type are equal.
ROUNDINGS = 8


def group_relative(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """A_i = (R_i − mean) / std over i's group, std with n − 1; exactly 0 in a group without variance (GRPO).

    `group_R` (int) is any number that rollouts of one group share. Returns [R], without unit.
    Raises ValueError on shapes, for a reward that is not finite, and for a group of one.
    """
    groups = _Groups.of(rewards_R, group_R)
    # In parts of the group's range, so that squares neither overflow nor vanish.
    scaled = groups.centred() / groups.spread(torch.where(groups.uniform_G, 1.0, groups.highest_G - groups.lowest_G))
    variance_G = sums_of_runs(scaled.square(), groups.sizes_G) / (groups.sizes_G - 1)
    advantages = scaled / groups.spread(torch.where(groups.uniform_G, 1.0, variance_G).sqrt())
    return groups.restore(advantages).to(result_dtype(rewards_R))


def group_mean(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """A_i = R_i − mean over i's group; exactly 0 in a group without variance (Dr. GRPO).

    Arguments and errors as in `group_relative`. Returns [R] in units of the reward; a group's advantages sum to 0.
    """
    groups = _Groups.of(rewards_R, group_R)
    return groups.restore(groups.centred()).to(result_dtype(rewards_R))


def uniform_groups(rewards_R: Tensor, group_R: Tensor) -> Tensor:
    """Whether all rewards of i's group are equal, bool [R]: it has no gradient then (DAPO, arXiv 2503.14476, §3.2).

    Open: what counts is the reward that is trained on; DAPO asks whether all answers, or none, are right.
    Arguments and errors as in `group_relative`.
    """
    groups = _Groups.of(rewards_R, group_R)
    return groups.restore(groups.spread(groups.uniform_G))


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """Rewards in canonical order, group after group and ascending within each: no trace of the order of arrival."""

    sorted_R: Tensor
    """Rewards, fp64."""
    order_R: Tensor
    """Where the sorted rewards stood, int64."""
    sizes_G: Tensor
    """Rollouts of each group, int64, 2 or more."""
    lowest_G: Tensor
    """Lowest reward of each group."""
    highest_G: Tensor
    """Highest reward of each group."""
    uniform_G: Tensor
    """Whether all rewards of the group are equal up to rounding, bool."""

    @classmethod
    def of(cls, rewards_R: Tensor, group_R: Tensor) -> _Groups:
        """Check and sort. Raises ValueError."""
        check_packed(rewards_R=rewards_R, group_R=group_R)
        if group_R.is_floating_point() or group_R.dtype == torch.bool:
            raise ValueError(f"group_R must hold whole numbers, found {group_R.dtype}; pass it as torch.int64")
        rewards = rewards_R.detach().to(torch.float64)
        broken = (~rewards.isfinite()).nonzero().flatten().tolist()
        if broken:
            raise ValueError(
                f"group {int(group_R[broken[0]])} has reward {float(rewards[broken[0]])}; "
                "failed rollouts must be left out before groups are compared"
            )
        by_reward = rewards.argsort(stable=True)
        order_R = by_reward[group_R[by_reward].argsort(stable=True)]
        numbers_G, sizes_G = torch.unique_consecutive(group_R[order_R], return_counts=True)
        if bool((sizes_G < 2).any()):
            raise ValueError(
                f"group {int(numbers_G[sizes_G < 2][0])} has a single rollout, which has nothing to be compared with; "
                "sample 2 rollouts or more of each prompt, or take a baseline without groups (critic, running mean)"
            )
        sorted_R, ends_G = rewards[order_R], sizes_G.cumsum(0)
        lowest_G, highest_G = sorted_R[ends_G - sizes_G], sorted_R[ends_G - 1]
        tolerance = ROUNDINGS * torch.finfo(result_dtype(rewards_R)).eps
        return cls(
            sorted_R=sorted_R,
            order_R=order_R,
            sizes_G=sizes_G,
            lowest_G=lowest_G,
            highest_G=highest_G,
            uniform_G=highest_G - lowest_G <= tolerance * torch.maximum(highest_G.abs(), lowest_G.abs()),
        )

    def centred(self) -> Tensor:
        """R − mean of the group, in canonical order; 0 in uniform groups."""
        # Counted from the lowest reward, so that a large common part costs no digits.
        above = torch.where(self.spread(self.uniform_G), 0.0, self.sorted_R - self.spread(self.lowest_G))
        return above - self.spread(sums_of_runs(above, self.sizes_G) / self.sizes_G)

    def spread(self, numbers_G: Tensor) -> Tensor:
        """Each group's number for each of its rollouts, in canonical order."""
        return torch.repeat_interleave(numbers_G, self.sizes_G)

    def restore(self, numbers: Tensor) -> Tensor:
        """Back from canonical order to that of the arguments."""
        numbers_R = torch.empty_like(numbers)
        numbers_R[self.order_R] = numbers
        return numbers_R
