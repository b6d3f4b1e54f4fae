"""/metrics tells each tier apart, and what no tier was asked for."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvasir.engine.meter import Meter
from kvasir.serve.telemetry.metrics import HttpMeter, ModelMetrics, exposition
from kvasir.statistics import EngineStats, TierStats


def test_each_tier_has_its_samples():
    tiers = {
        "host": TierStats({"loaded": 7}, {"saved": 9}, 700, 900, 2, num_parts=7, num_bytes=650),
        "disk": TierStats({"loaded": 1, "corrupt": 2}, {"saved": 2, "dear": 5}, 100, 200, num_bytes=200),
    }
    stats = EngineStats(tiers=tiers, tier_unused={"slow": 3}, tier_loaded_tokens=64)
    text = exposition([ModelMetrics("m", Meter(), stats)], HttpMeter()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def samples(name: str) -> dict[tuple[str, ...], float]:
        family = families[f"kvasir_{name}"]
        values = (s for s in family.samples if not s.name.endswith("_created"))
        return {tuple(s.labels[k] for k in ("tier", "outcome") if k in s.labels): s.value for s in values}

    assert samples("tier_hit_tokens") == {(): 64}
    assert samples("tier_loads") == {
        ("host", "loaded"): 7,
        ("disk", "loaded"): 1,
        ("disk", "corrupt"): 2,
        ("none", "slow"): 3,
    }
    assert samples("tier_saves") == {("host", "saved"): 9, ("disk", "saved"): 2, ("disk", "dear"): 5}
    assert samples("tier_loaded_bytes") == {("host",): 700, ("disk",): 100}
    assert samples("tier_saved_bytes") == {("host",): 900, ("disk",): 200}
    assert samples("tier_evicted") == {("host",): 2, ("disk",): 0}
    assert samples("tier_bytes") == {("host",): 650, ("disk",): 200}
