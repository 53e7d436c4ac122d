import random

import pytest

from longcat_pd.server.stops import StopFinder


def run(stops, pieces, **options):
    finder, out = StopFinder(stops, **options), ""
    for piece in pieces:
        text, stop = finder.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


def by_definition(stops, text):
    """Read character by character: the first stop string to be complete, of several the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    "stops,text,expected",
    [
        (["END"], "one END two", ("one ", "END")),
        (["END"], "one EN", ("one EN", None)),
        (["abc", "b"], "xabc", ("xa", "b")),
        (["ab", "xab"], "1xab", ("1", "xab")),
        (["aab"], "aaab", ("a", "aab")),
        (["\n\n"], "a\n\nb", ("a", "\n\n")),
        (["你好"], "说你好", ("说", "你好")),
        ([], "free", ("free", None)),
    ],
)
def test_every_cut_gives_what_the_definition_says(stops, text, expected):
    assert by_definition(stops, text) == expected
    for cut in range(len(text) + 1):
        assert run(stops, [text[:cut], text[cut:]]) == expected
    assert run(stops, list(text)) == expected


def test_pieces_at_the_beginning_may_be_exempt():
    for num, expected in ((0, ("", "ab")), (1, ("abc", "ab")), (2, ("abcab", None)), (9, ("abcab", None))):
        finder = StopFinder(["ab"], num)
        out, stop = "", None
        for piece in ("abc", "ab"):
            text, stop = finder.push(piece)
            out += text
            if stop is not None:
                break
        assert (out + finder.flush(), stop) == expected
    finder = StopFinder(["ab"], 1)
    assert [finder.push("a"), finder.push("b")] == [("a", None), ("b", None)], "none begins in them either"


def test_random_texts_and_cuts_agree_with_the_definition():
    draw = random.Random(5)
    for _ in range(400):
        text = "".join(draw.choices("ab\n", k=draw.randint(0, 14)))
        stops = ["".join(draw.choices("ab\n", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        pieces, rest = [], text
        while rest:
            size = draw.randint(1, 5)
            pieces.append(rest[:size])
            rest = rest[size:]
        before, stop = by_definition(stops, text)
        assert run(stops, pieces) == (before, stop), (stops, pieces)
        assert run(stops, pieces, keeps_match=True) == (before + (stop or ""), stop), (stops, pieces)


def test_only_what_may_still_match_is_held_back():
    finder = StopFinder(["STOP"])
    assert finder.push("a ST") == ("a ", None)
    assert finder.push("A") == ("STA", None)


def test_nothing_is_held_back_where_the_match_is_kept():
    finder = StopFinder(["STOP"], keeps_match=True)
    assert [finder.push(piece) for piece in ("a ST", "O", "P and")] == [("a ST", None), ("O", None), ("P", "STOP")]
