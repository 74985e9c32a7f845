# SPDX-License-Identifier: Apache-2.0
"""Engram: rows of a hashed n-gram table, gated into the residual streams."""
