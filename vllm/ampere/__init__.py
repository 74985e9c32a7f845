# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash on NVIDIA Ampere: the overlay of vllm-ampere over vLLM 0.33.0.

Only `vllm.ampere.integration` imports vLLM; everything else works without it.
"""

__version__ = "0.1.0"
