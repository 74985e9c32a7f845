# SPDX-License-Identifier: Apache-2.0
"""The rank slice's figures, from made-up times: which id holds which ratio."""

import threading

from benchmarks import bench_rank_slice
from benchmarks.bench_rank_slice import LOADED, LONG_POINTS, POINTS, figures_of, wait_for_all

ALL_POINTS = POINTS + LONG_POINTS


def measured(step_s: float, prefill_s: float, points) -> dict:
    point = {"steps_s": [step_s, 9.0, step_s], "prefill_s": prefill_s, "token_s": step_s}
    return {"weights_gib": 37.5} | {f"bs{requests}-ctx{context}": point for requests, context in points}


def values(figures) -> dict[str, float]:
    assert len({figure["id"] for figure in figures}) == len(figures)
    return {figure["id"].removeprefix("rank_slice_tp8/"): figure["value"] for figure in figures}


def test_ratios_are_ours_over_stock():
    found = {"native": measured(0.004, 2.0, ALL_POINTS), "sm80": measured(0.005, 3.0, ALL_POINTS)}
    seen = values(figures_of(found, ["native", "sm80"], dspark=False))
    for point in ("decode-bs1-ctx256", "decode-bs8-ctx256", "decode-bs32-ctx256", "decode-bs1-ctx64k"):
        assert seen[f"{point}/vs-stock"] == 1.25 and seen[f"{point}/sm80-step"] == 5.0
    assert seen["prefill-16k/vs-stock"] == seen["prefill-64k/vs-stock"] == seen["prefill-bs8-16k/vs-stock"] == 1.5
    assert seen["prefill-64k/native-rate"] == 32_768
    assert "load/weights-gib" not in seen and seen["load/native-weights-gib"] == 37.5


def test_without_upstreams_path_nothing_is_called_stock():
    found = {"sm80": measured(0.004, 2.0, ALL_POINTS), "sm86": measured(0.004, 2.0, ALL_POINTS)}
    seen = values(figures_of(found, ["sm80", "sm86"], dspark=False))
    assert seen["decode-bs1-ctx256/vs-sm80"] == 1.0 and not any("vs-stock" in name for name in seen)


def test_drafts():
    points = bench_rank_slice.DSPARK_POINTS
    found = {"native": measured(0.01, 1.0, points), "sm80": measured(0.009, 1.0, points)}
    seen = values(figures_of(found, ["native", "sm80"], dspark=True))
    assert seen["dspark-bs1-ctx256/vs-stock"] == 0.9 and seen["load/weights-gib"] == 37.5


def test_vllms_line_of_the_weights():
    line = "(Worker) INFO 11-30 09:28:42 [model_runner.py:428] Model loading took 36.75 GiB memory and 4.621755 seconds"
    assert LOADED.findall(line) == ["36.75"]


def test_launches_of_a_traced_step_and_tensors():
    rows = [{"calls": 30}, {"calls": 15}, {"calls": None}]
    found = {"sm80": measured(0.004, 2.0, POINTS) | {
        "held_gib": {"a.*.weight": 30.25, "b": 0.5}, "traces": {"bs1-ctx16k-decode": {"steps": 10, "rows": rows}},
    }}  # fmt: skip
    seen = values(figures_of(found, ["sm80"], dspark=False, short=True))
    assert seen["decode-bs1-ctx16k/sm80-launches"] == 4.5 and seen["load/sm80-tensors-gib"] == 30.75
    assert "decode-bs8-ctx64k/sm80-step" not in seen


def test_no_engine_measures_while_another_loads(tmp_path):
    (tmp_path / "engines").write_text("2")
    waiting = threading.Thread(target=wait_for_all, args=(tmp_path,), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    (tmp_path / "loaded-other").touch()
    waiting.join(5)
    assert not waiting.is_alive()
