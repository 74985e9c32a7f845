# SPDX-License-Identifier: Apache-2.0
"""Whether the model reasons, and how much: one reading of every name that the documentation gives the switch.

    thinking, enable_thinking   in chat_template_kwargs, or {"thinking": {"type": "enabled" or "disabled"}} as
                                DeepSeek's own API writes it
    reasoning_effort            "none" is off, any other word is on

A request's own switch wins over what its effort word implies, and both win over the server's defaults.
"""

from collections.abc import Mapping

from .choices import chosen

SWITCHES = ("thinking", "enable_thinking")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_V41_BUDGETS = {
    "low50": {"low": 50, "high": 75, "xhigh": 75, "max": 100},
    "low25": {"low": 25, "high": 50, "xhigh": 75, "max": 100},
}


def switched(kwargs: Mapping) -> bool | None:
    """What the switches in `kwargs` say; None if there is none.

    Raises:
        ValueError: a switch is neither true nor false, or two of them disagree.
    """
    said = {name: _as_bool(name, kwargs[name]) for name in SWITCHES if kwargs.get(name) is not None}
    if len(set(said.values())) > 1:
        raise ValueError(f"{' and '.join(said)} disagree on whether the model reasons; send one of them")
    return next(iter(said.values()), None)


def _as_bool(name: str, value) -> bool:
    if isinstance(_plain(value), bool):
        return _plain(value)
    raise ValueError(f'{name} must be true, false or {{"type": "enabled"}} or {{"type": "disabled"}}; got {value!r}')


def _plain(value):
    """DeepSeek's way to write a switch as true or false; any other value as it is."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    return kind == "enabled" if kind in ("enabled", "disabled") else value


def is_thinking(kwargs: Mapping) -> bool:
    """Whether the prompt of these template arguments opens the reasoning.

    Raises:
        ValueError: as `switched`.
    """
    said = switched(kwargs)
    return said is not False and kwargs.get("reasoning_effort") != "none"


def implied(own: Mapping | None, extra: Mapping | None, effort: str | None) -> dict:
    """The switches that a request's fields stand for, as template arguments of any model; nothing is refused here.

    Args:
        own: its chat_template_kwargs.
        extra: its fields that the API does not have, among them DeepSeek's own `thinking`.
        effort: its effort word, which says on or off where nothing else does.
    """
    said = {name: _plain(value) for name in SWITCHES if (value := (own or {}).get(name)) is not None}
    thinking = (extra or {}).get("thinking")
    if thinking is not None:
        # Under the name that is free: if the two disagree, the prompt is refused.
        said["enable_thinking" if "thinking" in said else "thinking"] = _plain(thinking)
    if not said and effort is not None:
        said["enable_thinking"] = effort != "none"
    return said


def over_defaults(own: Mapping | None, defaults: Mapping | None) -> dict:
    """The server's default template arguments without those that a request's own ones overrule by another name."""
    own, defaults = own or {}, defaults or {}
    said = [own[name] for name in SWITCHES if own.get(name) is not None]
    overruled = set(SWITCHES) if said else set()
    if True in said and own.get("reasoning_effort") is None and defaults.get("reasoning_effort") == "none":
        overruled.add("reasoning_effort")
    return {name: value for name, value in defaults.items() if name not in overruled}


def v4_effort(kwargs: Mapping) -> str | None:
    """V4's effort word for the prompt; None where the model does not reason.

    Raises:
        ValueError: no such word.
    """
    if not is_thinking(kwargs):
        return None
    effort = _word(kwargs.get("reasoning_effort"), "V4")
    words = {"minimal": "low", "medium": chosen("v4_medium"), "xhigh": "high"}
    return words.get(effort, effort)


def v41_effort(kwargs: Mapping) -> int:
    """V4.1's budget for the prompt, 1 to 100.

    Raises:
        ValueError: no such word, and no integer from 1 to 100.
    """
    effort = kwargs.get("reasoning_effort")
    if type(effort) is int and 1 <= effort <= 100:
        return effort
    words = {"minimal": "low", "medium": "high", "none": "high"}
    effort = _word(effort, "V4.1")
    return _V41_BUDGETS[chosen("v41_effort")][words.get(effort, effort)]


def _word(effort, version: str) -> str:
    if effort is None:
        return "high"
    if effort not in EFFORTS:
        number = ", or an integer from 1 to 100 in chat_template_kwargs" if version == "V4.1" else ""
        raise ValueError(f"DeepSeek {version} takes reasoning_effort {', '.join(EFFORTS)}{number}; got {effort!r}")
    return effort
