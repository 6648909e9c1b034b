"""What `bench overlap` makes of the moments that it noted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from mirror_sd.bench import overlap as bench
from mirror_sd.bench.overlap import OVERLAPPED, PLAIN, SERIAL, Run, Way
from mirror_sd.bench.overlap_timeline import Timeline, covered_share, draw, overlap
from mirror_sd.drafting.frames import Line, Proposal
from mirror_sd.errors import ConfigError


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([], [], 0.0),
        ([(0, 4)], [], 0.0),
        ([(0, 4)], [(1, 2), (3, 9)], 2.0),
        ([(0, 2), (3, 5)], [(1, 4)], 2.0),
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)], 2.0),
        ([(5, 6)], [(0, 1), (2, 3), (5.5, 7)], 0.5),
        ([(0, 10), (10, 20)], [(9, 11), (19, 30)], 3.0),
    ],
)
def test_what_two_rows_of_spans_share(one, other, shared):
    assert overlap(one, other) == pytest.approx(shared)
    assert overlap(other, one) == pytest.approx(shared)


def proposal(base, *lines):
    return Proposal(1, base, tuple(lines), 0.0, 0.0)


def line(tokens, times, at=0):
    return Line(at, tuple(tokens), bytes(len(tokens)), tuple(times))


def test_drafting_is_useful_where_it_gave_a_token_of_the_answer_before_it_was_known():
    timeline = Timeline(verifies=[(0.0, 10.0)])
    timeline.note(proposal(2, line([7, 8], [(1, 2), (2, 3)]), line([9], [(3, 4)], at=1)))
    timeline.note(proposal(3, line([8, 5], [(2, 3), (6, 7)])))
    timeline.close([1, 2, 7, 9, 5], [0.0, 0.0, 5.0, 5.0, 6.5])
    assert timeline.useful == {(1, 2), (3, 4)}
    assert timeline.other == {(2, 3), (6, 7)}
    assert covered_share([timeline]) == pytest.approx(0.2)


def test_figures_take_the_best_serial_length_and_the_median_round():
    def run(tok_s, answer=(1, 2)):
        return Run(tokens=10, seconds=10 / tok_s, answers=[answer], drafted=8, accepted=6, rounds=2)

    runs = {
        Way(PLAIN): [run(10), run(12), run(11)],
        Way(SERIAL, 2): [run(14)],
        Way(SERIAL, 4): [run(16)],
        Way(OVERLAPPED): [run(22)],
    }
    timeline = Timeline(verifies=[(0.0, 0.1)], useful={(0.05, 0.2)})
    figures = bench._figures(runs, [timeline])
    assert figures["plain_tok_s"] == 11.0 and figures["serial_tok_s"] == 16.0
    assert figures["overlapped_tok_s"] == 22.0 and figures["serial_length"] == 4
    assert figures["over_plain"] == 2.0 and figures["covered_share"] == 0.5
    assert figures["identical_to_plain"] and figures["accepted_per_verify"] == 3.0
    runs[Way(SERIAL, 2)] = [run(14, answer=(1, 3))]
    assert not bench._figures(runs, [timeline])["identical_to_plain"]
    page = Path(__file__).resolve().parents[3] / "docs/benchmarks.md"
    text = page.read_text(encoding="utf-8")
    assert [key for key in figures if f"`{key}`" not in text] == []


def test_the_picture_is_a_png(tmp_path):
    timeline = Timeline(verifies=[(0.0, 0.3)], useful={(0.1, 0.2)}, other={(0.2, 0.3)})
    draw(timeline, tmp_path / "a.png", title="t")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_length_above_the_longest_draft_is_refused():
    with pytest.raises(typer.BadParameter, match=r"20 is above speculation.max_tokens, 16"):
        bench.command(lengths="6,20", target_core=min(os.sched_getaffinity(0)))


def test_cores_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="core 999 is not usable"):
        bench.settings(999, 0, None)


def test_a_picture_without_a_folder_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(typer.BadParameter, match="there is no folder"):
        bench.command(plot=tmp_path / "none" / "a.png", target_core=4096)


def test_lengths_that_are_no_numbers_are_refused_before_anything_is_loaded():
    with pytest.raises(typer.BadParameter, match="positive numbers"):
        bench.command(lengths="6,none", target_core=4096)
