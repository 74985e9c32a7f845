# SPDX-License-Identifier: Apache-2.0
"""The console script `vllm-ampere`: it works with a broken vLLM, with none, and beside a hollow one.

The command line lives in `vllm.ampere.cli`, and importing that the usual way runs `vllm/__init__.py`
first: seconds of work that may fail, exit or hang, which is when a doctor is needed. So `vllm` is an
empty stand-in here, and `vllm.ampere` is loaded by its path beside this file. The stand-in has no
search path: whatever the command line imports of vLLM itself fails at once, on every machine.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_OVERLAY = Path(__file__).resolve().parent / "vllm" / "ampere"


def load_overlay() -> None:
    """Put `vllm.ampere` into `sys.modules`, unless it is there."""
    if "vllm.ampere" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "vllm.ampere", _OVERLAY / "__init__.py", submodule_search_locations=[str(_OVERLAY)]
    )
    parent = sys.modules.get("vllm")
    if parent is None:
        parent = sys.modules["vllm"] = importlib.util.module_from_spec(ModuleSpec("vllm", None, is_package=True))
    package = importlib.util.module_from_spec(spec)
    sys.modules["vllm.ampere"] = parent.ampere = package
    spec.loader.exec_module(package)


def main() -> int:
    """Run the command line; returns its exit status."""
    if sys.version_info < (3, 11):
        print(f"error: vllm-ampere needs Python 3.11, this is {sys.version.split()[0]}", file=sys.stderr)
        print("hint: install it for the Python that vLLM runs on", file=sys.stderr)
        return 1
    try:
        load_overlay()
        from vllm.ampere.cli.main import main as run
    except Exception as error:
        print(f"error: the overlay {_OVERLAY} does not load: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: pip install --force-reinstall --no-deps vllm-ampere", file=sys.stderr)
        return 1
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
