# SPDX-License-Identifier: Apache-2.0
"""Mixed into the workers of `bench_pipeline.py`: weights of a sensible size, and the bytes that a stage sends.

vLLM imports it in every worker, before the weights are made.
"""

from vllm.model_executor.model_loader import dummy_loader

from benchmarks.bench_rank_slice import fill

dummy_loader.initialize_single_dummy_weight = fill


class LinkCounter:
    """Methods of a worker, called through `collective_rpc`."""

    def take_sent(self) -> list[dict]:
        """Of each step that sent something since the last call: tensor name -> (rows, bytes). The first call starts it."""
        if not hasattr(self, "sent"):
            self.sent, execute = [], self.model_runner.execute_model

            def counting(*args, **kwargs):
                output = execute(*args, **kwargs)
                if hasattr(output, "tensors"):
                    self.sent.append({name: (len(tensor), tensor.nbytes) for name, tensor in output.tensors.items()})
                return output

            self.model_runner.execute_model = counting
        taken, self.sent = self.sent, []
        return taken
