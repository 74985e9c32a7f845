# SPDX-License-Identifier: Apache-2.0
"""Console command `vllm-ampere`: works beside a vLLM that is absent, unpatched or broken.

Importing `vllm.ampere` would run `vllm/__init__.py` first. A bare stand-in for the parent package
takes its place in this process, with the same folder, so that only the overlay is imported.
"""

import sys
import types
from pathlib import Path


def main() -> int:
    """Run the command line; returns its exit code."""
    for entry in sys.path:
        folder = Path(entry or ".", "vllm")
        if (folder / "ampere" / "__init__.py").exists():
            parent = types.ModuleType("vllm")
            parent.__path__ = [str(folder)]
            sys.modules["vllm"] = parent
            break
    from vllm.ampere.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
