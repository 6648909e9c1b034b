from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror_sd.api.stop_strings import StopStrings


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: cut before the longest stop among those that end first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


few_letters = st.text(alphabet="ab\n你", max_size=12)
stop_lists = st.lists(
    st.text(alphabet="ab\n你", min_size=1, max_size=5), min_size=1, max_size=4, unique=True
)


@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists)
def test_the_text_is_cut_where_the_definition_says(pieces: list[str], stops: list[str]) -> None:
    checker = StopStrings(stops)
    delivered = ""
    for piece in pieces:
        delivered += checker.feed(piece)
        if checker.is_stopped:
            break
    else:
        delivered += checker.finish()
    assert (delivered, checker.is_stopped) == first_stop("".join(pieces), stops)


@given(pieces=st.lists(few_letters, max_size=12), stops=stop_lists)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop(
    pieces: list[str], stops: list[str]
) -> None:
    checker = StopStrings(stops)
    seen = delivered = ""
    for piece in pieces:
        seen += piece
        delivered += checker.feed(piece)
        if checker.is_stopped:
            return
        proper = [stop[:length] for stop in stops for length in range(len(stop))]
        longest = max(len(prefix) for prefix in proper if seen.endswith(prefix))
        assert len(seen) - len(delivered) == longest
    assert delivered + checker.finish() == seen


def test_a_stop_may_straddle_pieces() -> None:
    checker = StopStrings(["END"])
    assert [checker.feed(piece) for piece in ("ok E", "N", "E", "ND")] == ["ok ", "", "EN", ""]
    assert checker.is_stopped


def test_without_stops_text_passes_unchanged() -> None:
    checker = StopStrings([])
    assert checker.feed("anything") == "anything" and checker.finish() == ""


@pytest.mark.timeout(20)
def test_a_long_stop_that_nearly_matches_costs_linear_time() -> None:
    checker = StopStrings(["a" * 100_000 + "b"])
    assert sum(len(checker.feed("a")) for _ in range(150_000)) == 50_000
