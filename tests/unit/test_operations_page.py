"""docs/operations.md: what it names in code marks is known to the code, so that the page cannot rot; and it is whole.

Commands are compared with the parsers of the command line, metrics with their table, messages with the texts of the source,
other names with what the code calls events, facts, settings, codes and states. The alerts' advice is looked at too.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import re
import shlex
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from longcat_pd import cli
from longcat_pd.cluster import __main__ as run_pd
from longcat_pd.cluster.verbs import VERBS
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import LongcatError
from longcat_pd.server.bundle import Bundle
from tests.metric_table import BY_SERIES, PREFIX, TABLE
from tests.promql import alerts
from tests.syntax import parsed
from tests.unit.test_dashboards import codes, findings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations.md"
PACKAGE = ROOT / "longcat_pd"

SITUATIONS = [
    "Will not start", "Slow first token", "Slow decode", "Rank lost", "Pool full",
    "Digest mismatch", "Upgrade", "Drain", "Capacity", "Key rotation",
]  # fmt: skip
OURS = {"KEY", "ADMIN", "d0", "p0", "balancer", "SERVICE.log.1", "http://BALANCER:8081/"}  # the reader's own
FOREIGN = {
    "Authorization", "SIGTERM", "honor_labels: true", "{}", "pip install '.[cpu,otel]'",
    "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_CERTIFICATE", "TRACES_",
}  # fmt: skip
COMMAND = re.compile(r"(?:extra=\S+ )?(?:bash deploy/)?(run_pd\.sh|longcat-pd|curl)\b(.*)")
NAME = re.compile(r"[A-Za-z_][\w.-]*")


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```\n", "", text, flags=re.M | re.S)


def marks(text: str) -> list[str]:
    """What stands in code marks, without that of the code blocks."""
    return [" ".join(mark.split()) for mark in re.findall(r"`([^`]+)`", without_code_blocks(text))]


def commands(text: str) -> list[str]:
    """The lines of code blocks, continued ones as one, without what is said about them; and those in code marks."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```\n", text, flags=re.M | re.S)).replace("\\\n", " ")
    return [line.split("   #")[0].split("  #")[0] for line in blocks.splitlines() if line] + [
        mark for mark in marks(text) if COMMAND.match(mark)
    ]


# ---------------------------------------------------------------------- what the code knows


@cache
def strings() -> frozenset[str]:
    """All texts of the package; what an f-string puts in is a line feed there."""
    found = {(PACKAGE / "load_balancer" / "status.html").read_text(encoding="utf-8")}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(p.value if isinstance(p, ast.Constant) else "\n" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@cache
def facts() -> frozenset[str]:
    """Events of the log, and what stands on their lines."""
    found = {"request", "rank"}  # of every line that has them
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                first = node.args[0]
                if name in ("debug", "info", "warning", "error", "tell", "write") and isinstance(first, ast.Constant):
                    found |= {str(first.value), *(keyword.arg for keyword in node.keywords if keyword.arg)}
    return frozenset(found)


def settings(record: type, path: str = "") -> Iterator[str]:
    """Paths of a configuration, with and without the sections in front."""
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        yield f"{path}{field.name}"
        for kind in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from settings(kind, f"{path}{field.name}.")


@cache
def names() -> frozenset[str]:
    """Everything that a single word may be."""
    of_settings = set(settings(ClusterConfig))
    of_settings |= {path.partition(".")[2] for path in of_settings} | {path.rpartition(".")[2] for path in of_settings}
    of_metrics = {name.removeprefix(PREFIX) for name in BY_SERIES} | {row.name for row in TABLE}
    labels = {
        label for row in TABLE for label in (*row.label_names, *(v for values in row.labels.values() for v in values))
    }
    told = set(_lines_of_requests()) | {field.name for field in dataclasses.fields(Bundle)}
    return frozenset(
        {*of_settings, *of_metrics, *labels, *told, *facts(), *codes(LongcatError), *VERBS, *OURS}
        | {str(alert["alert"]) for alert in alerts()}
    )


def _lines_of_requests() -> Iterator[str]:
    """The facts of a request's end are put together by key; those of times from the name of a span."""
    for file in (PACKAGE / "server" / "journal.py", PACKAGE / "load_balancer" / "progress.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from (node.value, f"{node.value}_ms")


@cache
def help_of(command: str) -> str:
    """What ``longcat-pd COMMAND --help`` prints; of "run_pd.sh" that of all verbs."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for words in [[verb, "--help"] for verb in VERBS] if command == "run_pd.sh" else [[command, "--help"]]:
            with contextlib.suppress(SystemExit):
                (run_pd.main if command == "run_pd.sh" else cli.main)(words)
    return out.getvalue()


# ---------------------------------------------------------------------- what is wrong with a mark


def wrong_with_command(text: str) -> str:
    """Empty: it can be typed."""
    match = COMMAND.match(text)
    assert match is not None, f"no command: {text}"
    program, rest = match[1], shlex.split(match[2].replace("…", ""))
    if program == "curl":
        return "" if all(path in "\n".join(strings()) for path in re.findall(r":8081(/\S+)", text)) else f"no route: {text}"
    if not rest:
        return ""
    if program == "run_pd.sh":
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                run_pd._parser().parse_args(rest)
        except SystemExit:
            return said.getvalue()
        return ""
    if rest[0] not in cli.COMMANDS:
        return f"no command {rest[0]}"
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
    return " ".join(flag for flag in flags if not re.search(rf"{flag}\b", help_of(rest[0])))


def wrong_with(mark: str) -> str:
    """What a mark names that the code does not know; empty if it knows all of it."""
    if COMMAND.match(mark):
        return wrong_with_command(mark)
    if mark.startswith("--"):
        helps = [help_of(name) for name in (*cli.COMMANDS, "run_pd.sh")]
        return "" if any(re.search(rf"{mark.split()[0]}\b", text) for text in helps) else f"no option {mark}"
    if re.match(r"(GET )?/", mark):
        return "" if mark.split()[-1].partition("…")[0] in strings() | {"/admin/"} else f"no route {mark}"
    if re.match(r"\w+: \{", mark):
        ((section, fields),) = yaml.safe_load(mark).items()
        return ", ".join(key for key in fields if f"{section}.{key}" not in names())
    if re.match(r"\w+\{", mark):
        metric, matchers = mark.removeprefix(PREFIX).split("{")
        suffix = "" if f"{PREFIX}{metric}" in BY_SERIES else "_bucket"  # all series of a histogram
        return ", ".join(findings(f"{PREFIX}{metric}{suffix}{{{matchers}"))
    if mark.endswith("."):
        return "" if any(name.startswith(mark) for name in names()) else f"no settings {mark}"
    if (ROOT / mark).exists() or mark in strings() | OURS | FOREIGN:
        return ""
    if "…" in mark or " " in mark:
        return wrong_with_message(mark)
    words = NAME.findall(re.sub(r'".*?"|=[\w./"-]+', "", mark))
    return ", ".join(word for word in words if word.removeprefix(PREFIX) not in names())


def wrong_with_message(mark: str) -> str:
    """A text with an ellipsis where a value stands; or a line of the log, of which event and facts are looked at."""
    if match := re.fullmatch(r"(\w+)((?: \w+=\S+)+)", mark):
        words = [match[1], *re.findall(r" (\w+)=", match[2])]
        return ", ".join(word for word in words if word not in names())
    pieces = [piece.strip(" ,:") for piece in re.split(r"…|\d+", mark)]
    return ", ".join(piece for piece in pieces if not any(piece in text for text in strings()))


# ---------------------------------------------------------------------- the page


def test_every_name_is_known() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = {mark: wrong for mark in marks(text) if (wrong := wrong_with(mark))}
    assert found == {}


def test_every_command_can_be_typed() -> None:
    found = {line: wrong for line in commands(PAGE.read_text(encoding="utf-8")) if (wrong := wrong_with_command(line))}
    assert found == {}


def test_the_commands_of_the_alerts_can_be_typed() -> None:
    for alert in alerts():
        told = alert["annotations"]["what_to_do"]
        for verb in re.findall(r"run_pd\.sh (\w+)", told):
            assert verb in VERBS, told
        for command in re.findall(r"longcat-pd (\w+)", told):
            assert command in cli.COMMANDS, told


def test_all_ten_situations_are_there_short_and_whole() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(r"^#{2,3} ", text, flags=re.M)
    ten = [part for part in parts if re.match(r"\d+\. ", part)]
    assert [part.splitlines()[0] for part in ten] == [f"{n}. {name}" for n, name in enumerate(SITUATIONS, 1)]
    for part in ten:
        assert "*Over.*" in part, part
        assert len([line for line in without_code_blocks(part).splitlines() if line]) <= 13, part.splitlines()[0]
    links = re.findall(r"\]\(#([\w-]+)\)", text)
    assert set(links) == {f"{n}-{name.lower().replace(' ', '-')}" for n, name in enumerate(SITUATIONS, 1)}
    table = text.partition("## Ten situations")[0]
    assert [str(alert["alert"]) for alert in alerts() if f"`{alert['alert']}`" not in table] == []


@pytest.mark.parametrize(
    "mark",
    [
        "run_pd.sh restrat", "run_pd.sh restart --instances d0", "longcat-pd doctor", "longcat-pd plan FILE --roof",
        "--chatty", "/admin/drained", "GET /stats", 'blocks{state="fre"}', 'block{state="free"}', "first_token_second",
        "LongcatRankMissing", "engine.rank_lost", "load_balancer.max_in_flight", "rank_gone", "overload",
        "request_finished otput=3", "… has mislaid …: rank …", "deploy/prometheus/alert.yml", "fail_over=1",
        "transfer.digests=off", "record: {dirs: DIR}",
    ],
)  # fmt: skip
def test_what_is_not_there_is_found(mark: str) -> None:
    assert wrong_with(mark) != ""
