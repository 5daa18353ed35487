"""The dashboard for Grafana uses existing metrics and labels."""

from __future__ import annotations

import json
import re
from importlib import resources

from smqrt.operations.metrics import FAMILIES

DASHBOARD = json.loads(resources.files("smqrt.operations").joinpath("grafana.json").read_text("utf-8"))
KNOWN = {row.name: set(row.labels) | {"instance", "le"} for row in FAMILIES}


def test_dashboard_uses_existing_metrics() -> None:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    assert len(asked) > 25
    for expression in asked:
        names = re.findall(r"\b((?:smqrt|process|python)_\w+)", expression)
        families = [re.sub(r"_(bucket|sum|count)$", "", name) for name in names]
        assert families, expression
        assert [name for name in families if name not in KNOWN] == [], expression
        labels = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        labels |= set(re.findall(r"(\w+)=~?\"", expression))
        assert labels <= set.union(*(KNOWN[name] for name in families)), expression


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
