from itertools import product

import pytest
from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.metrics import Metrics
from tests.metric_table import KINDS, TABLE, Row, families_of, scraped


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k not in ("role", "instance")))): s.value
        for family in families
        for s in family.samples
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_process_shows_the_table_of_the_contract_and_nothing_else(kind: str) -> None:
    metrics = Metrics(role=kind, instance="x0")
    groups = [metrics.http, metrics.requests]
    groups += [metrics.balancer] if kind == "load_balancer" else [metrics.engine]
    groups += [metrics.transfers] if kind in ("prefill", "decode") else []
    assert scraped(metrics.render().decode(), kind=kind, instance="x0").families == families_of(kind)


@pytest.mark.parametrize("row", [row for row in TABLE if row.labels and all(row.labels.values())], ids=lambda row: row.name)
def test_members_of_a_closed_set_are_there_before_anything_is_counted(row: Row) -> None:
    """What appears with its first count has no zero before it, and a rate does not see that count."""
    for kind in row.on:
        metrics = Metrics(role=kind, instance="x0")
        for group in (metrics.http, metrics.requests, metrics.engine, metrics.transfers, metrics.balancer):
            assert group
        labels = {key for name, key in samples(metrics) if name in row.series and "le" not in dict(key)}
        phases = ("prefill", "decode") if kind == "standalone" else (kind,)
        closed = {**row.labels, **({"phase": phases} if "phase" in row.labels else {})}
        expected = product(*([(label, value) for value in values] for label, values in closed.items()))
        assert labels == {tuple(sorted(pairs)) for pairs in expected}


def test_what_a_role_does_not_show_can_be_used_there_all_the_same() -> None:
    metrics = Metrics(role="prefill", instance="p0")
    metrics.engine.draft_tokens_total.inc()
    assert "draft_tokens" not in metrics.render().decode()


def test_more_labels_are_given_in_order() -> None:
    metrics = Metrics(role="load_balancer", instance="lb")
    metrics.http.finished(route="/health", status=200, seconds=0.1)
    metrics.balancer.leg_failures_total("decode", "self").inc()
    metrics.requests.cancels_total("client").inc(2)
    found = samples(metrics)
    assert found["longcat_pd_http_requests_total", (("route", "/health"), ("status", "200"))] == 1
    assert found["longcat_pd_leg_failures_total", (("cause", "self"), ("leg", "decode"))] == 1
    assert found["longcat_pd_cancels_total", (("from", "client"),)] == 2


def test_a_process_shows_the_groups_that_it_uses() -> None:
    metrics = Metrics(role="load_balancer", instance="lb")
    metrics.balancer.retries_total.inc()
    text = metrics.render().decode()
    assert "longcat_pd_retries_total" in text and "longcat_pd_blocks" not in text


def test_two_processes_of_a_test_share_nothing() -> None:
    one, two = Metrics(role="prefill", instance="p0"), Metrics(role="prefill", instance="p1")
    one.requests.prompt_tokens_total.inc(5)
    assert samples(one)["longcat_pd_prompt_tokens_total", ()] == 5
    assert two.requests is two.requests and samples(two)["longcat_pd_prompt_tokens_total", ()] == 0


def test_gauges_that_are_read_from_state_are_fresh_in_each_rendering() -> None:
    metrics = Metrics(role="decode", instance="d0")
    free = [7.0]
    metrics.refresh_with(lambda: metrics.engine.blocks("free").set(free[0]))
    assert samples(metrics)["longcat_pd_blocks", (("state", "free"),)] == 7
    free[0] = 3.0
    assert samples(metrics)["longcat_pd_blocks", (("state", "free"),)] == 3
