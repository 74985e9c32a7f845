# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on a CPU exchange tensors as cards do."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class AmpereCpuCommunicator(CpuCommunicator):
    """Upstream's, without its exchange through shared memory, which takes no more than 8 tensors a step.

    vLLM then sends over gloo by the code that sends over NCCL on cards, in slices of a tensor group.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.supports_tensor_dict = False
