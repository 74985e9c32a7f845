# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the sequential Markov head of the DSpark draft."""
