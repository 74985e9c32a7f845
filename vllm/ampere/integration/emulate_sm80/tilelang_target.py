# SPDX-License-Identifier: Apache-2.0
"""TileLang kernels of an older architecture on the card at hand, for `emulate_sm80`."""

import importlib.metadata
import json
import os

from ... import upstream
from ...errors import AmpereError


def target(capability: tuple[int, int], card: tuple[int, int]) -> dict:
    """The TileLang target that lowers for one compute capability and assembles for another.

    TileLang's passes and the headers that it includes read `arch`, so that nothing newer is generated; nvcc gets
    "arch=compute_<arch>,code=<code>", since a binary built for an older major version does not load.

    Args:
        capability: lowered for, (8, 0) or (8, 6).
        card: the capability that the machine code must load on.

    Returns:
        a target configuration, as `tilelang.jit(target=...)` takes it.
    """
    lowered, assembled = (f"sm_{major}{minor}" for major, minor in (capability, card))
    return {"kind": "cuda", "arch": lowered, "code": [assembled]}


def install(capability: tuple[int, int]) -> None:
    """Make `target` of this machine's first card the default of every TileLang kernel compiled from now on.

    It is TileLang's own setting, an environment variable read at each compile, so processes that this one starts
    have it too. TileLang's caches tell targets apart.

    Raises:
        AmpereError: TileLang is absent or another release than the pinned one, whose setting is not known to act.
    """
    pinned = upstream.pins()["production"]["tilelang"]
    try:
        found = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != pinned:
        raise AmpereError(f"TileLang is {found}, this needs {pinned}", f"pip install tilelang=={pinned}")
    from vllm.platforms.cuda import CudaPlatform  # loads the driver's library, which `target` does not need

    card = CudaPlatform.get_device_capability()
    os.environ["TILELANG_DEFAULT_TARGET"] = json.dumps(target(capability, (card.major, card.minor)))
