"""Baselines that remember: against plain loops, for any order of arrival, and across a restart."""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.algorithms.baselines import OVERALL_WINDOW, RunningMeans, SuccessRates, forgetting

Step = list[tuple[str, float]]
TASKS = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.lists(st.tuples(TASKS, st.floats(0, 1) | st.just(-0.0)), min_size=1, max_size=6), min_size=1, max_size=6
)


def split(step: Step) -> tuple[list[str], list[float]]:
    return [task for task, _ in step], [reward for _, reward in step]


def run_means(means: RunningMeans, steps: list[Step]) -> list[list[float]]:
    advantages = []
    for step in steps:
        advantages.append(means.advantages(*split(step)))
        means.update(*split(step))
    return advantages


def run_rates(rates: SuccessRates, steps: list[Step], drift: float = 0.01) -> list[list[float]]:
    advantages = []
    for step in steps:
        advantages.append(rates.advantages(*split(step)))
        rates.update(*split(step), {task: drift for task, _ in step if task != "c"})
    return advantages


def test_a_running_mean_counts_earlier_steps_only() -> None:
    """n = 3 over all tasks. First step by its own mean ½; then by it; then by the mean of 1, 1 and ½."""
    means = RunningMeans(per_task=False, window=3)
    assert means.advantages(["a", "b"], [1.0, 0.0]) == [0.5, -0.5]
    means.update(["a", "b"], [1.0, 0.0])
    assert means.baseline(["a", "c"], [1.0, 1.0]) == [0.5, 0.5]
    means.update(["a", "c"], [1.0, 1.0])
    assert means.advantages(["z"], [2.0]) == pytest.approx([2.0 - 2.5 / 3])


def test_a_task_is_measured_by_itself_and_an_unknown_one_by_all() -> None:
    means = RunningMeans(per_task=True, window=8)
    means.update(["a", "a", "a", "b"], [1.0, 1.0, 0.0, 0.0])
    assert means.baseline(["b", "a", "new"], [1.0, 1.0, 1.0]) == [0.0, pytest.approx(2 / 3), 0.5]
    assert means.advantages(["new", "b"], [0.0, 1.0]) == [-0.5, 1.0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(TASKS, st.floats(-5, 5)), min_size=1, max_size=40), st.integers(1, 8), st.booleans())
def test_one_rollout_a_step_is_the_mean_of_the_last_n_rewards(history: Step, window: int, per_task: bool) -> None:
    """With single rollouts no step is ever cut, and a list of all rewards is the reference."""
    means = RunningMeans(per_task=per_task, window=window)
    for done, (task, reward) in enumerate(history):
        own = [r for t, r in history[:done] if t == task][-window:] if per_task else []
        everything = [r for _, r in history[:done]][-(OVERALL_WINDOW if per_task else window) :]
        expected = statistics.fmean(own or everything or [reward])
        assert means.baseline([task], [reward]) == pytest.approx([expected], abs=1e-12)
        means.update([task], [reward])
    assert len(means.state()["overall"]) <= OVERALL_WINDOW


def test_a_step_that_the_window_cuts_counts_as_it_would_on_average_over_all_orders() -> None:
    """n = 3, a step of 0, 0, 1, 1: any rule that picks three would say ⅓ or ⅔, the average over orders is ½."""
    rewards = [0.0, 0.0, 1.0, 1.0]
    means = RunningMeans(per_task=True, window=3)
    means.update(["a"] * 4, rewards)
    by_order = [statistics.fmean(order[-3:]) for order in itertools.permutations(rewards)]
    assert means.baseline(["a"], [1.0]) == [pytest.approx(statistics.fmean(by_order))] == [0.5]
    means.update(["a"], [0.25])
    # One reward more pushes one of the step out, and leaves two with their mean.
    assert means.baseline(["a"], [1.0]) == pytest.approx([(0.5 + 0.5 + 0.25) / 3])


@settings(max_examples=80, deadline=None)
@given(STEPS, st.data(), st.booleans(), st.integers(1, 5))
def test_the_order_of_arrival_within_a_step_changes_no_bit(
    steps: list[Step], data: st.DataObject, per_task: bool, window: int
) -> None:
    orders = [data.draw(st.permutations(range(len(step)))) for step in steps]
    moved = [[step[i] for i in order] for step, order in zip(steps, orders, strict=True)]
    pairs: list[tuple[list[list[float]], list[list[float]]]] = []
    means = [RunningMeans(per_task=per_task, window=window) for _ in range(2)]
    pairs.append((run_means(means[0], steps), run_means(means[1], moved)))
    rates = [SuccessRates() for _ in range(2)]
    pairs.append((run_rates(rates[0], steps), run_rates(rates[1], moved)))
    for plain, permuted in pairs:
        assert [[own[i] for i in order] for own, order in zip(plain, orders, strict=True)] == permuted
    assert json.dumps(means[0].state()) == json.dumps(means[1].state())
    assert json.dumps(rates[0].state()) == json.dumps(rates[1].state())


@settings(max_examples=60, deadline=None)
@given(STEPS, STEPS, st.booleans())
def test_a_restart_from_saved_state_goes_on_as_if_nothing_happened(
    before: list[Step], after: list[Step], per_task: bool
) -> None:
    means, again = RunningMeans(per_task=per_task, window=3), RunningMeans(per_task=per_task, window=3)
    rates, rates_again = SuccessRates(), SuccessRates()
    run_means(means, before)
    run_rates(rates, before)
    again.load_state(json.loads(json.dumps(means.state())))
    rates_again.load_state(json.loads(json.dumps(rates.state())))
    assert run_means(again, after) == run_means(means, after)
    assert run_rates(rates_again, after) == run_rates(rates, after)
    assert again.state() == means.state()


def test_a_step_that_is_repeated_after_a_crash_counts_once() -> None:
    """Advantages only read: a crash before the update leaves no trace, whatever was computed."""
    means, rates = RunningMeans(per_task=True, window=8), SuccessRates()
    means.update(["a"], [1.0])
    rates.update(["a"], [1.0], {})
    saved = means.state(), rates.state()
    first = means.advantages(["a", "b"], [0.0, 1.0]), rates.advantages(["a", "b"], [0.0, 1.0])
    assert (means.state(), rates.state()) == saved
    assert (means.advantages(["a", "b"], [0.0, 1.0]), rates.advantages(["a", "b"], [0.0, 1.0])) == first


def test_state_grows_with_tasks_and_not_with_steps() -> None:
    means, rates = RunningMeans(per_task=True, window=8), SuccessRates()
    sizes = []
    for step in range(600):
        tasks, rewards = ["a", f"t{step % 3}"], [float(step % 2), 0.5]
        means.update(tasks, rewards)
        rates.update(tasks, rewards, {"a": 0.1})
        sizes.append(sum(len(own) for own in means.state()["tasks"].values()))
    assert max(sizes) <= 4 * 8
    assert len(means.state()["overall"]) <= OVERALL_WINDOW
    assert list(rates.state()["counts"]) == ["a", "t0", "t1", "t2"]


@pytest.mark.parametrize("reward", [0.1, 1e150, -3e-300])
def test_rewards_that_never_vary_give_advantages_of_exactly_nothing(reward: float) -> None:
    """A rounding left over would be blown up by whitening."""
    means = RunningMeans(per_task=True, window=7)
    for size in (3, 5, 1, 6):
        assert means.advantages(["a"] * size + ["b"], [reward] * (size + 1)) == [0.0] * (size + 1)
        means.update(["a"] * size + ["b"], [reward] * (size + 1))


def test_a_smaller_window_keeps_the_newest_rewards_of_a_saved_state() -> None:
    means, shorter = RunningMeans(per_task=True, window=4), RunningMeans(per_task=True, window=2)
    for reward in (0.0, 0.0, 1.0, 3.0):
        means.update(["a"], [reward])
    shorter.load_state(means.state())
    assert shorter.baseline(["a"], [0.0]) == [2.0]
    means.update(["b"], [7.0])
    overall = RunningMeans(per_task=False, window=1)
    overall.load_state(means.state())
    assert overall.baseline(["a"], [0.0]) == [7.0]


def test_success_rates_start_from_offline_samples_with_the_weight_of_eight() -> None:
    rates = SuccessRates()
    for task, scores in (("none", []), ("all", [1.0] * 7), ("one", [1.0, 0.0, 0.0])):
        rates.start(task, scores)
    assert rates.state()["counts"] == {"none": [4.0, 4.0], "all": [7.5, 0.5], "one": [3.0, 5.0]}
    assert [rates.rate(task) for task in ("none", "unknown", "all", "one")] == [0.5, 0.5, 0.9375, 0.375]
    assert rates.weight("none") == pytest.approx(0.55)
    assert rates.weight("one") == pytest.approx(math.sqrt(0.375 * 0.625) + 0.05)
    with pytest.raises(ValueError, match="task one has a success rate already"):
        rates.start("one", [1.0])


@pytest.mark.parametrize(
    ("drift", "rho"),
    [(None, 0.96), (0.0, 0.96), (0.006, 2**-0.1), (0.06, 0.875), (0.009, 2**-0.15), (1e300, 0.875), (math.inf, 0.875)],
)
def test_a_policy_that_moved_further_forgets_faster(drift: float | None, rho: float) -> None:
    assert forgetting(drift) == pytest.approx(rho, rel=1e-12)
    rates = SuccessRates()
    rates.update(["a"], [1.0], {} if drift is None else {"a": drift, "b": 9.0})
    assert rates.state()["counts"]["a"] == pytest.approx([4 * rho + 1, 4 * rho])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TASKS, st.floats(0, 1), st.none() | st.floats(0, 1)), max_size=30))
def test_one_reward_a_step_follows_the_recursion(history: list[tuple[str, float, float | None]]) -> None:
    rates, counts = SuccessRates(), dict.fromkeys("abc", (4.0, 4.0))
    for task, reward, drift in history:
        rates.update([task], [reward], {} if drift is None else {task: drift})
        rho = 0.96 if drift is None else max(0.875, min(0.96, 2 ** (-drift / 0.06)))
        a, b = counts[task]
        counts[task] = rho * a + reward, rho * b + 1 - reward
    for task, (a, b) in counts.items():
        assert rates.rate(task) == pytest.approx(a / (a + b), abs=1e-12)
        assert 0.05 <= rates.weight(task) <= 0.55


def test_several_rewards_of_a_step_count_as_they_would_on_average_over_all_orders() -> None:
    rewards, rho = [1.0, 0.0, 0.25], 2**-0.1
    ends = []
    for order in itertools.permutations(rewards):
        a = 4.0
        for reward in order:
            a = rho * a + reward
        ends.append(a)
    rates = SuccessRates()
    rates.update(["t"] * 3, rewards, {"t": 0.006})
    a, b = rates.state()["counts"]["t"]
    assert a == pytest.approx(statistics.fmean(ends), rel=1e-12)
    assert a + b == pytest.approx(8 * rho**3 + 1 + rho + rho**2)


def test_advantages_of_success_rates_are_whitened_over_the_step() -> None:
    """R − p is ½, −½ (p = ½) and −.9375: by hand with mean and std over three rollouts."""
    rates = SuccessRates()
    rates.start("sure", [1.0] * 7)
    advantages = rates.advantages(["x", "y", "sure"], [1.0, 0.0, 0.0])
    raw = [0.5, -0.5, -0.9375]
    expected = [(x - statistics.fmean(raw)) / statistics.pstdev(raw) for x in raw]
    assert advantages == pytest.approx(expected)
    assert statistics.fmean(advantages) == pytest.approx(0.0, abs=1e-12)
    assert rates.advantages(["x", "y"], [1.0, 1.0]) == [0.0, 0.0]
    assert rates.advantages(["x"], [1.0]) == [0.0]


def test_rates_that_differ_by_a_rounding_give_no_advantages() -> None:
    """Both are ⅜, by different roads; whitening what is left of R − p would give ±1."""
    rates = SuccessRates()
    rates.load_state({"counts": {"x": [3.0, 5.0], "y": [3.000000000000008, 5.0]}})
    assert 1.0 - rates.rate("x") != 1.0 - rates.rate("y")
    assert rates.advantages(["x", "y"], [1.0, 1.0]) == [0.0, 0.0]


@pytest.mark.parametrize("reward", [-0.1, 1.5, math.nan, math.inf])
def test_success_rates_refuse_what_is_no_success_rate_and_stay_as_they_were(reward: float) -> None:
    rates = SuccessRates()
    calls: list[Callable[[], object]] = [
        lambda: rates.advantages(["good", "bad"], [1.0, reward]),
        lambda: rates.update(["good", "bad"], [1.0, reward], {}),
        lambda: rates.start("bad", [1.0, reward]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"task bad has reward {reward}"):
            call()
    with pytest.raises(ValueError, match=r"drift must be 0 nats or more, found -0\.1"):
        rates.update(["good", "bad"], [1.0, 1.0], {"bad": -0.1})
    assert rates.state() == {"counts": {}}


@pytest.mark.parametrize("rewards", [[math.nan, 1.0], [math.inf, 1.0], [1.0]])
def test_running_means_refuse_what_would_stay_in_them_for_ever(rewards: Sequence[float]) -> None:
    means = RunningMeans(per_task=True, window=2)
    for method in (means.baseline, means.advantages, means.update):
        with pytest.raises(ValueError, match=r"task a has reward (nan|inf)|found 2 tasks and 1 rewards"):
            method(["a", "b"], rewards)
    assert means.state() == {"overall": [], "tasks": {}}
    with pytest.raises(ValueError, match="1 reward or more, found 0"):
        RunningMeans(per_task=False, window=0)


def test_a_step_without_rollouts_changes_nothing() -> None:
    means, rates = RunningMeans(per_task=True, window=2), SuccessRates()
    assert means.advantages([], []) == [] == rates.advantages([], [])
    means.update([], [])
    rates.update([], [], {})
    assert means.state() == {"overall": [], "tasks": {}}
    assert rates.state() == {"counts": {}}
