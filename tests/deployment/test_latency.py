"""Latencies: percentiles by nearest rank, and the rate of answers."""

from deft.deployment.latency import Latencies, percentile


def test_percentiles_by_nearest_rank():
    values = [float(value) for value in range(200, 0, -1)]  # 1 … 200
    assert percentile(values, 0.5) == 100.0  # ⌈0.5 · 200⌉ = 100
    assert percentile(values, 0.99) == 198.0  # ⌈0.99 · 200⌉ = 198
    assert percentile([7.0], 0.99) == 7.0


def test_summary_counts_errors_apart():
    now = 0.0
    latencies = Latencies(lambda: now)
    assert latencies.summary() == {"messages": 0, "errors": 0, "stalls": 0}
    for step in range(11):  # an answer every 20 ms, each after 5 ms
        now = 0.02 * step + 0.005
        latencies.answered(0.02 * step)
    latencies.rejected()
    latencies.inferred(0.003)
    latencies.stalled()
    # 11 answers span 10 · 20 ms: 10 / 0.2 s = 50 Hz
    assert latencies.summary() == {
        "messages": 12, "errors": 1, "stalls": 1, "p50_ms": 5.0, "p99_ms": 5.0, "inference_p50_ms": 3.0,
        "inference_p99_ms": 3.0, "hz": 50.0,
    }  # fmt: skip
    assert latencies.line() == "12 messages, 1 rejected; latency p50 5.00 ms, p99 5.00 ms; 50.0 Hz; 1 stalls"
