"""Sessions with agents, and conversations with scripts, that end before they have said what they were asked."""

from __future__ import annotations

import pytest

from longcat_pd.cluster.conversation import Conversation
from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.jobs import Event, Job, Seen, as_line
from longcat_pd.cluster.machines import Machine
from longcat_pd.cluster.sessions import Sessions
from longcat_pd.cluster.shell import LocalShell

JOB = Job(config="c", text="", folder="/nowhere", logs="/nowhere", url="", nodes=("here",), services=(), ports=())
HERE = LocalShell(node="here")


def asked(script: str) -> tuple[bool, str | None]:
    """Whether a script answers what an agent is asked, and what is said of it."""
    machine = Machine(shell=HERE, nodes=("here",))
    with Sessions([(machine, ["sh", "-c", script], JOB)]) as sessions:
        answers = sessions.collect(lambda event: event.seen, timeout_s=30.0)
        return bool(answers), sessions.all[0].problem


def test_a_session_that_ends_without_an_answer_has_a_problem() -> None:
    answer = as_line(Event(seen=Seen(is_recorded=False))).decode()
    assert asked(f"echo hello; echo '{answer}'") == (True, None)
    assert asked("exit 0") == (False, "its session ended without an answer")
    assert asked("echo no luck >&2; exit 1") == (False, "no luck")


def test_a_script_that_ends_in_silence_is_said_to_have() -> None:
    talk = Conversation(HERE, ["sh", "-c", "exit 0"])
    with pytest.raises(StepFailed, match="exit status 0: it said nothing"):
        talk.hear(30.0)
    talk.close()
