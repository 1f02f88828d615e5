"""Which requests of which model are traced now: by the environment, as changed by the mesh's settings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shared.traces.context import Sampler
from shared.traces.settings import UNLIMITED, Overrides, TraceSettings, of_sampler, overridden

MESH = ""
"""The scope of settings that belong to no model."""
NEVER = Sampler(0, parent_based=False)


@dataclass(frozen=True, slots=True)
class _Rule:
    sampler: Sampler
    counted_by: str | None


class TraceControl:
    """The trace settings of all models, as this process knows them.

    sampler    the sampler that the environment asks for
    exporting  whether this process sends spans anywhere
    """

    def __init__(self, sampler: Sampler, *, exporting: bool) -> None:
        self.exporting = exporting
        self._sampler = sampler
        self._default = of_sampler(sampler, exporting=exporting)
        self._overrides: Mapping[str, Overrides] = {}
        self._rules: dict[str, _Rule] = {}
        self._used: Counter[str] = Counter()

    def apply(self, overrides: Mapping[str, Overrides]) -> None:
        """Applies the mesh's settings: by model, "" for the whole mesh."""
        self._overrides = overrides
        self._rules.clear()

    def settings(self, model: str = MESH) -> TraceSettings:
        settings = overridden(self._default, self._overrides.get(MESH, {}))
        return overridden(settings, self._overrides.get(model, {})) if model else settings

    def sampler(self, model: str) -> Sampler:
        """The sampler that decides about a trace of this model."""
        return self._rule(model).sampler

    def take(self, model: str) -> bool:
        """Takes one request off the `trace_count` of a model; False if nothing is left of it."""
        scope = self._rule(model).counted_by
        if scope is None:
            return True
        left = self.settings(model).trace_count - self._used[scope]
        if left <= 0:
            return False
        self._used[scope] += 1
        return True

    def used(self) -> dict[str, int]:
        """Requests that were taken and are not in the mesh's own count yet, by scope."""
        return {scope: used for scope, used in self._used.items() if used}

    def counted(self, used: Mapping[str, int]) -> None:
        """The settings applied from now on contain what was used."""
        self._used.subtract(used)

    def _rule(self, model: str) -> _Rule:
        if model not in self._rules:
            self._rules[model] = self._made(model)
        return self._rules[model]

    def _made(self, model: str) -> _Rule:
        settings, own = self.settings(model), self._overrides.get(model, {})
        changed = {**self._overrides.get(MESH, {}), **own}
        counted_by = None
        if settings.trace_count != UNLIMITED:
            counted_by = model if "trace_count" in own else MESH
        # The settings only changed the count, or nothing: the environment's sampler stays.
        if "trace_level" not in changed and "trace_rate" not in changed:
            return _Rule(self._sampler if settings.trace_count else NEVER, counted_by)
        if not settings.on:
            return _Rule(NEVER, counted_by)
        if "trace_rate" in changed or self._sampler.bound == 0:
            return _Rule(Sampler(settings.bound, parent_based=False), counted_by)
        return _Rule(self._sampler, counted_by)
