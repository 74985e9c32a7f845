# SPDX-License-Identifier: Apache-2.0
"""Script: run requests in process and save the bytes of every cache of every request after every engine step.

    python cache_snapshots.py '{"checkpoint": DIR, "options": {...}, "prompts": [[...], ...], "max_tokens": N, "output": FILE}'

The file is a list, one entry a step, of {request number: Snapshot as a dict}:
    tokens: generated so far; computed: tokens whose cache rows stand (rejected drafts excluded);
    rows: cache name -> uint8 [rows, row bytes], oldest first: the window's, all compressed ones, the last ring row.

Matrix products run in float64 here. A product in bfloat16 or float32 rounds a row differently in a batch of one and
of six, so plain and speculative decoding could not be compared byte for byte; with 29 bits to spare they can.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ampere.cache_layout import INDEX_KEY, KV_RECORD

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default, ATEN.linear.default,
            ATEN.matmul.default, ATEN.mv.default, ATEN.addmv.default, ATEN.dot.default}


class ExactProducts(TorchDispatchMode):
    """Matrix products in float64, rounded once to the dtype of their first operand."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in PRODUCTS:
            return function(*args, **kwargs)
        exact = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        return function(*exact, **kwargs).to(args[0].dtype)


def page_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Bytes of rows of a paged cache: uint8 [slots, row bytes].

    Args:
        cache: uint8 [pages, rows a page, 584 or 132] with values before scales in a page, or float32 rows.
        slots: int64, page * rows a page + row.
    """
    held = cache.shape[1]
    page, row = slots // held, slots % held
    if cache.dtype == torch.float32:
        return cache[page, row].contiguous().view(torch.uint8)
    layout = {KV_RECORD.row_bytes: KV_RECORD, INDEX_KEY.row_bytes: INDEX_KEY}[cache.shape[2]]
    flat = cache.as_strided((cache.shape[0], held * layout.row_bytes), (cache.stride(0), 1), cache.storage_offset())
    data = layout.data_offset(row)[:, None] + torch.arange(layout.data_bytes)
    scale = layout.scale_offset(row, held)[:, None] + torch.arange(layout.scale_bytes)
    return flat[page[:, None], torch.cat([data, scale], 1)]


def request_rows(runner, index: int, computed: int) -> dict[str, torch.Tensor]:
    """Rows of every target cache of the request at `index` of the runner's state."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    rows = {}
    for group, table in zip(runner.kv_cache_config.kv_cache_groups, runner.block_tables.block_tables):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {name: spec})[name]
            if getattr(spec, "is_draft", False):
                continue
            cache = layers[name].kv_cache
            ratio = spec.tokens_per_state
            window = getattr(spec, "sliding_window", None)
            if cache.dtype == torch.float32:
                first, page_tokens, last = computed - 1, spec.block_size, computed
                numbers = torch.arange(first, last)
                pages = torch.zeros_like(numbers)
            else:
                first = max(0, computed - window) if window else 0
                numbers = torch.arange(first, computed // ratio)
                page_tokens = cache.shape[1]
                pages = numbers // page_tokens
            slots = table.gpu[index][pages].long() * page_tokens + numbers % page_tokens
            rows[name] = page_rows(cache, slots).clone()
    return rows


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["checkpoint"], skip_tokenizer_init=True, **job["options"])
    engine = llm.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(job["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    steps = []
    with ExactProducts():
        while engine.has_unfinished_requests():
            seen = {}
            for output in engine.step():
                internal = next((key for key in runner.req_states.req_id_to_index if key.split("-")[0] == output.request_id))
                index = runner.req_states.req_id_to_index[internal]
                computed = int(runner.req_states.num_computed_tokens.gpu[index])
                seen[int(output.request_id)] = {
                    "tokens": list(output.outputs[0].token_ids), "computed": computed,
                    "rows": request_rows(runner, index, computed),
                }
            steps.append(seen)
    torch.save(steps, job["output"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
