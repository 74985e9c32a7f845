# SPDX-License-Identifier: Apache-2.0
"""Rotary tables as long as the server's contexts instead of the model's.

Upstream computes cosines and sines of 1,048,576 positions in float32, 256 MiB, for layers that compress and again for those
that do not, whatever `--max-model-len` is, and shares each over all layers and engines of a process. Here the whole table is
kept in host memory, and engines have what they can reach of it on the card.
"""

import copy
import weakref

from torch import nn

# Embedding that is shared -> rows -> the same with so many rows, as long as a layer has it.
_SHORTENED: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary] = weakref.WeakKeyDictionary()


def shortened(rotary: nn.Module, rows: int) -> nn.Module:
    """A rotary embedding with the first `rows` of the `cos_sin_cache` of one that is shared, all of them if it has fewer.

    Args:
        rotary: with a float32 buffer [positions, 64]; it goes to the host at the first call.
        rows: at least 1.
    """
    whole = rotary.cos_sin_cache
    rows = min(rows, len(whole))
    lengths = _SHORTENED.setdefault(rotary, weakref.WeakValueDictionary())
    own = lengths.get(rows)
    if own is None:
        own = lengths[rows] = copy.copy(rotary)
        # A shallow copy of a module shares its buffers' dictionary.
        own._buffers = dict(rotary._buffers)
        rotary.home = getattr(rotary, "home", whole.device)
        own.cos_sin_cache = whole[:rows].to(rotary.home, copy=True)
        rotary.cos_sin_cache = whole.cpu()
    return own
