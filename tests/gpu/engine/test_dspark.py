# SPDX-License-Identifier: Apache-2.0
"""DSpark on the card: tokens of plain decoding, upstream's acceptance, and the caches that plain decoding leaves."""

import pytest
import torch

from tests.e2e.test_dspark import by_length, partial_acceptances
from vllm.ampere.cache_layout import INDEX_KEY, KV_RECORD

from .measures import common
from .runs import DRAFTED

pytestmark = pytest.mark.gpu
reads = pytest.mark.reads
STEPS = [step["name"] for step in DRAFTED]


def acceptance(runs, name) -> tuple[float, float]:
    """Drafted and accepted tokens over all steps."""
    counted = [runs.result(name)["counters"][step] for step in STEPS]
    return tuple(sum(c[f"vllm:spec_decode_num_{kind}_tokens"] for c in counted) for kind in ("draft", "accepted"))


@reads("sm80-parrot", "sm80-dspark", "sm86")
@pytest.mark.parametrize("name", ["sm80-dspark", "sm86"])
@pytest.mark.parametrize("step", STEPS)
def test_tokens_are_those_of_plain_decoding(runs, name, step):
    """Or they part where the two best tokens are nearly as likely; a batch of one and of six rounds differently."""
    for plain, drafted in zip(runs.answers("sm80-parrot", step), runs.answers(name, step)):
        same = common(plain["tokens"], drafted["tokens"])
        if same < len(plain["tokens"]):
            best, second = plain["logprobs"][same][:2]
            assert best - second < 0.1, f"token {same}: the best two differ by {best - second:.3f}"


@reads("native-dspark")
@pytest.mark.parametrize("name", ["sm80-dspark", "sm86"])
def test_acceptance_is_upstreams(runs, name):
    """Of some 400 tokens, within three standard deviations of a share."""
    (drafts, accepted), (others, upstream) = acceptance(runs, name), acceptance(runs, "native-dspark")
    share, want = accepted / drafts, upstream / others
    runs.figures[f"{name}: accepted"] = f"{share:.3f} of {drafts:.0f} drafts, native {want:.3f} of {others:.0f}"
    assert accepted > 100
    assert abs(share - want) < 3 * (2 * want * (1 - want) / drafts) ** 0.5 + 0.01


def difference(rows: torch.Tensor, want: torch.Tensor) -> float:
    """Relative norm of what the bytes of cache rows mean: record, index key, or float32."""
    layout = {KV_RECORD.row_bytes: 64, INDEX_KEY.row_bytes: 128}.get(rows.shape[-1])
    got, want = (x.view(torch.float32) if layout is None else decoded(x, layout) for x in (rows, want))
    return ((got - want).norm() / want.norm()).item()


def decoded(rows: torch.Tensor, group: int) -> torch.Tensor:
    """float32 values of record or index-key bytes [rows, bytes]: codes under their scales, and the bfloat16 tail."""
    if group == 64:
        codes, tail, scales = rows[:, :448], rows[:, 448:576].contiguous().view(torch.bfloat16).float(), rows[:, 576:583]
        scale = torch.exp2(scales.float() - 127)
    else:
        codes, tail, scale = rows[:, :128], rows[:, :0].float(), rows[:, 128:].contiguous().view(torch.float32)
    values = codes.contiguous().view(torch.float8_e4m3fn).float() * scale.repeat_interleave(group, 1)
    return torch.cat([values, tail], 1)


@reads("sm80-parrot", "sm80-dspark")
def test_caches_after_partial_acceptance(runs):
    """Every row of window, compressed cache, index keys and the compressor's ring is the one that plain decoding writes.

    Row by row within 3 %: a product of six rows rounds otherwise than of one. The row of a rejected draft, which is
    overwritten later, is another token's and far off.
    """
    plain, speculative = (by_length(runs.result(name)["caches"]["caches"]) for name in ("sm80-parrot", "sm80-dspark"))
    compared = [at for at in partial_acceptances(runs.result("sm80-dspark")["caches"]["caches"]) if at in plain]
    assert len({number for number, _ in compared}) >= 2, compared
    apart, rejected = [], []
    for at in compared:
        assert speculative[at]["tokens"] == plain[at]["tokens"]
        for name, rows in plain[at]["rows"].items():
            for mine, row in zip(speculative[at]["rows"][name], rows, strict=True):
                apart.append(difference(mine[None], row[None]))
        following = plain.get((at[0], at[1] + 1))
        if following:
            rejected += [difference(row[None], following["rows"][name][-1:]) for name, row in speculative[at]["rejected"].items()]
    runs.figures["caches after partial acceptance"] = f"{len(compared)} steps, worst row {max(apart):.4f}, a rejected row {min(rejected):.3f} and on"
    assert all(seen < 0.03 for seen in apart)  # NaN too fails
    assert min(rejected) > 0.3
