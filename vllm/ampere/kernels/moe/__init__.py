# SPDX-License-Identifier: Apache-2.0
"""Routed experts: the choice of experts, and their MXFP4 feed-forward layers."""
