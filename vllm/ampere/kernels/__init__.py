# SPDX-License-Identifier: Apache-2.0
"""The ops of DeepSeek-V4.1: one folder per family, one file per op, one reference per family.

`registry.all_ops()` finds every declaration; nothing lists them a second time.
"""
