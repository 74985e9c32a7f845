# SPDX-License-Identifier: Apache-2.0
"""Bring the patch series onto a vLLM tree and take it off again, exactly.

`diff` reads and writes unified diffs, `series` knows the patches and the hashes of what they touch,
`tree` decides what has to change in a given tree, and `transaction` changes it all or not at all.
Standard library only: it runs before vLLM, or PyTorch, is there.
"""
