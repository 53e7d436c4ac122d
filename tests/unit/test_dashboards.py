"""The dashboard and the alerts name only metrics, labels and values that there are, and say what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from longcat_pd.errors import LongcatError
from longcat_pd.metrics import Metrics
from tests.metric_table import BY_SERIES, KINDS, TABLE, TRACED
from tests.promql import (
    DASHBOARD,
    RULES,
    SCRAPE,
    Selector,
    alerts,
    dashboard_queries,
    filled_in,
    grouped_by,
    panels,
    parsed_metrics,
    selectors,
)

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
OF_PROMETHEUS = {"up": {"job", "instance"}}
# what an operator is woken for: the metrics of which each has to be in an alert
WATCHED = """
ready instance_ready ranks step_seconds_bucket sequences blocks transfers_total requests_total failovers_total breaker_open
trace_spans_total
"""


def codes(kind: type[LongcatError] = LongcatError) -> set[str]:
    return set(kind.codes).union(*map(codes, kind.__subclasses__()))


OUTCOMES = {"stop", "length", "tool_calls", "cancelled"} | codes()


def findings(expression: str) -> list[str]:
    """What in an expression is not there."""
    found, known = [], set()
    for selector in selectors(expression):
        if selector.metric in OF_PROMETHEUS:
            known |= OF_PROMETHEUS[selector.metric]
        elif selector.metric not in BY_SERIES:
            found.append(f"no metric {selector.metric}")
        else:
            known |= BY_SERIES[selector.metric].label_names
            found += unknown_labels(selector)
    found += [f"no label {label} to group by" for label in grouped_by(expression) - known]
    return found if selectors(expression) else ["no metric at all"]


def unknown_labels(selector: Selector) -> list[str]:
    row, found = BY_SERIES[selector.metric], []
    for label, operator, value in selector.matchers:
        closed = OUTCOMES if row.name == "requests_total" and label == "outcome" else set(row.values(label))
        named = set(value.split("|")) if operator in ("=~", "!~") else {value}
        if label not in row.label_names:
            found.append(f"{selector.metric} has no label {label}")
        elif label == "role" and not named & set(row.on):
            found.append(f"{selector.metric} is not shown by {value}")
        elif closed and named - closed and value != ".*":
            found.append(f"{selector.metric}: {label} is never {sorted(named - closed)}")
    return found


@pytest.mark.parametrize("expression", dashboard_queries())
def test_a_query_of_the_dashboard_names_what_there_is(expression: str) -> None:
    assert findings(filled_in(expression, "1m")) == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_names_what_there_is_and_says_what_to_do(alert: dict[str, object]) -> None:
    expression, annotations = str(alert["expr"]), alert["annotations"]
    assert findings(expression) == []
    assert isinstance(annotations, dict) and set(annotations) == {"summary", "what_to_do"} and all(annotations.values())
    assert alert["labels"] in ({"severity": "warning"}, {"severity": "critical"})
    known = set[str]().union(*(BY_SERIES[s.metric].label_names for s in selectors(expression) if s.metric in BY_SERIES))
    kept = grouped_by(expression) or known or OF_PROMETHEUS["up"]
    assert set(re.findall(r"\$labels\.(\w+)", annotations["summary"])) <= kept


EXPRESSIONS = [*(filled_in(query, "1m") for query in dashboard_queries()), *(str(alert["expr"]) for alert in alerts())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_promql(expression: str) -> None:
    assert sorted(parsed_metrics(expression)) == sorted(selector.metric for selector in selectors(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "rate(up)",
        "rate(up[5m]",
        "rates(up[5m])",
        "sum by (up",
        "up[5m] > 1",
        "up ++",
        'up{job="a"',
        "histogram_quantile(up)",
    ],
)
def test_what_is_no_promql_is_found(expression: str) -> None:
    with pytest.raises(ValueError):
        parsed_metrics(expression)


def test_the_rules_have_the_form_that_prometheus_reads() -> None:
    """Without promtool: unknown keys, durations, and templates that only know labels and the value."""
    tree = yaml.safe_load(RULES.read_text())
    assert set(tree) == {"groups"}
    for group in tree["groups"]:
        assert set(group) == {"name", "rules"}
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
    for alert in alerts():
        assert {"alert", "expr", "labels", "annotations"} <= set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[sm]", alert.get("for", "1s"))
        for text in alert["annotations"].values():
            plain = re.sub(r"\{\{ \$(labels\.\w+|value \| humanizePercentage) \}\}", "", text)
            assert not set("{}$") & set(plain), text
    scrape = yaml.safe_load(SCRAPE.read_text())
    assert set(scrape) == {"global", "rule_files", "scrape_configs"}
    assert set(scrape["global"]) == {"scrape_interval", "evaluation_interval"}
    assert all(re.fullmatch(r"\d+s", value) for value in scrape["global"].values())


def test_every_metric_of_the_table_is_on_the_dashboard_and_the_alerts_watch_what_they_must() -> None:
    shown = {selector.metric for query in dashboard_queries() for selector in selectors(query)}
    assert [row.name for row in (*TABLE, TRACED) if not row.series & shown] == []
    watched = {selector.metric for alert in alerts() for selector in selectors(str(alert["expr"]))}
    assert {f"longcat_pd_{name}" for name in WATCHED.split()} <= watched


@pytest.mark.parametrize(
    ("expression", "finding"),
    [
        ("rate(longcat_pd_request_total[1m])", "no metric longcat_pd_request_total"),
        ("longcat_pd_step_seconds", "no metric longcat_pd_step_seconds"),
        ('longcat_pd_blocks{status="free"}', "longcat_pd_blocks has no label status"),
        ('longcat_pd_blocks{state=~"free|lost"}', "longcat_pd_blocks: state is never ['lost']"),
        ('longcat_pd_blocks{role="load_balancer"}', "longcat_pd_blocks is not shown by load_balancer"),
        ("sum by (target) (longcat_pd_blocks)", "no label target to group by"),
        ('longcat_pd_requests_total{outcome="lost"}', "longcat_pd_requests_total: outcome is never ['lost']"),
        ("1 + 1", "no metric at all"),
    ],
)
def test_what_is_not_there_is_found(expression: str, finding: str) -> None:
    assert findings(expression) == [finding]


def test_panels_have_titles_ids_and_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text())
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    titles = [panel["title"] for panel in panels()]
    assert all(titles) and len(titles) == len(set(titles))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in panels():
        assert panel["targets"] and panel["datasource"]["uid"] == "${datasource}"


def test_the_scrape_example_keeps_the_names_that_instances_give_themselves() -> None:
    config = yaml.safe_load(SCRAPE.read_text())
    (job,) = config["scrape_configs"]
    assert job["honor_labels"] is True and config["rule_files"] == [RULES.name]
    assert {"job": job["job_name"]} == {"job": "longcat_pd"}, "the alert on up names the job"


@needs_promtool
def test_promtool_has_nothing_against_rules_and_scrape_example() -> None:
    for args in (["check", "rules", str(RULES)], ["check", "config", str(SCRAPE)]):
        done = subprocess.run([str(PROMTOOL), *args], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@needs_promtool
@pytest.mark.parametrize("kind", KINDS)
def test_promtool_has_nothing_against_the_metrics(kind: str) -> None:
    metrics = Metrics(role=kind, instance="x0")
    for group in (metrics.http, metrics.requests, metrics.engine, metrics.transfers, metrics.balancer):
        assert group
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=metrics.render(), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
