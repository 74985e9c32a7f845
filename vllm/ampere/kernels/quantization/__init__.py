# SPDX-License-Identifier: Apache-2.0
"""Codecs of the stored formats: E4M3 values, UE8M0 power-of-two scales, MXFP4 weights."""
