# SPDX-License-Identifier: Apache-2.0
"""The command line `vllm-ampere`: one module per command, and one console that decides all output.

A command module has `register(commands)`, which adds its parser, and sets `run(arguments, console)` on
it; `run` returns the exit status: 0 fine, 1 findings or refusal. Usage errors end in 2.
"""
