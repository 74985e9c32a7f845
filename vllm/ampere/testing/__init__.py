# SPDX-License-Identifier: Apache-2.0
"""What tests, demos and benchmarks share: inputs, comparison, a tiny checkpoint, a reference decoder."""
