"""Recovery: from a run folder, in whatever state a crash left it, to a learner after the last committed step.

The newest snapshot that is whole and belongs to the ledger's chain is loaded; the steps committed after it are trained
again from the stored rollouts in the recorded order, and each result is compared with the recorded hash. So no step
that was published is lost, and versions on record keep their meaning.

Guarantees: in deterministic mode, and for the same machine and settings otherwise, all bits are those of the dead run.
Where a hash differs (other settings, another machine) a new lineage begins with that step and says so; the rollouts
stay trained by the steps that are on record. A crash during recovery is recovered from in the same way.
Not covered: rollouts that are not trained yet (`RolloutBuffer.restore`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soloist.errors import RunError
from soloist.runtime.ledger import Frontier, Ledger, Lineage, StoredStep
from soloist.training.retraining import Metrics, StepLearner, retrain
from soloist.training.snapshots import Part, SnapshotFolder
from soloist.types import Rollout

OnStep = Callable[[StoredStep, Sequence[Rollout], Metrics], None]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What recovery found and did.

    Example: `Recovered(frontier=frontier, snapshot=20, retrained=3, state_hash="ab…")`.
    """

    frontier: Frontier
    snapshot: int
    """Updates that the loaded snapshot contained; 0 when training began from the start."""
    retrained: int
    """Steps trained again after it."""
    state_hash: str
    """Of the learner now."""


async def recover(
    ledger: Ledger,
    snapshots: SnapshotFolder,
    learner: StepLearner,
    *,
    value_updates: int,
    note: Callable[[str], None],
    on_step: OnStep = lambda step, rollouts, metrics: None,
) -> Recovered:
    """Bring a fresh learner to the last committed step. `on_step` hears of each step that is trained again.

    Raises RunError when the steps since the last usable snapshot can't be trained again.
    """
    chain, lineages = await ledger.steps(), await ledger.lineages()
    found = snapshots.load_newest(note, lambda step, parts: _misfit(step, parts, chain, lineages), set_aside=True)
    first = 0
    if found is not None:
        first, parts = found
        await learner.load_state({name: part for name, part in parts.items() if name != "progress"})
    state_hash = await learner.fingerprint()
    if first and state_hash != chain[first - 1].state_hash:
        raise RunError(
            f"the snapshot of step {first} is whole, but gives hash {state_hash[:12]} instead of "
            f"{chain[first - 1].state_hash[:12]}; go on with the version of soloist that wrote it"
        )
    for stored in chain[first:]:
        rollouts = await ledger.rollouts_of(stored.step)
        metrics = await retrain(learner, stored.step, rollouts, value_updates)
        state_hash = await learner.fingerprint()
        await _compare(ledger, stored, state_hash, note)
        on_step(stored, rollouts, metrics)
    frontier = await ledger.frontier()
    return Recovered(frontier=frontier, snapshot=first, retrained=len(chain) - first, state_hash=state_hash)


def _misfit(step: int, parts: dict[str, Part], chain: Sequence[StoredStep], lineages: Sequence[Lineage]) -> str:
    """Why a whole snapshot must not be used, or nothing."""
    if step > len(chain):
        return f"it is of step {step}, but the ledger ends with {len(chain)} steps"
    found = parts["progress"][1]["state_hash"]
    last = chain[step - 1] if step else None
    if last is not None and (found != last.state_hash or last.lineage != _governing(lineages, last.step)):
        return f"its hash {found[:12]} isn't that of step {last.step} in the present lineage, so an older one left it"
    return ""


async def _compare(ledger: Ledger, stored: StoredStep, state_hash: str, note: Callable[[str], None]) -> None:
    """Nothing when the hash is the recorded one; else the step's record in a new lineage."""
    if stored.lineage == _governing(await ledger.lineages(), stored.step):
        if state_hash == stored.state_hash:
            return
        reason = f"step {stored.step} trained again gave hash {state_hash[:12]}, on record is {stored.state_hash[:12]}"
        await ledger.begin_lineage(stored.step, reason)
        note(f"lineage {ledger.lineage} begins: {reason}; settings, versions or machine differ from the first time")
    # A lineage that began before this step has no record of it yet: a crash came between.
    await ledger.recommit(stored, state_hash)


def _governing(lineages: Sequence[Lineage], step: int) -> int:
    return max(one.lineage for one in lineages if one.first_step <= step)
