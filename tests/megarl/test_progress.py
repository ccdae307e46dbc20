import io

import pytest

from megarl.progress import Progress


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_at_first_then_per_interval_and_at_last():
    clock, stream = Clock(), io.StringIO()
    with Progress("grpo", 11, rank=0, interval_seconds=10.0, stream=stream, clock=clock) as progress:
        for step in range(1, 12):
            clock.seconds += 4.0
            progress.update(step, {"reward": step / 10, "loss": 0.0})
        assert "grpo 11/11" in stream.getvalue()  # before the phase is left
    assert stream.getvalue().splitlines() == [
        "grpo 1/11  4 s/step  40s left  reward 0.1  loss 0",
        "grpo 4/11  4 s/step  28s left  reward 0.4  loss 0",
        "grpo 7/11  4 s/step  16s left  reward 0.7  loss 0",
        "grpo 10/11  4 s/step  4s left  reward 1  loss 0",
        "grpo 11/11  4 s/step  0s left  reward 1.1  loss 0",
    ]


def test_last_line_appears_though_the_phase_ends_early_or_fails():
    clock, stream = Clock(), io.StringIO()

    def fail_after_two_steps() -> None:
        with Progress("sft", 10, rank=0, stream=stream, clock=clock) as progress:
            for step in (1, 2):
                clock.seconds += 1.0
                progress.update(step, {})
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail_after_two_steps()
    assert stream.getvalue().splitlines() == ["sft 1/10  1 s/step  9s left", "sft 2/10  1 s/step  8s left"]


def test_resumed_steps_do_not_count_for_the_rate():
    clock, stream = Clock(), io.StringIO()
    progress = Progress("grpo", 1000, rank=0, first_step=800, stream=stream, clock=clock)
    clock.seconds += 0.5
    progress.update(810, {})
    assert stream.getvalue() == "grpo 810/1000  20 steps/s  10s left\n"


@pytest.mark.parametrize(
    ("seconds_per_step", "expected"), [(25.0, "41m15s left"), (125.0, "3h26m left"), (0.6, "59s left")]
)
def test_time_left_is_short_and_in_the_largest_units(seconds_per_step: float, expected: str):
    clock, stream = Clock(), io.StringIO()
    progress = Progress("grpo", 100, rank=0, stream=stream, clock=clock)
    clock.seconds += seconds_per_step
    progress.update(1, {})
    assert expected in stream.getvalue()


def test_terminal_gets_one_line_rewritten_in_place_no_wider_than_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    clock, stream = Clock(), Terminal()
    with Progress("grpo", 3, rank=0, stream=stream, clock=clock) as progress:
        for step in (1, 2, 3):
            clock.seconds += 1.0
            progress.update(step, {"reward": 0.123456})
    assert stream.getvalue() == (
        "\rgrpo 1/3  1 s/step  2s left  \x1b[K"
        "\rgrpo 2/3  1 s/step  1s left  \x1b[K"
        "\rgrpo 3/3  1 s/step  0s left  \x1b[K\n"
    )


def test_terminal_is_not_redrawn_faster_than_ten_times_a_second():
    clock, stream = Clock(), Terminal()
    with Progress("grpo", 1001, rank=0, stream=stream, clock=clock) as progress:
        for step in range(1, 1001):
            clock.seconds += 0.001
            progress.update(step, {})
    assert 10 <= stream.getvalue().count("\r") <= 12
    assert "grpo 1000/1001" in stream.getvalue()


def test_other_ranks_write_nothing():
    for stream in (io.StringIO(), Terminal()):
        with Progress("grpo", 2, rank=1, stream=stream, clock=Clock()) as progress:
            progress.update(1, {"reward": 1.0})
            progress.update(2, {"reward": 1.0})
        assert stream.getvalue() == ""


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"first_step must be within 0\.\.10 \(num_steps\), got 11"):
        Progress("grpo", 10, rank=0, first_step=11)
    with pytest.raises(ValueError, match="interval_seconds must be at least 0"):
        Progress("grpo", 10, rank=0, interval_seconds=-1.0)
