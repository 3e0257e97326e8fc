"""How ranks come to plan a save alike: each for itself as long as nothing is new, else together (invariant 8).

When shared tensors appear or change, ranks tell what they have through the control channel, before anything is copied.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import msgspec

from unbroken.agreement import (
    CommonPlan,
    Details,
    Entered,
    Held,
    Values,
    details_of,
    entry_of,
    held_of,
    values_of,
)
from unbroken.cluster import Channel
from unbroken.commit import SaveId
from unbroken.errors import ReplicasDiffer, SaveFailed, UsageError
from unbroken.kept import Freezer
from unbroken.layout.spread import holding
from unbroken.planning import Plan, Structures, plan_snapshot
from unbroken.policy import Settings
from unbroken.state.captured import Captured
from unbroken.writer import not_entered_by_rank_0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Planner:
    """One rank's plans, from save to save. Used by the training thread."""

    channel: Channel
    settings: Settings
    common: CommonPlan = field(default_factory=CommonPlan)
    """What the ranks agreed on."""
    planned_once: bool = False
    freezer: Freezer = field(default_factory=Freezer)
    _structures: Structures = field(default_factory=Structures)
    _plan: Plan | None = None
    _agreed: str = ""
    """Structure of the shared tensors that the ranks agreed on."""

    def forget(self) -> None:
        """Plan anew, together with all ranks, at the next save."""
        self._plan = None
        self._agreed = ""

    def plan_for(self, save: SaveId, captured: Captured) -> Plan:
        """The plan of this structure: the one we have, or a new one made together with all ranks."""
        rank, world_size = self.channel.rank, self.channel.world_size
        structure = self._structures.of(captured)
        # Not where the loop stands still meanwhile: the writer reads what is frozen while it goes on.
        frozen = self.freezer.names(captured) if self.settings.snapshot == "overlap" else frozenset()
        if self._plan is not None and self._plan.structure == structure and self._plan.frozen == frozen:
            self.enter(save, Entered())
            return self._plan
        # What only this rank has may change without the others: they divide the shared tensors as before.
        shared = self._structures.of(captured, shared_only=True)
        if world_size == 1 or self._agreed == shared:
            self.enter(save, Entered())
        else:
            self.forget()
            self.common = self._common_plan(save, captured)
            self._agreed = shared
        apart, ceded = frozenset(self.common.apart), self._ceded(captured)
        self._plan = plan_snapshot(captured, rank, world_size, apart, ceded, structure, frozen)
        if rank == 0 and world_size > 1 and not self.planned_once:
            _warn_of_modules_without_ddp(captured, world_size)
        self.planned_once = True
        return self._plan

    def _ceded(self, captured: Captured) -> set[str]:
        """What ranks of another mesh write, who hold the same under the same name."""
        found = set()
        for name, mesh in self.common.ceded.items():
            live = captured.tensors.get(name)
            if live is not None and live.spread is not None and holding(live.spread).key != mesh:
                found.add(name)
        return found

    def compared(self, captured: Captured) -> set[str]:
        """Names of tensors whose digests ranks compare, where several hold them.

        At every save (invariant 8): replicas that were equal at the first one drift apart when a schedule follows a
        rank's own loss, say, and a checkpoint made of parts of several ranks would be none of them.
        """
        if self.channel.world_size == 1 or self.settings.check_replicas != "always":
            return set()
        return captured.tensors.keys() - self.common.apart - self.common.ceded.keys()

    def digest_contested(self, captured: Captured) -> dict[str, str]:
        """The same of tensors whose name several meshes use."""
        if self.settings.check_replicas != "always":
            return {}
        return dict(values_of(captured, self.channel.rank, self.common.parts).parts)

    def _common_plan(self, save: SaveId, captured: Captured) -> CommonPlan:
        """Compare shared tensors with all ranks: what is not common, and who writes what several hold (invariant 8)."""
        rank, check = self.channel.rank, self.settings.check_replicas != "never"
        self.enter(save, entry_of(captured, rank, check))
        plan = self._read_plan(save, "plan")
        if plan.ask and not plan.error:
            if rank in plan.ask:
                self._answer(save, "details", details_of(captured, rank, check))
            plan = self._read_plan(save, "plan-in-detail")
        if plan.contested and not plan.error:
            self._answer(save, "held", held_of(captured, rank, plan.contested))
            settled = self._read_plan(save, "plan-divided")
            if not settled.error:
                self._answer(save, "parts", values_of(captured, rank, settled.parts))
                settled = self._read_plan(save, "plan-settled")
            plan = msgspec.structs.replace(
                settled, contested=plan.contested, apart=plan.apart, differing=plan.differing
            )
        if plan.error:
            mistake = ReplicasDiffer if plan.contested else UsageError
            raise (mistake if plan.mistake else SaveFailed)(plan.error)
        if plan.differing and rank == 0:
            log.warning(
                "%d tensors that should be equal on all ranks are not: %s; each rank's own values are saved",
                len(plan.differing),
                "; ".join(plan.differing[:4]),
            )
        return plan

    def _read_plan(self, save: SaveId, what: str) -> CommonPlan:
        if self.channel.wait_all([f"{save.phase}/entered/0"], self.settings.deadline_s):
            raise SaveFailed(not_entered_by_rank_0(save, self.settings.deadline_s))
        # The coordinator waits deadline_s for the slowest rank before it can answer the others.
        data = self.channel.read(
            f"{save.phase}/{what}", 2 * self.settings.deadline_s, f"the other ranks to enter the save of {save}"
        )
        return msgspec.json.decode(data, type=CommonPlan)

    def _answer(self, save: SaveId, what: str, answer: Details | Held | Values) -> None:
        self.channel.post(f"{save.phase}/{what}/{self.channel.rank}", msgspec.json.encode(answer))

    def enter(self, save: SaveId, entered: Entered) -> None:
        """Tell the coordinator that this rank comes to a save."""
        self.channel.post(f"{save.phase}/entered/{self.channel.rank}", msgspec.json.encode(entered))


def _warn_of_modules_without_ddp(captured: Captured, world_size: int) -> None:
    modules = any(value.get("kind") == "module" for value in captured.values.values())
    if modules and all(live.spread is None for live in captured.tensors.values()):
        log.warning(
            "no registered module is a DistributedDataParallel: each of %d ranks saves what it has as its own, as "
            "stages of a pipeline should. If you wrap the model, register the wrapped one: DDP's bucket layout is part "
            "of an exact resume",
            world_size,
        )
