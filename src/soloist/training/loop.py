"""The main loop, and the player that feeds it. Read this file first.

 task        consumes                 produces          waits for                     woken by
 train       a full step of rollouts  weights of v + 1  `take`: the step is full      a rollout that takes its place
 player n    a place and its task     one rollout       `lease`: a place is free      a step taken, new weights
 record r    one rollout              a trainable one   the disk; a pause if it broke the ledger
 (buffer)    time                     stall reports     nobody                        whoever waits

With a `lag`, `train` also waits in `publish`: for full steps of the engines' version, before they load the next.

All waiting happens in `runtime/buffer.py`. Every task belongs to one TaskGroup; the first that fails ends the run.
"""

from __future__ import annotations

import asyncio

from soloist.training.run import Run


async def train(run: Run) -> None:
    """Take `steps` optimizer steps. Any task that fails ends the run with its error."""
    timed = run.stopwatch.timed
    async with asyncio.TaskGroup() as group:
        players = [group.create_task(play(run, group), name=f"player {n}") for n in range(run.config.players)]
        for step in range(run.first_step, run.config.steps):
            rollouts = await timed("wait_for_rollouts", run.buffer.take(version=step))
            for _ in range(run.config.value_updates):  # the critic learns faster: K = 2
                value = await timed("update_value", run.learner.update_value(rollouts))
                run.note(value)
            policy = await timed("update_policy", run.learner.update_policy(rollouts))  # skip-observation GAE, DIS
            run.note(policy)
            await timed("commit", run.commit(step, rollouts))  # what was trained is on record …
            if run.publishes_after(step):
                await timed("weight_sync", run.publish(step + 1))  # … before anyone samples from it
            await run.record(step, rollouts)
        for player in players:
            player.cancel()


async def play(run: Run, group: asyncio.TaskGroup) -> None:
    """Play one rollout after another, for ever. A rollout that breaks is data; it never ends the player."""
    while True:
        lease = await run.buffer.lease(lambda: run.engines.version)
        rollout = await run.played(lease)
        if rollout is not None:  # else its lease ran out, and the place is somebody else's
            record = group.create_task(run.ended(lease, rollout), name=f"record of {lease.rollout_id}")
            if rollout.failure is not None:  # a player pauses after what broke; else the next game need not wait
                await record
