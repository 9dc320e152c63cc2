"""What a playbook means, said once more and in the plainest way: one step after another, in memory.

The playbooks here are small and numeric. Each step has one number or one loop over numbers as its work,
writes only names of its own into ``ctx``, and reads what steps before it wrote; so what it comes to does not
depend on the order in which branches run side by side. Arcs lead from a lesser to a greater name; one that
leads back begins the next round of a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Undefined(Exception):
    """An expression needs the output of a step that failed."""


@dataclass(frozen=True)
class Sum:
    """``constant`` plus the ctx values of ``names`` (0 when missing), plus the step's own output if wanted."""

    constant: int = 0
    names: tuple[str, ...] = ()
    output: bool = False

    def value(self, ctx: Mapping[str, Any], output: int | None = None) -> int:
        if self.output and output is None:
            raise Undefined
        known = sum(int(ctx.get(name, 0)) for name in self.names)
        return self.constant + known + (output or 0) * self.output


@dataclass(frozen=True)
class Test:
    """Whether a sum is greater than a limit, or leaves no rest when divided by it."""

    sum: Sum
    limit: int
    divides: bool = False

    def holds(self, ctx: Mapping[str, Any], output: int | None = None) -> bool:
        value = self.sum.value(ctx, output)
        return value % (abs(self.limit) + 1) == 0 if self.divides else value > self.limit


@dataclass(frozen=True)
class OnFailure:
    """Whether the step failed."""


@dataclass(frozen=True)
class Arc:
    target: str
    when: Test | OnFailure | None = None
    set: Sum | None = None


@dataclass(frozen=True)
class Loop:
    """Adds the step's sum to each item; ``failing`` items fail; what each comes to goes to ctx."""

    items: tuple[int, ...]
    parallel: bool = False
    failing: frozenset[int] = frozenset()
    allow_partial: bool = False


@dataclass(frozen=True)
class Step:
    """``failures``: how often the work fails before it succeeds; ``attempts``: tries the policy grants."""

    name: str
    sum: Sum = Sum()
    loop: Loop | None = None
    failures: int = 0
    attempts: int = 1
    admit: Test | None = None
    set: Sum | None = None
    arcs: tuple[Arc, ...] = ()
    inclusive: bool = False


@dataclass
class Reference:
    """The run of a playbook.

    Attributes:
        ends: steps in the order in which they ended; visits: how often each was entered.
        fired: arcs that fired, as (source, target).
    """

    steps: tuple[Step, ...]
    ctx: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)
    fired: list[tuple[str, str]] = field(default_factory=list)
    failed: bool = False

    def run(self) -> Reference:
        by_name = {step.name: step for step in self.steps}
        tokens = {self.steps[0].name}
        blocked: set[str] = set()
        for region in self.regions():
            waiting = {(0, name) for name in region if name in tokens and name not in blocked}
            while waiting:
                round_, name = min(waiting)
                waiting.remove((round_, name))
                targets = self.visit(by_name[name])
                if targets is None:
                    self.failed = True
                    blocked |= self.after(name)
                    break
                tokens.update(targets)
                inside = [target for target in targets if target in region]
                waiting.update((round_ + (target <= name), target) for target in inside)
        return self

    def visit(self, step: Step) -> list[str] | None:
        """The targets of the arcs that fire; None for a failure that no arc takes."""
        self.visits[step.name] = self.visits.get(step.name, 0) + 1
        if step.admit is not None and not step.admit.holds(self.ctx):
            return []
        output, failed = self.work(step)
        if step.set is not None and not failed:
            self.ctx[step.name] = step.set.value(self.ctx, output)
        targets = []
        for place, arc in enumerate(step.arcs):
            if not self.fires(arc, output, failed):
                continue
            targets.append(arc.target)
            self.fired.append((step.name, arc.target))
            if arc.set is not None:
                self.ctx[f"{step.name}_{place}"] = arc.set.value(self.ctx)
            if not step.inclusive:
                break
        return None if failed and not targets else targets

    def fires(self, arc: Arc, output: int | None, failed: bool) -> bool:
        if arc.when is None:
            return not failed
        if isinstance(arc.when, OnFailure):
            return failed
        try:
            return arc.when.holds(self.ctx, output)
        except Undefined:
            return False

    def work(self, step: Step) -> tuple[int | None, bool]:
        """The number that the output stands for, of a loop how many items were done; whether it failed."""
        if step.loop is not None:
            return self.iterate(step, step.loop)
        if step.failures >= step.attempts:
            return None, True
        self.outputs[step.name] = value = step.sum.value(self.ctx)
        return value, False

    def iterate(self, step: Step, loop: Loop) -> tuple[int, bool]:
        added = step.sum.value(self.ctx)
        done = [item + added for item in loop.items if item not in loop.failing]
        last, all_ = f"{step.name}_last", f"{step.name}_all"
        if done:
            self.ctx[last] = done[-1]
            if loop.parallel and all_ not in self.ctx:  # no list was read: the last item's write stands
                self.ctx[all_] = done[-1:]
            else:
                self.ctx[all_] = [*self.ctx.get(all_, []), *done]
        complete = len(done) == len(loop.items)
        if complete:
            self.outputs[step.name] = done
        return len(done), not complete and not loop.allow_partial

    def after(self, name: str) -> set[str]:
        """Every step that arcs lead to from ``name``, however far, and itself."""
        seen: set[str] = {name}
        waiting = [name]
        by_name = {step.name: step for step in self.steps}
        while waiting:
            for arc in by_name[waiting.pop()].arcs:
                if arc.target not in seen:
                    seen.add(arc.target)
                    waiting.append(arc.target)
        return seen

    def regions(self) -> Iterable[list[str]]:
        """Steps that lead to each other stand together; a region comes after all that lead to it."""
        after = {step.name: self.after(step.name) for step in self.steps}
        groups: list[list[str]] = []
        for step in self.steps:
            home = next((g for g in groups if g[0] in after[step.name] and step.name in after[g[0]]), None)
            if home is None:
                groups.append([step.name])
            else:
                home.append(step.name)
        return sorted(groups, key=lambda group: -len(after[group[0]]))
