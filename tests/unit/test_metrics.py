from prometheus_client.parser import text_string_to_metric_families

from longcat_pd.metrics import Metrics

NAMES = """
build_info ready draining http_requests_total http_request_seconds inflight_requests requests_total prompt_tokens_total
output_tokens_total queue_seconds prefill_seconds transfer_seconds first_token_seconds
per_token_seconds request_seconds step_seconds driver_step_seconds step_wait_seconds step_compute_seconds sequences
blocks slots ranks transfers_open transfers_total transfer_bytes_total legs_open leg_failures_total retries_total
failovers_total cancels_total instance_ready breaker_open
"""


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k not in ("role", "instance")))): s.value
        for family in families
        for s in family.samples
    }


def test_every_name_of_the_contract_is_declared_with_role_and_instance() -> None:
    metrics = Metrics(role="decode", instance="d0")
    for _group in (metrics.http, metrics.requests, metrics.engine, metrics.transfers, metrics.balancer):
        pass
    text = metrics.render().decode()
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {f"longcat_pd_{name}" for name in NAMES.split()} <= declared
    assert all(name.startswith("longcat_pd_") for name in declared)
    values = [line for line in text.splitlines() if not line.startswith("#")]
    assert values
    assert all('role="decode"' in line and 'instance="d0"' in line for line in values)


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
