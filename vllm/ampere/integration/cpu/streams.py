# SPDX-License-Identifier: Apache-2.0
"""Inert stand-ins for the CUDA streams and events that upstream's model creates."""

import contextlib
import types

import torch


class Inert:
    """A stream or event that does nothing: on a CPU every operation has ended when it returns."""

    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    record = wait = synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, *args, **kwargs):
        return Inert()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def install() -> None:
    """Put the stand-ins into torch for this process. Only for a process whose torch has no CUDA device."""
    torch.cuda.Stream = torch.cuda.Event = Inert
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *args, **kwargs: Inert()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(multi_processor_count=1)
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    torch.accelerator.empty_cache = lambda *args, **kwargs: None
    torch.Tensor.record_stream = lambda self, stream: None
