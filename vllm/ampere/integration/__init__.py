# SPDX-License-Identifier: Apache-2.0
"""The glue to vLLM 0.33.0: the only package here that imports it.

`gate` decides which processors take our path, `attention`, `indexer`, `compressor` and `engram` put the
ops into upstream's layers, `register` is what vLLM's plugin loader calls, and `cpu` holds what a machine
without a GPU needs on top.
"""
