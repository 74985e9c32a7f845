# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: four residual streams, mixed before and after each sublayer."""
