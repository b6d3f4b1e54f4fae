"""The dashboard asks for metrics and labels that there are, and leaves none out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir.engine.front import Front
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import EchoEngine, byte_tokenizer, template
from tests.serve.running import live

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/kvasir.json").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NOT_SHOWN = {"vllm:lora_requests_info"}  # families that no panel needs
SCRAPED = {"job", "instance"}  # labels that Prometheus gives


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]]
QUERIES = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]


def names_in(expression: str) -> set[str]:
    """The metrics of a PromQL expression: what is neither label, nor function, nor keyword."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring) ?\([^)]*\)|\"[^\"]*\"", " ", expression)
    words = set(re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", bare))
    return words - {"by", "sum", "and", "or", "unless"}


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r"[{,]\s*(\w+)\s*=~?", expression)
    grouped = [name.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for name in group.split(",")]
    return {name for name in (*matched, *grouped) if name}


@pytest.fixture(scope="module")
def families():
    """What a server of two replicas exposes after some work, by name."""
    front = Front(FleetEngine(lambda i: EchoEngine(), 2), byte_tokenizer(), template())
    with live(ServeSettings(port=0, access_log=Path("/dev/null")), front) as server:
        body = {"prompt": "ab" * 40, "max_tokens": 5}
        for path, fields in (("completions", {}), ("completions", {"service_class": "batch"}), ("nowhere", {})):
            httpx.post(f"{server.url}/v1/{path}", json=body | fields)
        text = httpx.get(f"{server.url}/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_and_label_of_the_dashboard_exists(families):
    known = {family.name + suffix: family for family in families.values() for suffix in SUFFIXES[family.type]}
    assert len(EXPRESSIONS) > 40
    for expression in (*EXPRESSIONS, *(re.sub(r"label_values\((.*), \w+\)", r"\1", q) for q in QUERIES)):
        names = names_in(expression)
        assert names, expression
        for name in names:
            assert name in known, f"{name} of {expression}"
            samples = [sample for sample in known[name].samples if sample.name == name]
            labels = {label for sample in samples for label in sample.labels} | SCRAPED
            assert not samples or labels_in(expression) <= labels, expression
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))


def test_each_replica_has_its_panels(families):
    of_replicas = {name for name in families if name.startswith("kvasir_replica")}
    assert len(of_replicas) >= 8
    for name in of_replicas:
        family = families[name]
        assert {sample.labels["replica"] for sample in family.samples} == {"0", "1"}, name
        shown = [e for e in EXPRESSIONS if names_in(e) & {name + suffix for suffix in SUFFIXES[family.type]}]
        assert shown and all("by (replica)" in expression for expression in shown), name


def test_every_metric_of_the_server_is_on_the_dashboard(families):
    shown = set().union(*map(names_in, EXPRESSIONS))
    for family in families.values():
        on = any(family.name + suffix in shown for suffix in SUFFIXES[family.type])
        assert on != (family.name in NOT_SHOWN), family.name


def test_every_metric_that_the_docs_name_exists(families):
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
    known = {family.name + ending for family in families.values() for ending in endings[family.type]}
    for page in sorted(ROOT.glob("docs/*.md")):
        for name in re.findall(r"`(kvasir_[a-z_]+)[`{]", page.read_text()):
            assert name in known, f"{name} in {page.name}"


def test_expressions_are_read_as_prometheus_reads_them():
    expression = 'histogram_quantile(0.5, sum by (le, kind) (rate(a_bucket{job=~"$job", x="by (y)"}[5m]))) / b_total'
    assert names_in(expression) == {"a_bucket", "b_total"}
    assert {"le", "kind", "job", "x"} <= labels_in(expression)


def test_panels_do_not_overlap_and_have_titles_and_legends():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= labels_in(target["expr"]), panel["title"]
            assert legend or len({t["legendFormat"] for t in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_file_is_up_to_date():
    script = ROOT / "scripts/make_dashboard.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
