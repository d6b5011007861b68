"""Records of a run: whole lines only, cut back on resume, and a report that survives what a kill leaves."""

from __future__ import annotations

import base64
import errno
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from moe_rl.errors import RunFailed, UserError
from moe_rl.grpo.mismatch import KEYS
from moe_rl.observe.curves import PANELS, draw, series
from moe_rl.observe.metrics import MetricsWriter, read_jsonl, read_metrics
from moe_rl.observe.progress import Progress, clock
from moe_rl.observe.report import build


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestMetrics:
    def test_lines(self, tmp_path):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(1, {"a": 0.5, "b": np.float32(2), "c": torch.tensor(3), "text": "x", "none": None})
            writer.write(4, {"step": 4, "a": 1})
            # on disk before the writer is closed
            assert rows_of(tmp_path / "metrics.jsonl") == [
                {"step": 1, "a": 0.5, "b": 2, "c": 3, "text": "x", "none": None},
                {"step": 4, "a": 1},
            ]
            with pytest.raises(ValueError, match="step 4 is not after 4"):
                writer.write(4, {})

    def test_numbers_that_are_not_finite_are_valid_json_and_named(self, tmp_path):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(1, {"loss": math.nan, "norm": np.float64("inf"), "ok": 1})
            writer.write_samples(1, [{"logprobs": [0.5, -math.inf], "reward": math.nan}])

        def refuse(name: str):
            raise AssertionError(name)

        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line, parse_constant=refuse) == {
            "step": 1, "loss": None, "norm": None, "ok": 1, "nonfinite": ["loss", "norm"],
        }  # fmt: skip
        assert rows_of(tmp_path / "samples.jsonl") == [{"step": 1, "logprobs": [0.5, None], "reward": None}]

    def test_resume_cuts_both_files_back_and_puts_a_lost_line_in(self, tmp_path):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            for step in range(1, 6):
                writer.write_samples(step, [{"k": 0}, {"k": 1}])
                writer.write(step, {"a": step})
        for name in ("metrics.jsonl", "samples.jsonl"):
            with (tmp_path / name).open("a") as file:
                file.write('{"step": 6, "a')
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.resume(3, {"a": 3})
            assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]
            assert [r["step"] for r in rows_of(tmp_path / "samples.jsonl")] == [1, 1, 2, 2, 3, 3]
            writer.write(4, {"a": "again"})
            assert read_metrics(tmp_path)[-1] == {"step": 4, "a": "again"}
        # killed after the checkpoint of step 5 and before its line: the line comes from the checkpoint
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.resume(5, {"step": 5, "a": "kept"})
        assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.resume(0, {})
        assert read_metrics(tmp_path) == [] and not list(tmp_path.glob(".*"))

    def test_a_half_written_line_is_dropped_before_appending(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(2, {})
        assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]

    def test_read_jsonl_names_damaged_lines(self, tmp_path):
        (tmp_path / "a.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n\n{"step": 2}\n{"st')
        got = read_jsonl(tmp_path / "a.jsonl")
        assert got.rows == [{"step": 1}, {"step": 2}] and got.damaged == [2, 3, 6]
        assert read_jsonl(tmp_path / "none.jsonl") == ([], [])

    def test_a_full_disk_leaves_whole_lines(self, tmp_path):
        """A file-size limit stands in for the disk: the kernel writes a part of the line, then refuses."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(1, {"a": 1})
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
                with pytest.raises(RunFailed) as e:
                    writer.write(2, {"text": "x" * 100})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                signal.signal(signal.SIGXFSZ, previous)
            assert e.value.rule == "observe.write" and os.strerror(errno.EFBIG) in e.value.what
            writer.write(2, {"a": 2})
        assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]

    def test_tensorboard(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with MetricsWriter(tmp_path) as writer:
            for step in (1, 2, 3):
                writer.write(step, {"reward/mean": step / 2, "note": "text", "lost": math.nan})
        with MetricsWriter(tmp_path) as writer:
            writer.resume(1)
            writer.write(2, {"reward/mean": 9.0})
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 9.0)]
        assert "note" not in events.Tags()["scalars"]

    def test_tensorboard_missing(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match="not installed"):
            MetricsWriter(tmp_path)
        MetricsWriter(tmp_path, tensorboard=False).close()

    def test_importing_costs_no_torch(self):
        code = "import sys, moe_rl.observe.metrics, moe_rl.observe.progress; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def write_run(run: Path, steps: int = 25) -> None:
    with MetricsWriter(run, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            line = {key: 0.1 + step / 100 for panel in PANELS for key in panel.keys if not key.startswith("eval")}
            line |= {"attempt": 1 + (step > 12), "time/step": 2.0, "time/rollout": 1.5, "time/update": 0.5}
            line |= {"time/wall": 2.0 * step, "eval/accuracy": step / 100} if step % 5 == 0 else {}
            writer.write(step, line)
        writer.write_samples(steps, [{"prompt": "<b>1+1</b>", "response": "2", "answer": "2", "reward": 1.0}])
    (run / "config.resolved.yaml").write_text("layout:\n  pp: 2  # <command line>\n")
    (run / "manifest.json").write_text(json.dumps({"versions": {"torch": "2.13"}, "reshard": ["a", "b"]}))


class TestReport:
    def test_page(self, tmp_path):
        write_run(tmp_path)
        path = build(tmp_path)
        page = path.read_text()
        assert path == tmp_path / "report.html"
        # accuracy runs from 0.11 to 0.35 by 0.01: first ten 0.155, last ten 0.305
        assert "0.155 → 0.305 (+0.15)" in page
        assert "0.05 (step 5) → 0.25 (step 25)" in page
        assert "<td>rollout</td><td class=n>1.50</td><td class=n>75.0%</td>" in page
        assert "&lt;b&gt;1+1&lt;/b&gt;" in page and "pp: 2  # &lt;command line&gt;" in page
        assert "<td>versions.torch</td>" in page and "a<br>b" in page
        images = {p.stem: p.read_bytes() for p in (tmp_path / "report").glob("*.png")}
        assert set(images) == {p.name for p in PANELS} | {"time"}
        inlined = {base64.b64decode(m) for m in re.findall(r'src="data:image/png;base64,([^"]+)"', page)}
        assert inlined == set(images.values()) and all(i.startswith(b"\x89PNG") for i in inlined)
        assert not re.search(r'(src|href)=(?!"data:)', page)  # nothing is fetched from elsewhere

    def test_what_a_kill_leaves(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text(
            '{"step": 1, "reward/mean": null}\n{"step": 2, "reward/mean": 0.5}\n{"ste'
        )
        (tmp_path / "manifest.json").write_text("{")
        (tmp_path / "samples.jsonl").write_text('{"st')
        page = build(tmp_path).read_text()
        assert "1 damaged lines of metrics.jsonl were left out: [3]" in page
        assert "left no manifest.json" in page and "left no config.resolved.yaml" in page
        assert [p.name for p in (tmp_path / "report").iterdir()] == ["reward.png"]

    def test_no_run(self, tmp_path):
        for directory, message in ((tmp_path / "none", "is not there"), (tmp_path, "no run's directory")):
            with pytest.raises(UserError, match=message):
                build(directory)
        (tmp_path / "metrics.jsonl").write_text("")
        with pytest.raises(UserError, match="holds no step"):
            build(tmp_path)

    def test_series_and_long_runs(self):
        rows = [{"step": s, "a": v} for s, v in enumerate((1, None, math.nan, "x", 2.5))]
        assert series(rows, "a") == ([0, 4], [1.0, 2.5])
        images = draw([{"step": s, "actor/grad_norm": 0.0, "time/rollout": 1.0} for s in range(300)])
        assert set(images) == {"grad_norm", "time"}


class TestProgress:
    def output(self, terminal: bool) -> str:
        console = Console(file=io.StringIO(), force_terminal=terminal, width=150, force_interactive=terminal)
        with Progress(50, 10, console) as progress:
            progress.phase("start")
            progress.phase("rollout")
            progress.slowest("rollout", {"replica 0": 1.0, "replica 1": 1.25})
            progress.phase("update")
            progress.slowest("update", {"rank 0": 4.0, "rank 1": 4.1})
            assert progress.seconds_left() is None
            progress.step(
                {"step": 11, "reward/accuracy": 0.25, "eval/accuracy": 0.5, "time/step": 6.0, "time/update": 4.1}
            )
            assert progress.seconds_left() == 39 * 6
            progress.phase("rollout")
        return console.file.getvalue()

    def test_plain(self):
        start, line = self.output(False).splitlines()
        assert start == "starting the workers" and "\x1b" not in line
        assert line == (
            "step 11/50  accuracy 0.250  eval 0.500  6.0 s (update 4.1)  "
            "slowest replica 1 in rollout 1.2 s (+0.2)  3:54 left"
        )

    def test_terminal(self):
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output(True))
        for part in ("step 12/50", "rollout 0 s", "3:54 left", "accuracy 0.250", "6.0 s (update 4.1)"):
            assert part in text

    def test_time_left_is_a_mean_of_recent_steps(self):
        progress = Progress(100, 0, Console(file=io.StringIO()))
        for step in range(1, 31):
            progress.step({"step": step, "time/step": 100.0 if step == 1 else 2.0})
        assert progress.seconds_left() == 140

    def test_clock(self):
        assert [clock(s) for s in (0, 59.4, 59.6, 185, 7385)] == ["0 s", "59 s", "1:00", "3:05", "2:03:05"]


def test_every_key_that_is_drawn_or_shown_is_documented():
    from moe_rl.observe.curves import TIMES
    from moe_rl.observe.progress import PHASES, SHOWN

    defined = set(re.findall(r"`([a-z]+/[a-z0-9_]+)`", (Path(__file__).parent.parent / "docs/metrics.md").read_text()))
    used = {key for panel in PANELS for key in panel.keys} | {key for key, _, _ in SHOWN}
    used |= {f"time/{name}" for name in (*TIMES, *PHASES)} | set(KEYS)
    assert used <= defined
