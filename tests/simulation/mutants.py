"""Faults that are put into the mesh on purpose: a simulation that does not find them proves nothing.

A mutant changes the text of scripts, or a piece of a service. That a script's text is still there is checked when the
mutant is used, so that none of them goes blind when the script changes.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from shared import scripts


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one script's text, its preludes included. before: a regular expression."""

    script: str
    before: str
    after: str = ""

    def applied(self, text: str) -> str:
        """The text with the change. A fault that cannot be put in any more must not look like one that is found."""
        changed, times = re.subn(self.before, self.after, text)
        assert times == 1, f"{self.script}.lua has changed: {self.before!r} stands there {times} times"
        return changed


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. story: what goes wrong with it; code: what stands in the place of what.

    scripts_only  only random calls of the scripts are to find it: whole meshes hardly ever come into that situation
    """

    name: str
    story: str
    edits: tuple[Edit, ...] = ()
    code: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scripts_only: bool = False

    @contextmanager
    def applied(self) -> Generator[None]:
        """While it lasts, the mesh has this fault."""
        source, texts = scripts.script_source, dict[str, str]()
        for edit in self.edits:
            texts[edit.script] = edit.applied(texts.get(edit.script) or source(edit.script))

        def edited(name: str) -> str:
            return texts.get(name) or source(name)

        with ExitStack() as stack:
            stack.enter_context(patch("shared.scripts.script_source", edited))
            for target, replacement in self.code.items():
                stack.enter_context(patch(target, replacement))
            yield


FENCED_SCRIPTS = ("assign", "expire", "reclaim", "reject", "remove", "vacate")

MUTANTS = (
    Mutant(
        "epoch",
        "an owner that lost its sequence still commits",
        (Edit("commit", r"if number\(got\[2\]\) ~= step.epoch or got\[12\] ~= EXECUTOR then", "if false then"),),
    ),
    Mutant(
        "committed",
        "a commit that is sent again is made again",
        (Edit("commit", r"if before then return 0 end"),),
    ),
    Mutant(
        "fence",
        "a leader that lost its model goes on deciding",
        tuple(Edit(name, r"if seen > term then", "if false then") for name in FENCED_SCRIPTS),
        scripts_only=True,
    ),
    Mutant(
        "marker",
        "a sequence ends at the first look, although its idle time is not over",
        (Edit("expire", r"if left > 0 then", "if false then"),),
    ),
    Mutant(
        "known request",
        "a request that is sent again runs again",
        (Edit("submit", r"if named then return repeated\(.*\) end"),),
    ),
    Mutant(
        "unnamed request",
        "a gateway sends again what the mesh cannot recognise",
        code={"gateway.waiting.Waiting.repeatable": property(lambda _: True)},
    ),
    Mutant(
        "lost reply",
        "who asks again for a step in flight is not answered",
        (Edit("commit", r"if step.joined then", "if false then"),),
    ),
    Mutant(
        "lost step",
        "steps in a dead executor's inbox are lost",
        (Edit("drain", r"elseif got\[1\] == 'w' or got\[1\] == 'm' [^\n]*then", "elseif false then"),),
    ),
    Mutant(
        "stale state",
        "a new owner goes on from an older state than the last one",
        (Edit("commit", r"if #step.checkpoint > 0 then", "if #step.checkpoint > 0 and step.n % 2 == 1 then"),),
    ),
    Mutant(
        "kept slot",
        "sequences give up their slots though their model's configuration forbids it",
        code={"shared.model_config.values.ModelConfig.pageable": property(lambda config: config.state_in_mesh)},
    ),
    Mutant(
        "kept slot at takeover",
        "an idle sequence whose owner is lost gets no other slot though it was to keep one",
        (Edit("reclaim", r"if accepted == committed and got\[9\] then", "if accepted == committed then"),),
    ),
    Mutant(
        "slot",
        "nobody hears of a sequence that has ended, and its slot stays taken",
        tuple(Edit(name, r"redis.call\('XADD', keys.feed, [^\n]*'k', kind\)") for name in ("commit", "expire")),
    ),
    Mutant(
        "owned",
        "a sequence that has ended stays among those that its owner owns",
        tuple(Edit(name, r"redis.call\('SREM', keys.owned, sid\)") for name in ("commit", "expire")),
    ),
)
