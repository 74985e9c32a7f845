# SPDX-License-Identifier: Apache-2.0
"""What would stop a server on this machine, or did: checks by area, each with a code, what was seen and the fix.

`catalogue` holds the codes, `system` reads the machine, one module an area checks it (`host`, `gpu`, `software`,
`overlay`, `checkpoint`, `topology`), `logs` reads a server's log, `peer` compares two nodes. Neither vLLM nor torch
is imported, and nothing here needs a GPU; pydantic is needed for presets and for the report of another node.
"""

from .findings import Finding, Status
from .run import run_checks
from .system import System

__all__ = ["Finding", "Status", "System", "run_checks"]
