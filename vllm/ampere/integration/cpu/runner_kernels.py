# SPDX-License-Identifier: Apache-2.0
"""PyTorch in place of the Triton kernels that vLLM's runner launches at every step.

The interpreter's results are right, but it runs the programs of a launch one after another, which took more than
half of the time of a tiny model's step. Each function here takes the grid and the arguments of the kernel that it
stands for, writes what that writes, and refuses context parallelism.
"""

import ctypes

import torch


class Launcher:
    """A function in the place of a jitted kernel: `kernel[grid](...)` calls it with the grid first.

    Attributes:
        upstream: the kernel whose place it takes.
    """

    def __init__(self, function, upstream):
        self._function, self.upstream = function, upstream
        self.arg_names = getattr(upstream, "arg_names", ())  # there are none, and no launches, without Triton

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._function(grid, *args, **kwargs)


def _table(addresses: torch.Tensor, group: int, rows: int, width: int) -> torch.Tensor:
    """int32 [rows, width] at one of the addresses."""
    values = (ctypes.c_int32 * (rows * width)).from_address(int(addresses[group]))
    return torch.frombuffer(values, dtype=torch.int32).view(rows, width)


def _one_rank(ranks: int) -> None:
    if ranks != 1:
        raise NotImplementedError("context parallelism needs a GPU")


def apply_writes(grid, output, strides, rows, starts, contents, ends, groups, *, MULTI_GROUP, **unused):
    """Copy pieces of `contents`, each into one row of one table."""
    pieces = contents.tensor_split(ends[: grid[0]].tolist())
    for number, (piece, row, start) in enumerate(zip(pieces, rows[: grid[0]].tolist(), starts.tolist())):
        flat, stride = output, strides
        if MULTI_GROUP:
            group = int(groups[number])
            stride = int(strides[group])
            flat = _table(output, group, row + 1, stride)
        flat.view(-1)[row * stride + start :][: len(piece)] = piece


def gather_block_tables(
    grid, requests, sources, targets, strides, held, held_stride, rows, computed, reach, page_rows, *,
    MASK_SLIDING_WINDOW, **unused,
):  # fmt: skip
    """Block-table rows of the batch, null where no window reaches; rows behind the batch are zeroed."""
    index = requests[:rows].long()
    for group, width in enumerate(strides.tolist()):
        target = _table(targets, group, grid[1], width)
        target[rows:] = 0
        if not rows:
            continue
        blocks = _table(sources, group, int(index.max()) + 1, width)[index]
        column = torch.arange(width)
        if MASK_SLIDING_WINDOW and reach[group] > 0:
            first = (computed[index] - reach[group]).clamp_min(0) // page_rows[group]
            blocks[column < first.unsqueeze(-1)] = 0
        counts = column < held[group, index].unsqueeze(-1)
        target[:rows][counts] = blocks[counts]


def slot_mappings(
    grid, capacity, requests, query_start, positions, tables, strides, page_rows, enabled, sharded, out, out_stride,
    rank, *, CP_SIZE, PAD_ID, **unused,
):  # fmt: skip
    """Slot of each token in each cache group; the pad where a group or a request has none, and behind the batch."""
    _one_rank(CP_SIZE)
    bounds = query_start[: grid[1]]
    tokens = int(bounds[-1])
    out[:, tokens:capacity] = PAD_ID
    request = requests[: grid[1] - 1].long().repeat_interleave(bounds.diff())
    position, owned = positions[:tokens], request >= 0
    for group, width in enumerate(strides.tolist()):
        if not enabled[group] or not owned.any():
            out[group, :tokens] = PAD_ID
            continue
        table, size = _table(tables, group, int(request.max()) + 1, width), page_rows[group]
        page = table[request, torch.where(owned, position // size, 0)].long()
        out[group, :tokens] = torch.where(owned, page * size + position % size, PAD_ID)


def token_requests(grid, query_start, out, requests, mapped, tokens, **unused):
    """Request of each token; 0 from token `mapped` on."""
    token = torch.arange(tokens, dtype=query_start.dtype)
    request = torch.bucketize(token, query_start[1 : requests + 1], right=True).clamp_max(requests - 1)
    out[:tokens] = torch.where(token < mapped, request, 0)


def gather_lens(
    grid, prefill_gather_lens_ptr, seq_lens_ptr, query_start_loc_ptr, replay_start_ptr, num_prefills, num_decodes,
    window_size, **unused,
):  # fmt: skip
    """Rows that each prefill reads: its own, and those of its window before them that hold something."""
    prefills = slice(num_decodes, num_decodes + num_prefills)
    length = query_start_loc_ptr[num_decodes : num_decodes + num_prefills + 1].diff()
    before = (seq_lens_ptr[prefills] - length - replay_start_ptr[prefills]).clamp(0, window_size - 1)
    prefill_gather_lens_ptr[:num_prefills] = length + before


def draft_window(
    grid, swa_indices_ptr, swa_indices_stride, swa_lens_ptr, window_size, index_width, query_start_loc_ptr,
    seq_lens_ptr, token_to_req_indices_ptr, is_valid_token_ptr, block_table_ptr, block_table_stride, block_size,
    token_offset, **unused,
):  # fmt: skip
    """Slots that every token of a draft block reads: the window before the block, and the block."""
    token = slice(token_offset, token_offset + grid[0])
    valid = is_valid_token_ptr[token]
    request = torch.where(valid, token_to_req_indices_ptr[token], 0).long()
    end = seq_lens_ptr[request]
    start = (end - query_start_loc_ptr.diff()[request] - window_size).clamp_min(0)
    lens = torch.where(valid, end - start, 0)
    column = torch.arange(index_width)
    counts = column < lens.unsqueeze(-1)
    position = torch.where(counts, start.unsqueeze(-1) + column, 0)
    page = block_table_ptr[request.unsqueeze(-1), position // block_size]
    rows = swa_indices_ptr.view(-1, swa_indices_stride)
    rows[: grid[0], :index_width] = torch.where(counts, page * block_size + position % block_size, -1)
    swa_lens_ptr[: grid[0]] = lens


def uniform_decode(
    grid, seq_lens_ptr, decode_seq_lens_ptr, block_table_ptr, block_table_stride, expanded_block_table_ptr,
    expanded_bt_stride, decode_lens_ptr, max_decode_len, **unused,
):  # fmt: skip
    """A decode of several tokens as so many of one token each."""
    token = torch.arange(grid[0])
    request = token // max_decode_len
    decode_seq_lens_ptr[: grid[0]] = (seq_lens_ptr[request] - max_decode_len + token % max_decode_len + 1).clamp_min(0)
    expanded_block_table_ptr[: grid[0]] = block_table_ptr[request, :expanded_bt_stride]
    decode_lens_ptr[: grid[0]] = 1


def compressed_slots(
    grid, compressed_slot_mapping_ptr, slot_mapping_ptr, query_start_loc_ptr, seq_lens_ptr, block_table_ptr,
    block_table_stride, block_size, dcp_world_size, cp_interleave, *, COMPRESS_RATIO, PAD_ID, **unused,
):  # fmt: skip
    """Slot of the compressed row that each token closes; the pad where it closes none or is replayed."""
    _one_rank(dcp_world_size)
    bounds = query_start_loc_ptr[: grid[0] + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    request = torch.arange(grid[0]).repeat_interleave(bounds.diff())
    position = torch.arange(first, last) + (seq_lens_ptr[: grid[0]] - bounds[1:])[request]
    closes = ((position + 1) % COMPRESS_RATIO == 0) & (slot_mapping_ptr[first:last] != PAD_ID)
    row = torch.where(closes, position // COMPRESS_RATIO, 0)
    page = block_table_ptr[request, row // block_size].long()
    compressed_slot_mapping_ptr[first:last] = torch.where(closes, page * block_size + row % block_size, PAD_ID)


def draft_inputs(
    grid, input_ids, query_positions, is_padding, query_start, seq_lens, query_slots, context_positions, context_slots,
    sample_indices, sample_positions, sample_requests, temperatures, seeds, target_positions, target_start, requests,
    last_sampled, next_prefill, num_sampled, num_rejected, temperature, seed, block_table, width, mask_token, page_rows,
    queries, steps, max_requests, max_tokens, max_length, rank, *, SAMPLE_FROM_ANCHOR, PAD_SLOT_ID, CP_SIZE, **unused,
):  # fmt: skip
    """The batch of a draft: the rows of the target that it reads as context, and a block of queries a request."""
    _one_rank(CP_SIZE)
    rows = grid[0]
    state, ends = requests[:rows].long(), target_start[1 : rows + 1]
    valid_ends = ends - num_rejected[:rows]

    def slots(request, position, counts):
        page = block_table[request, (position // page_rows).clamp_max(width - 1)].long()
        return torch.where(counts & (page != 0), page * page_rows + position % page_rows, PAD_SLOT_ID)

    token = torch.arange(int(ends[-1]))
    request = torch.bucketize(token, ends, right=True)
    counts = token < valid_ends[request]
    position = torch.where(counts, target_positions[: len(token)], 0)
    context_positions[: len(token)] = position
    context_slots[: len(token)] = slots(request, position, counts)

    first = target_positions[valid_ends.long() - 1] + 1
    position = first.unsqueeze(-1) + torch.arange(queries)
    total, token_ids = rows * queries, torch.full((rows, queries), mask_token)
    token_ids[:, 0] = torch.where(num_sampled[:rows] > 0, last_sampled.view(-1)[state], next_prefill.view(-1)[state])
    for out, values, padding in (
        (input_ids, token_ids, 0),
        (query_positions, position.clamp_max(max_length - 1), 0),
        (is_padding, torch.zeros_like(token_ids), 1),
        (query_slots, slots(torch.arange(rows).unsqueeze(-1), position, torch.tensor(True)), PAD_SLOT_ID),
    ):
        out[:total] = values.flatten()
        out[total:max_tokens] = padding

    unsampled = 0 if SAMPLE_FROM_ANCHOR else 1
    sampled = queries - unsampled
    for out, values, padding in (
        (sample_indices, torch.arange(total).view(rows, queries), 0),
        (sample_positions, position + 1 - unsampled, 0),
        (sample_requests, state.unsqueeze(-1).expand(rows, queries), -1),
    ):
        out[: rows * steps].view(rows, steps)[:, :sampled] = values[:, unsampled:]
        out[rows * steps : max_requests * steps] = padding

    query_start[:rows] = torch.arange(0, total, queries)
    query_start[rows : max_requests + 1] = total
    seq_lens[:rows] = (first + queries).clamp_max(max_length)
    seq_lens[rows:max_requests] = 0
    temperatures[state], seeds[state] = temperature[state], seed[state]


def token_logprobs(grid, out, logits, logits_stride, ids, *sizes, **unused):
    """Log-probabilities of the tokens listed for each row, in float64, so that a row's do not depend on its batch."""
    exact = logits[: grid[0]].double()
    out[: grid[0]] = exact.gather(-1, ids[: grid[0]].long()) - exact.logsumexp(-1, keepdim=True)


def token_ranks(grid, out, logits, logits_stride, ids, vocabulary, **unused):
    """How many logits of each row are at least that of its token."""
    rows = logits[: grid[0], :vocabulary]
    out[: grid[0]] = (rows >= rows.gather(-1, ids[: grid[0]].long().unsqueeze(-1))).sum(-1)
