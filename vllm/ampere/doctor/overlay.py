# SPDX-License-Identifier: Apache-2.0
"""Area 4: the patched tree and the overlay in it."""

from pathlib import Path

from .. import upstream
from ..patching import tree
from .case import Case
from .findings import Outcome, Unknown, fail, ok, warn

_PLUGIN = "ampere"


def _hollow(case: Case) -> Outcome:
    if case.system.tree:
        return ok(f"{case.system.tree}/vllm is a package")
    hollow = list(case.system.trees())
    if not hollow:
        raise Unknown("there is no folder vllm where this Python looks")
    holds = ", ".join(sorted(entry.name for entry in (hollow[0] / "vllm").iterdir())[:3]) or "nothing"
    return fail(f"{hollow[0] / 'vllm'} has no __init__.py and holds {holds}")


def _half_applied(case: Case) -> Outcome:
    root, state = _tree(case), case.patch_state
    if state == "not recognised":
        raise Unknown(f"{root} is {state}")
    if state in ("applied", "not applied"):
        return ok(f"the patches are {state}, all of them")
    patched = sum(file.state == tree.PATCHED for file in case.survey)
    return fail(f"{state}: {patched} of {len(case.survey)} files in {root} are patched")


def _foreign(case: Case) -> Outcome:
    root = _tree(case)
    error = tree.refusal(root, case.survey, upstream.version())
    well = ok(f"every file in {root} is upstream's or patched by this series")
    return fail(str(error), error.hint) if error else well


def _applied(case: Case) -> Outcome:
    root, state = _tree(case), case.patch_state
    if state not in ("applied", "not applied"):
        raise Unknown(f"{root} is {state}")
    return ok(f"applied on {root}") if state == "applied" else fail(f"no patch is on {root}")


def _shadowed(case: Case) -> Outcome:
    system = case.system
    whole = [folder for folder in system.trees() if (folder / "vllm" / "__init__.py").is_file()]
    if len(whole) > 1:
        return warn(f"{whole[0]}/vllm hides {whole[1]}/vllm")
    here = system.working_folder
    if whole and (here / "vllm" / "__init__.py").is_file() and here.resolve() != whole[0].resolve():
        return warn(f"{here}/vllm hides {whole[0]}/vllm from `python -m` and `python -c` in this folder")
    return ok("one vLLM is on the path" if whole else "no vLLM is on the path")


def _same_overlay(case: Case) -> Outcome:
    root = _tree(case)
    there = root / "vllm" / "ampere"
    if not there.is_dir():
        return fail(f"{root}/vllm has no overlay, this command runs the one in {tree.OVERLAY}")
    if there.resolve() == tree.OVERLAY:
        return ok(f"the overlay is {tree.OVERLAY}")
    other = [file for file in tree.survey(root, tree.overlay_changes()) if file.state != tree.PATCHED]
    if other:
        return fail(f"{there} is another overlay than {tree.OVERLAY}: {other[0].change.path} differs")
    return ok(f"{there} equals this command's overlay")


def _plugin(case: Case) -> Outcome:
    named = case.system.variables.get("VLLM_PLUGINS")
    # vLLM keeps the blanks around a name.
    if named is not None and _PLUGIN not in named.split(","):
        return fail(f"VLLM_PLUGINS={named} leaves the plugin {_PLUGIN} out", f"add {_PLUGIN} to it, or unset it")
    for package in case.system.packages.values():
        if package.entry_points.select(group="vllm.general_plugins", name=_PLUGIN):
            return ok(f"vLLM finds the plugin {_PLUGIN}")
    return warn(f"no installed package has the plugin {_PLUGIN}, so nothing is checked before a model is loaded")


def _tree(case: Case) -> Path:
    if case.system.tree is None:
        raise Unknown("no vLLM is installed where this Python looks")
    return case.system.tree


CHECKS = {
    "AMP401": _hollow,
    "AMP402": _half_applied,
    "AMP403": _foreign,
    "AMP404": _applied,
    "AMP405": _shadowed,
    "AMP406": _same_overlay,
    "AMP407": _plugin,
}
