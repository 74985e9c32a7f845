# SPDX-License-Identifier: Apache-2.0
"""What a machine without a GPU needs on top of the integration classes.

vLLM's DeepSeek-V4.1 is written for CUDA. Here are a platform, inert stand-ins for streams, the compiled
operators that the CPU build lacks, and the bindings of linears, router, experts and hyper-connections to
the reference ops. Nothing in this folder is imported on a machine with a GPU.
"""
