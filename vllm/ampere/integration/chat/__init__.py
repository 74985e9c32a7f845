# SPDX-License-Identifier: Apache-2.0
"""The chat formats of DeepSeek V4 and V4.1 without loss: what the patches of vLLM's chat serving call.

    answers: markup (the format's tags), arguments (one call's parameters as JSON text), decoder (an answer, piece
             by piece, into reasoning, content and calls), parser (the decoder as vLLM's parser)
    prompts: prompt (messages as the encoders take them), switches (reasoning on or off, and how much),
             literal (client text that spells control tokens)
    choices: the points that the format leaves open, and what this server does there

None of it asks which device runs: the faults it mends are on every one.
"""
