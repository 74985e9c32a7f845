# SPDX-License-Identifier: Apache-2.0
"""The relay: pipeline stages that start inside a group of layers with one KV source.

The rule of what crosses is `vllm/ampere/pipeline_cut.py`. Here are the cuts of an engine and what cannot run beside
them (`cuts`), the later stage's copy of the source (`shadow`), the model of a stage, which receives and sends
(`stage`), its bounded replay (`replay`), and what runner and worker do with the tensors between stages (`exchange`).
"""
