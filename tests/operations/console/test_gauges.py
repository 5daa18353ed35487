"""History, rates, growth and alerts of the console."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.operations.console.alerts import AlertInput, find_alerts
from smqrt.operations.console.gauges import Growth, History, Rates


class Clock:
    """A clock that tests set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_history_keeps_the_newest_points_in_order() -> None:
    history = History(["peers"], points=3, step_s=5)
    for number in range(5):
        history.add(100.0 + number, {"peers": None if number == 3 else number})
    assert history.snapshot() == {
        "step_s": 5,
        "length": 3,
        "times": [102.0, 103.0, 104.0],
        "series": {"peers": [2.0, None, 4.0]},
    }


def test_rate_needs_two_readings_of_a_growing_counter() -> None:
    clock = Clock()
    rates = Rates(clock)

    def look(count: float | None) -> float | None:
        rates.begin()
        found = rates.per_s("key", count)
        clock.now_s += 2
        return found

    assert [look(count) for count in (10, 30, 30, 5, None, 7, 9)] == [None, 10, 0, None, None, None, 1]


def test_growth_covers_the_last_minutes() -> None:
    clock = Clock()
    growth = Growth(clock)
    for minute in range(12):
        clock.now_s = minute * 60.0
        growth.add({"names": minute})
    assert growth.of("names", 11) == 5
    assert growth.of("new", 2) == 2


CALM: dict[str, Any] = {
    "phase": "running",
    "loop_lag_worst_s": 0.01,
    "open_files": 10,
    "open_files_limit": 1000,
}


def looked(**changes: Any) -> AlertInput:
    nothing: dict[str, Any] = dict.fromkeys(("listeners", "applications", "journals", "pipelines", "limits"), [])
    return AlertInput(**{"server": CALM, "dropped_lately": 0, "errors_lately": 0, **nothing, **changes})


TROUBLES: dict[str, dict[str, Any]] = {
    "peers": {"server": CALM | {"phase": "draining"}},
    "overview": {"server": CALM | {"loop_lag_worst_s": 0.3}},
    "log": {"errors_lately": 3},
    "applications": {"applications": [{"state": "failed", "uri": "/a/", "error": "a/.preload:3: no\nmore"}]},
    "journals": {"journals": [{"name": "j", "alarm": 1}]},
    "limits": {"limits": [{"name": "names", "lately": 2, "setting": "maxnames", "last": ""}]},
}


@pytest.mark.parametrize("view", TROUBLES)
def test_each_problem_has_an_alert_with_remedy(view: str) -> None:
    (alert,) = find_alerts(looked(**TROUBLES[view]))
    assert alert["view"] == view
    assert str(alert["what"]).endswith((".", "no"))
    assert str(alert["remedy"]).endswith(".")


@pytest.mark.parametrize("state", ["failed", "stuck", "disk full"])
def test_failed_query_has_an_alert(state: str) -> None:
    """The process and its other queries may be running."""
    queries = [{"name": "means", "state": state, "error": "a.py:3: no\nmore"}, {"name": "out", "state": "running"}]
    (alert,) = find_alerts(looked(pipelines=[{"path": "/srv/a", "state": "running", "queries": queries}]))
    assert (alert["level"], alert["view"]) == ("bad", "journals")
    assert str(alert["what"]).startswith("The query means of /srv/a ")
    assert str(alert["what"]).endswith(": a.py:3: no")


@pytest.mark.parametrize(
    ("process", "lag_s", "level"), [("running", 61, "warn"), ("running", 60, None), ("stopped", 99, None)]
)
def test_late_query_has_an_alert(process: str, lag_s: float, level: str | None) -> None:
    query = {"name": "means", "state": "running", "lag_s": lag_s, "lag_rows": 1}
    found = find_alerts(looked(pipelines=[{"path": "/srv/a", "state": process, "queries": [query]}]))
    assert [one["level"] for one in found] == ([level] if level else [])
    assert all(one["what"] == "The query means of /srv/a is 61 s late, with 1 unprocessed row." for one in found)


def test_healthy_server_has_no_alerts() -> None:
    assert find_alerts(looked()) == []


@pytest.mark.parametrize(("days", "level"), [(40, None), (20, "warn"), (3, "bad"), (-1, "bad")])
def test_certificates_have_an_alert_before_expiry(days: int, level: str | None) -> None:
    listeners = [{"name": "https", "certificate_days": days, "certificate_fault": None}]
    assert [alert["level"] for alert in find_alerts(looked(listeners=listeners))] == ([level] if level else [])


def test_failed_certificate_order_has_an_alert() -> None:
    acme = {"names": ["example.com", "www.example.com"], "fault": "the authority is down."}
    (alert,) = find_alerts(looked(server=CALM | {"acme": acme}))
    assert alert["level"] == "bad"
    assert (
        alert["what"] == "The certificate of example.com, www.example.com could not be ordered: the authority is down."
    )
    assert find_alerts(looked(server=CALM | {"acme": acme | {"fault": None}})) == []


def test_urgent_alerts_come_first() -> None:
    both = find_alerts(
        looked(errors_lately=1, listeners=[{"name": "https", "certificate_days": 1, "certificate_fault": None}])
    )
    assert [alert["level"] for alert in both] == ["bad", "warn"]
