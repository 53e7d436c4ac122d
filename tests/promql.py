"""What the shipped queries say: expressions of the dashboard and of the alerts, and the metrics and labels they name.

Parsed, and its types checked, by promql-parser; what follows from the text finds selectors and lists of labels, which is
all that can disagree with a table of metrics.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "longcat-pd.json"
RULES = DEPLOY / "prometheus" / "alerts.yml"
SCRAPE = DEPLOY / "prometheus" / "prometheus.yml"

_STRING = r'"[^"]*"'
_SELECTOR = re.compile(rf"\b([a-zA-Z_]\w*)\s*\{{((?:[^}}\"]|{_STRING})*)\}}|\b(longcat_pd_\w+|up)\b")
_MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({_STRING})")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """One metric in an expression, with its matchers: label, operator, value."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...] = ()


def parsed_metrics(expression: str) -> list[str]:
    """The metrics of an expression as a parser reads it. Raises ValueError: no PromQL, unknown function, wrong type."""
    found: list[str] = []

    def note(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node.name)

    promql_parser.walk(promql_parser.parse(expression), pre_visit=note)
    return found


def selectors(expression: str) -> list[Selector]:
    """In their order."""
    found = []
    for braced, inside, bare in _SELECTOR.findall(expression):
        matchers = tuple((label, op, value[1:-1]) for label, op, value in _MATCHER.findall(inside))
        found.append(Selector(braced or bare, matchers))
    return found


def grouped_by(expression: str) -> set[str]:
    """The labels that aggregations and joins name."""
    return {label.strip() for inside in _GROUPING.findall(expression) for label in inside.split(",") if label.strip()}


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, those that show something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    """All of them, as they stand in the file."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    """All of them, in their order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def filled_in(expression: str, interval: str) -> str:
    """A query of the dashboard as Grafana sends it, for all instances."""
    return expression.replace("$__rate_interval", interval).replace("$instance", ".*")
