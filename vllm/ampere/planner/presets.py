# SPDX-License-Identifier: Apache-2.0
"""Layouts that come with the release: a box, a layout and how to serve on it, one TOML file each."""

import difflib
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ..errors import UsageError
from .inventory import Inventory
from .memory import Serving
from .plan import Layout

_FOLDER = Path(__file__).with_name("presets")


class Preset(BaseModel):
    """A preset.

    Attributes:
        summary: one line for people.
        inventory: the least box that it is for.
        layout, serving: what runs on it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str
    inventory: Inventory
    layout: Layout
    serving: Serving


def names() -> list[str]:
    """All presets, in order of their names."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def load(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no preset {name!r}", f"{meant}presets: {', '.join(names())}")
    return Preset.model_validate(tomllib.loads((_FOLDER / f"{name}.toml").read_text()))
