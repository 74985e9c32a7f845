# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention: window and selected compressed records, one softmax, per-head sink."""
