# SPDX-License-Identifier: Apache-2.0
"""Script: run requests in process and save the bytes of every cache of every request after every engine step.

    python cache_snapshots.py '{"checkpoint": DIR, "options": {...}, "prompts": [[...], ...], "max_tokens": N, "output": FILE}'

The file is a list, one entry a step, of {request number: Snapshot as a dict}:
    tokens: generated so far; computed: tokens whose cache rows stand (rejected drafts excluded);
    rows: cache name -> uint8 [rows, row bytes], oldest first: the window's, all compressed ones, the last ring row;
    rejected: with drafts, window cache name -> uint8 [row bytes] of the row after those;
    draft: the same as rows of the caches that the draft owns; cached: prompt tokens that the prefix cache had.
With "twice": true in the job the requests run again when they have ended, and the file is a list of both lists. With
"draft_logits": true it is that list and another: of each draft, float32 [requests, block, vocabulary] from the head alone.

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
PRODUCTS = {ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.baddbmm, ATEN.linear, ATEN.matmul, ATEN.mv, ATEN.addmv}


class ExactProducts(TorchDispatchMode):
    """Matrix products in float64, rounded once to the dtype that they would have had."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function.overloadpacket not in PRODUCTS:
            return function(*args, **kwargs)
        out, wanted = kwargs.pop("out", None), args[0].dtype
        if function._overloadname.startswith("dtype"):  # the overloads that name the result's dtype, after the operands
            *args, wanted = args
        exact = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        result = function.overloadpacket(*exact, **kwargs)
        return result.to(wanted) if out is None else out.copy_(result)


def page_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Bytes of rows of a paged cache: uint8 [slots, row bytes].

    Args:
        cache: uint8 [pages, rows a page, 584 or 132] with values before scales in a page, or float32 rows.
        slots: int64, page * rows a page + row.
    """
    held, slots = cache.shape[1], slots.to(cache.device)
    page, row = slots // held, slots % held
    if cache.dtype == torch.float32:
        return cache[page, row].contiguous().view(torch.uint8)
    layout = {KV_RECORD.row_bytes: KV_RECORD, INDEX_KEY.row_bytes: INDEX_KEY}[cache.shape[2]]
    flat = cache.as_strided((cache.shape[0], held * layout.row_bytes), (cache.stride(0), 1), cache.storage_offset())
    data = layout.data_offset(row)[:, None] + torch.arange(layout.data_bytes, device=row.device)
    scale = layout.scale_offset(row, held)[:, None] + torch.arange(layout.scale_bytes, device=row.device)
    return flat[page[:, None], torch.cat([data, scale], 1)]


def caches_of(runner, draft: bool = False):
    """Name, specification, cache tensor and block table of every cache that the target model, or the draft, owns."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    for group, table in zip(runner.kv_cache_config.kv_cache_groups, runner.block_tables.block_tables):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {name: spec})[name]
            if getattr(spec, "is_draft", False) is draft:
                yield name, spec, layers[name].kv_cache, table.gpu


def request_rows(runner, index: int, computed: int, draft: bool = False) -> dict[str, torch.Tensor]:
    """Rows of every target or draft cache of the request at `index` of the runner's state, of its first `computed` tokens."""
    rows = {}
    for name, spec, cache, table in caches_of(runner, draft):
        numbers = torch.arange(computed // spec.tokens_per_state, device=table.device)
        pages = numbers // cache.shape[1]
        if cache.dtype == torch.float32:  # the ring has one page, and its last row is what the next token pairs with
            numbers, pages = numbers[-1:], 0 * pages[-1:]
        elif (window := getattr(spec, "sliding_window", None)) is not None:
            numbers, pages = numbers[-window:], pages[-window:]
        rows[name] = page_rows(cache, table[index][pages].long() * cache.shape[1] + numbers % cache.shape[1])
    return rows


def rejected_rows(runner, index: int, computed: int) -> dict[str, torch.Tensor]:
    """The row of token number `computed` in every window cache: a rejected draft's, if the last step rejected one."""
    windows = [(n, c, t) for n, spec, c, t in caches_of(runner) if getattr(spec, "sliding_window", None)]
    return {
        name: page_rows(cache, table[index][[computed // cache.shape[1]]].long() * cache.shape[1] + computed % cache.shape[1])[0]
        for name, cache, table in windows
    }


def steps_of(llm, prompts: list[list[int]], sampling, drafts: bool) -> list[dict]:
    """Run `prompts` at once on a `vllm.LLM` whose engine is in this process; the script's file as described above."""
    engine = llm.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    steps = []
    while engine.has_unfinished_requests():
        seen = {}
        for output in engine.step():
            # The engine appends a random part to the name of a request.
            (index,) = (i for key, i in runner.req_states.req_id_to_index.items() if key.split("-")[0] == output.request_id)
            computed = int(runner.req_states.num_computed_tokens.gpu[index])
            seen[int(output.request_id)] = {
                "tokens": list(output.outputs[0].token_ids), "computed": computed,
                "rows": {name: rows.cpu() for name, rows in request_rows(runner, index, computed).items()},
                "rejected": {name: row.cpu() for name, row in rejected_rows(runner, index, computed).items()} if drafts else {},
                "draft": {name: rows.cpu() for name, rows in request_rows(runner, index, computed, True).items()} if drafts else {},
                "cached": output.num_cached_tokens,
            }
        steps.append(seen)
    return steps


def record_draft_logits() -> list[torch.Tensor]:
    """A list that grows with every draft that our sampler makes."""
    from vllm.ampere.integration import spec_decode

    sample, logits = spec_decode.markov_sampler, []

    def recording(base_logits, *args, **kwargs):
        logits.append(base_logits.float())
        return sample(base_logits, *args, **kwargs)

    spec_decode.markov_sampler = recording
    return logits


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["checkpoint"], skip_tokenizer_init=True, **job["options"])
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    drafts, draft_logits = "speculative_config" in job["options"], record_draft_logits()
    with ExactProducts():
        runs = [steps_of(llm, job["prompts"], sampling, drafts) for _ in range(2 if job.get("twice") else 1)]
    result = runs if job.get("twice") else runs[0]
    torch.save([result, draft_logits] if job.get("draft_logits") else result, job["output"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
