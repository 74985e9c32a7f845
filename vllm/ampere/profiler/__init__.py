# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, stage by stage, from the traces that torch's profiler leaves.

Nothing here runs inside the engine: a kernel's stage is read off its name (`stages`), afterwards.
"""

from .trace import Summary, find_traces, read

__all__ = ["Summary", "find_traces", "read"]
