"""The table of an offline run, from durations that are known."""

from __future__ import annotations

from longcat_pd.standalone.figures import Answered, table


def answered(num_tokens: int, prefill_ms: float, *, first_at: float, ended_at: float) -> Answered:
    return Answered(
        num_prompt=10,
        token_ids=tuple(range(num_tokens)),
        finish="length",
        prefill_ms=prefill_ms,
        first_token_ms=2 * prefill_ms,
        first_at=first_at,
        ended_at=ended_at,
    )


def test_the_table_says_what_was_measured() -> None:
    first = [answered(5, 10.0, first_at=1.0, ended_at=2.0), answered(3, 40.0, first_at=1.5, ended_at=3.0)]
    second = [answered(2, 10.0, first_at=5.0, ended_at=5.5)]
    head, names, *rows = table([first, second], [1.0, 2.0, 9.0], 1.5)
    assert head == "prompts 3, batches 2, tokens in 30, tokens out 10"
    assert names.split() == ["mean", "median", "min", "max"]
    values = {row[:34].strip(): row[34:].split() for row in rows}
    assert values == {
        "prefill of a prompt, ms": ["20.00", "10.00", "10.00", "40.00"],
        "first tokens of a whole batch, ms": ["50.00", "50.00", "20.00", "80.00"],
        "decode step, ms": ["4.00", "2.00", "1.00", "9.00"],
        "tokens/s while decoding": ["2.80"],  # 7 behind the first ones, in 2.0 + 0.5 s
        "tokens per step and sequence": ["1.50"],
        "of which accepted drafts": ["0.50"],
    }


def test_answers_of_one_token_have_no_decode_step() -> None:
    rows = list(table([[answered(1, 10.0, first_at=1.0, ended_at=1.0)]], [], None))
    assert "nothing was decoded" in rows
    assert next(row for row in rows if row.startswith("decode step")).split()[-4:] == ["-"] * 4
