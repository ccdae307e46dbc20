import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.__main__ import main
from megarl.run_status import RunStatus

ROOT = Path(__file__).parents[3]
OLD_SECONDS = 3 * 3600 + 7 * 60 + 20


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs: one goes on, one has failed with hostile text, one has a broken status."""
    folder = tmp_path / "runs"
    status = RunStatus(folder / "math", rank=0, name="grpo", num_steps=120)
    status.__enter__()
    status.at_step(17)
    (folder / "math" / "metrics.jsonl").write_text('{"step": 17, "score": 0.123456, "loss": "nan", "lr": 0.1}\n')
    with pytest.raises(ValueError), RunStatus(folder / "evil", rank=0, name="sft", num_steps=5):
        raise ValueError("\x1b[2J\u202eall is well\x07")
    broken = folder / "sub" / "broken"
    broken.mkdir(parents=True)
    (broken / "status.json").write_text('{"state')
    (broken / "metrics.jsonl").write_text('{"step": 3, "response_tokens": 1234.0}\n')
    for path in [*broken.iterdir()]:
        os.utime(path, (path.stat().st_mtime - OLD_SECONDS,) * 2)
    return folder


def test_the_table_is_aligned_and_harmless(runs: Path, capsys: pytest.CaptureFixture[str]):
    main(["runs", str(runs)])
    table = capsys.readouterr().out.splitlines()
    head, evil, math, broken = (" ".join(line.split()) for line in table)
    assert head == "RUN ALGORITHM STATE STEP SCORE LOSS RESPONSE_TOKENS AGE WHY"
    assert re.fullmatch(r"evil sft failed 0/5 - - - \d+s ValueError: \\x1b\[2J\\u202eall is well\\x07", evil)
    assert re.fullmatch(r"math grpo running 17/120 0\.1235 nan - \d+s", math)
    assert broken == "sub/broken - unknown 3 - - 1234 3h07m status.json: is cut off or no JSON"
    words = ("STATE", "failed", "running", "unknown")
    assert {line.index(word) for line, word in zip(table, words, strict=True)} == {len("sub/broken  ALGORITHM  ")}
    ends = {table[row].index(text) + len(text) for row, text in enumerate(("STEP", "0/5", "17/120"))}
    assert ends == {len("sub/broken  ALGORITHM  running  17/120")}


def test_json_has_all_metrics_and_escapes(runs: Path, capsys: pytest.CaptureFixture[str]):
    main(["runs", "--json", str(runs)])
    text = capsys.readouterr().out
    assert text.isascii()
    assert "\x1b" not in text
    evil, math, broken = json.loads(text)
    assert evil["reason"] == "ValueError: \x1b[2J\u202eall is well\x07"
    assert math["run"] == "math"
    assert math["folder"] == str(runs / "math")
    assert (math["state"], math["step"], math["num_steps"]) == ("running", 17, 120)
    assert math["metrics"] == {"step": 17, "score": 0.123456, "loss": "nan", "lr": 0.1}
    assert broken["notes"] == ["status.json: is cut off or no JSON"]
    assert broken["age_seconds"] == pytest.approx(OLD_SECONDS, abs=60)


def test_only_runs_of_some_states(runs: Path, capsys: pytest.CaptureFixture[str]):
    def states(*arguments: str) -> list[str]:
        main(["runs", "--json", str(runs), *arguments])
        return [run["state"] for run in json.loads(capsys.readouterr().out)]

    assert states("--state", "running") == ["running"]
    assert states("--state", "failed", "--state", "unknown") == ["failed", "unknown"]
    assert states("--state", "lost") == []
    os.utime(runs / "math" / "heartbeat", (1000.0, 1000.0))
    assert states("--state", "lost") == ["lost"]
    assert states("--state", "running", "--stale-seconds", "1e11") == ["running"]
    main(["runs", str(runs), "--state", "done"])
    assert capsys.readouterr().out == "no runs\n"


def test_a_run_by_itself_and_long_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(RuntimeError), RunStatus(tmp_path, rank=0, name="grpo", num_steps=1):
        raise RuntimeError("x" * 200)
    main(["runs", str(tmp_path)])
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[1:4] == ["grpo", "failed", "0/1"]
    assert row.endswith("RuntimeError: " + "x" * 55 + "...")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["no such\x1bfolder"], r"error: folder: got 'no such\x1bfolder', allowed: a folder"),
        ([".", "--stale-seconds", "0"], "error: stale_seconds: got 0.0, allowed: above 0"),
        ([".", "--stale-seconds", "nan"], "error: stale_seconds: got nan, allowed: above 0"),
    ],
)
def test_wrong_values_end_with_status_2(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["runs", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err == error + "\n"


def test_names_that_are_no_text_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A folder's name may be any bytes."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff\nn"))
    with RunStatus(folder, rank=0, name="grpo", num_steps=1):
        pass
    main(["runs", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[1].startswith(r"r\udcff\nn  grpo")


def test_it_starts_fast(tmp_path: Path):
    """Neither torch nor NumPy is imported."""
    code = (
        "import sys; from megarl.__main__ import main; main(['runs', sys.argv[1]]);"
        "print(sorted({'torch', 'numpy', 'wandb', 'megatron'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.splitlines() == ["no runs", "[]"]
