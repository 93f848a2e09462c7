"""The environment `calculator`: arithmetic with a `python` tool that really runs what the model writes.

Guarantees: tasks depend on (seed, index) only; held-out problems are never training problems, by their text, and are
distinct within each 256; the score is exact, 1 or 0, from a strict grammar of integers, in this process and apart from
the sandbox; nothing that the model writes can make scoring fail, a gold answer that can't be read does
(`RolloutError("scorer", …)`). A truncated episode without a final answer scores 0: it has not answered.
Not covered: partial credit; problems in words are possible from a task file only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from soloist.config import EnvironmentConfig
from soloist.environments.arithmetic import (
    OPERATORS,
    PRESETS,
    canonical,
    draw_problem,
    evaluate,
    is_held_out,
    parse_integer,
)
from soloist.environments.base import Action, Demonstration, StepResult, keyed_random
from soloist.environments.sandbox import MontySandbox
from soloist.environments.task_files import Row, read_rows
from soloist.environments.tools import Toolbox
from soloist.errors import RolloutError, UserError
from soloist.types import Message, Task

HELD_OUT_BLOCK = 256
"""Held-out tasks are distinct within blocks of this size."""


class Calculator:
    """Tasks, episodes and demonstrations of arithmetic.

    Example: `Calculator(EnvironmentConfig(), seed=0).train_task(17)` has `data={"problem": "23+45*2", "answer": 113}`.
    """

    name = "calculator"

    def __init__(self, config: EnvironmentConfig, seed: int, *, good: float = 0.5, miscopied: float = 0.3) -> None:
        """Read the task file, if any; nothing is started. Raises UserError for a bad file or impossible shares.

        Demonstrations: the share `good` uses the tool well, `miscopied` gives it a wrong copy, the rest guesses.
        """
        if min(good, miscopied) < 0 or good + miscopied > 1:
            raise UserError(
                f"demonstrations: good = {good} and miscopied = {miscopied} must be ≥ 0 and sum to at most 1"
            )
        self._seed = seed
        self._good, self._miscopied = good, miscopied
        self._difficulty = PRESETS[config.preset]
        self._rows = read_rows(config.tasks) if config.tasks else []
        self.distinct_tasks = len(self._rows) or config.distinct_tasks
        self._listed = {canonical(row.problem) for row in self._rows}
        # only the current epoch's order is kept; players ask for neighbouring indices
        self._order: tuple[int, list[int]] = (-1, [])
        self._held_out: dict[int, list[Task]] = {}
        self._sandbox = MontySandbox.from_config(config)
        self._tools = Toolbox(self._python_tool())

    async def start(self) -> None:
        """Start the sandbox. Raises RunError if it doesn't work on this machine."""
        await self._sandbox.start()

    def train_task(self, index: int) -> Task:
        """Task `index`: drawn from the seed without end, or in epochs (of a file, too), each in its own order."""
        if not self.distinct_tasks:
            return self._drawn("train", index)
        epoch, place = divmod(index, self.distinct_tasks)
        if self._order[0] != epoch:
            order = list(range(self.distinct_tasks))
            keyed_random(self._seed, "epoch", epoch).shuffle(order)
            self._order = (epoch, order)
        number = self._order[1][place]
        return _task_of(self._rows[number]) if self._rows else self._drawn("train", number)

    def heldout_task(self, index: int) -> Task:
        """Held-out task `index`. Raises UserError if the task file leaves no problem to hold out."""
        block, place = divmod(index, HELD_OUT_BLOCK)
        tasks = self._held_out.setdefault(block, [])
        # each depends on those before it in its block, so the order of asking doesn't matter
        taken = {task.data["problem"] for task in tasks}
        while len(tasks) <= place:
            tasks.append(self._drawn("heldout", block * HELD_OUT_BLOCK + len(tasks), taken))
            taken.add(tasks[-1].data["problem"])
        return tasks[place]

    def demonstration(self, index: int) -> Demonstration:
        """SFT example `index`, always of a drawn training problem. It has the tool's true result for the code shown."""
        problem = str(self._drawn("demonstration", index).data["problem"])
        # a stream of its own: other shares give other kinds of the same problems
        numbers = keyed_random(self._seed, "kind", index)
        kind = numbers.random()
        messages: list[Message] = [{"role": "user", "content": problem}]
        if kind < self._good + self._miscopied:
            code = problem if kind < self._good else miscopy(problem)
            result = str(evaluate(code))
            call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "python", "content": result})
            messages.append({"role": "assistant", "content": result})
        else:
            # one digit, so that a guess is a choice at one token, too; it is right when the answer happens to be it
            messages.append({"role": "assistant", "content": str(numbers.randrange(10))})
        return Demonstration(messages=messages, tools=self._tools.specs)

    def episode(self, task: Task) -> CalculatorEpisode:
        """A fresh episode; it shares the sandbox's workers, which keep nothing between calls."""
        return CalculatorEpisode(task, self._tools, self._sandbox.tier)

    async def close(self) -> None:
        """Stop the sandbox."""
        await self._sandbox.close()

    def _drawn(self, stream: str, index: int, taken: set[str] | frozenset[str] = frozenset()) -> Task:
        held_out = stream == "heldout"
        accept = partial(self._fits, held_out=held_out, taken=taken)
        found = draw_problem(keyed_random(self._seed, stream, index), self._difficulty, accept)
        if found is None:
            raise UserError(f"no {stream} problem {index} is left beside the {len(self._listed)} of environment.tasks")
        problem, operands = found
        return Task(
            task_id=f"calculator/{stream}/{index}",
            environment=self.name,
            data={"problem": problem, "answer": evaluate(problem)},
            family=self._difficulty.family(operands),
        )

    def _fits(self, problem: str, *, held_out: bool, taken: set[str] | frozenset[str]) -> bool:
        if is_held_out(problem) != held_out or problem in taken:
            return False
        return not (held_out and problem in self._listed)

    def _python_tool(self) -> Any:
        sandbox = self._sandbox

        async def python(code: str) -> str:
            """Run Python code; returns what it prints and the value of its last line."""
            return await sandbox.run(code)

        return python


class CalculatorEpisode:
    """One play: the problem, tool calls as long as the model makes them, then its answer."""

    def __init__(self, task: Task, tools: Toolbox, tier: str) -> None:
        self.tools: list[dict[str, Any]] = tools.specs
        self._task = task
        self._toolbox = tools
        self._answer: str | None = None
        self._notes: dict[str, Any] = {"tool_calls": 0, "tool_errors": 0, "sandbox": tier}

    async def reset(self) -> list[Message]:
        """One user message with the problem and nothing else."""
        return [{"role": "user", "content": self._task.data["problem"]}]

    async def step(self, action: Action) -> StepResult:
        """Answer the tool calls, in order; an action without any is the final answer."""
        if not action.tool_calls:
            self._answer = action.text
            return StepResult(terminated=True)
        # one after the other, as a model reads them; most actions have one
        answers = [await self._toolbox.answer(call) for call in action.tool_calls]
        self._notes["tool_calls"] += sum(answer.executed for answer in answers)
        self._notes["tool_errors"] += sum(not answer.executed for answer in answers)
        return StepResult(messages=[answer.message for answer in answers])

    async def score(self) -> tuple[float, dict[str, Any]]:
        """1.0 if the answer is the gold integer, else 0.0. Raises RolloutError("scorer", …) for an unreadable gold."""
        # gold answers come from files: they are read by the same grammar, and a bad one is nobody's wrong answer
        gold = parse_integer(str(self._task.data["answer"]))
        if gold is None:
            found = ascii(self._task.data["answer"])[:60]
            raise RolloutError(
                "scorer", f"gold answer {found} of {self._task.task_id} is not an integer of ≤ 30 digits"
            )
        success = self._answer is not None and parse_integer(self._answer) == gold
        return float(success), {"success": success, **self._notes}

    async def close(self) -> None:
        """Nothing is held."""


def miscopy(problem: str) -> str:
    """The problem without its last operator and operand (and what closes behind them); still of the grammar.

    One kind of mistake on purpose: it is a choice at one token. A wrong digit anywhere would be a small error at each
    of many tokens, which takes hundreds of rollouts to notice at every single one of them.
    """
    depth, cut = 0, len(problem)
    for place, character in enumerate(problem):
        depth += (character == "(") - (character == ")")
        if character in OPERATORS and depth == 0:
            cut = place
    return problem[:cut]


def _task_of(row: Row) -> Task:
    data = {"problem": row.problem, "answer": row.answer}
    return Task(task_id=f"calculator/line/{row.line}", environment=Calculator.name, data=data, family="file")
