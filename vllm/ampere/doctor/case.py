# SPDX-License-Identifier: Apache-2.0
"""One question to the doctor: a machine, and what shall run on it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .. import upstream
from ..checkpoint import CheckpointReport, inspect
from ..errors import AmpereError, CheckpointError
from ..model_spec import ModelSpec
from ..patching import series, tree
from ..planner.pipeline import Stage
from ..planner.weights import WeightTable, host_bytes
from .findings import Unknown
from .nvml import Card
from .system import System

if TYPE_CHECKING:
    from ..planner.inventory import Inventory
    from ..planner.plan import Plan
    from ..planner.presets import Preset
    from .peer import Report

# Pinned tables are rounded up for each rank; this many ranks where no preset says.
_RANKS = 8


@dataclass
class Case:
    """What the checks are asked.

    Attributes:
        system: the machine.
        preset: what shall run on it, or None.
        model: checkpoint folder, or None.
        peer: the report of another node, or None.
    """

    system: System
    preset: "Preset | None" = None
    model: Path | None = None
    peer: "Report | None" = None

    @classmethod
    def of(cls, system: System, preset: str | None, model: Path | None, peer: "Report | None") -> "Case":
        """With the preset of that name; raises UsageError if there is none."""
        if preset is None:
            return cls(system, None, model, peer)
        return cls(system, load_preset(preset), model, peer)

    @cached_property
    def checkpoint(self) -> CheckpointReport | CheckpointError:
        """What the checkpoint is, or what is wrong with it; asked only where there is a model."""
        try:
            return inspect(self.model)
        except CheckpointError as error:
            return error

    @property
    def _readable(self) -> CheckpointReport | None:
        found = None if self.model is None else self.checkpoint
        return found if isinstance(found, CheckpointReport) else None

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's dimensions; the release's where no checkpoint says."""
        return self._readable.spec if self._readable else ModelSpec()

    @cached_property
    def table(self) -> WeightTable:
        """The model's tensors; the release's where no checkpoint says."""
        found = self._readable
        return WeightTable(self.spec, (each.spec for each in found.tensors.values()) if found else None)

    @cached_property
    def plan(self) -> "Plan | None":
        """The preset, planned for its own box."""
        if self.preset is None:
            return None
        from ..planner.plan import make_plan

        return make_plan(self.table, self.preset.inventory, self.preset.layout, self.preset.serving)

    @cached_property
    def survey(self) -> list[tree.FileState]:
        """What each file is that the series touches; asked only where there is a tree."""
        if not upstream.series_dir().is_dir():
            raise Unknown("this overlay came with an exported patch, which holds no series to compare with")
        patches = series.load(upstream.series_dir(), upstream.version())
        return tree.survey(self.system.tree, tree.series_changes(patches))

    @property
    def patch_state(self) -> str:
        """The tree in one word or two, as `patches status` says it."""
        return tree.summary(self.system.tree, self.survey)

    @property
    def nodes(self) -> int:
        """Nodes of the preset; 1 without one."""
        return self.preset.inventory.nodes if self.preset else 1

    @cached_property
    def engram_bytes(self) -> tuple[int, int]:
        """Host memory that the fullest node pins for engram tables, on huge pages and rounded without them."""
        if self.plan is not None and self.plan.host_bytes:
            return max(self.plan.host_bytes), max(self.plan.host_rounded_bytes)
        whole = Stage(0, self.spec.num_hidden_layers, True, True)
        return host_bytes(self.spec, whole, _RANKS, True), host_bytes(self.spec, whole, _RANKS, False)

    @property
    def engram_on_every_node(self) -> bool:
        """Whether each node of the preset pins what the fullest does; a node of later layers pins nothing."""
        return self.plan is None or len(set(self.plan.host_bytes)) <= 1

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards that the server sees: all, or those that CUDA_VISIBLE_DEVICES names.

        Raises Unknown where there are none.
        """
        cards = self.system.driver.cards
        named = self.system.variables.get("CUDA_VISIBLE_DEVICES")
        if named is not None:
            cards = tuple(card for word in named.split(",") for card in cards if names_card(word.strip(), card))
        if not cards:
            raise Unknown("there are no cards to look at")
        return cards

    @cached_property
    def inventory(self) -> "Inventory":
        """The visible cards of this node, for the planner."""
        from ..planner.inventory import Inventory, LinkKind

        linked = all(card.active_links for card in self.cards)
        least = min(card.memory_bytes for card in self.cards)
        link = LinkKind.NVLINK if linked else LinkKind.PCIE
        return Inventory(cards=len(self.cards), card_gib=least / 2**30, link=link)


def load_preset(name: str) -> "Preset":
    """The preset of that name.

    Raises:
        UsageError: there is none.
        AmpereError: pydantic is missing.
    """
    try:
        from ..planner import presets
    except ImportError as error:
        hint = "install vLLM, which brings it, or pydantic alone"
        raise AmpereError("a preset needs the package pydantic, which is not installed", hint) from error
    return presets.load(name)


def names_card(word: str, card: Card) -> bool:
    """A word of CUDA_VISIBLE_DEVICES names the card, by its index or by the start of its UUID."""
    return word == str(card.index) or len(word) > 4 and card.uuid.startswith(word)
