"""Sessions with agents, and conversations with scripts, that end before they have said what they were asked."""

from __future__ import annotations

import pytest

from longcat_pd.cluster import conversation, sessions, shell
from longcat_pd.cluster.conversation import Conversation
from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.jobs import Event, Job, Seen, as_line
from longcat_pd.cluster.machines import Machine
from longcat_pd.cluster.sessions import Sessions
from longcat_pd.cluster.shell import LocalShell, Unreachable

JOB = Job(config="c", text="", folder="/nowhere", logs="/nowhere", url="", nodes=("here",), services=(), ports=())
HERE = LocalShell(node="here")
ANSWER = as_line(Event(seen=Seen(is_recorded=False))).decode()


def asked(script: str) -> tuple[bool, str | None]:
    """Whether a script answers what an agent is asked, and what is said of it."""
    machine = Machine(shell=HERE, nodes=("here",))
    with Sessions([(machine, ["sh", "-c", script], JOB)]) as agents:
        answers = agents.collect(lambda event: event.seen, timeout_s=30.0)
        return bool(answers), agents.all[0].problem


def test_a_session_that_ends_without_an_answer_has_a_problem() -> None:
    assert asked(f"echo hello; echo '{ANSWER}'") == (True, None)
    assert asked("exit 0") == (False, "its session ended without an answer")
    assert asked("echo no luck >&2; exit 1") == (False, "no luck")


def test_a_banner_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shell, sessions, conversation):
        monkeypatch.setattr(module, "MOST_SAID", 1 << 20)
    words = "said more than 1 MiB, which no command here does; what a login prints begins b'yyyy"
    answers, problem = asked("yes | tr -d '\\n'")
    assert not answers and problem is not None and problem.startswith(words)
    assert asked(f"yes {'y' * 4000} | head -c 3000000; yes | head -c 3000000 >&2; echo; echo '{ANSWER}'") == (True, None), (
        "lines"
    )
    talk = Conversation(HERE, ["sh", "-c", "yes | tr -d '\\n'"])
    with pytest.raises(Unreachable, match="said more than 1 MiB"):
        talk.hear(30.0)
    talk.close()
    for stream in (1, 2):
        with pytest.raises(Unreachable, match="said more than 1 MiB"):
            HERE.run(["sh", "-c", f"yes >&{stream}"], timeout_s=30.0)


def test_a_script_that_ends_in_silence_is_said_to_have() -> None:
    talk = Conversation(HERE, ["sh", "-c", "exit 0"])
    with pytest.raises(StepFailed, match="exit status 0: it said nothing"):
        talk.hear(30.0)
    talk.close()
