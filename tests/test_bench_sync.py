"""`moe-rl bench sync`: what is sent, and that its parts are measured."""

from __future__ import annotations

import json

from moe_rl.cli import run


def test_receivers_of_a_share_get_that_share_and_the_others_all(tmp_path, capsys):
    out = tmp_path / "sync.json"
    assert run(["bench", "sync", "dsv4-tiny", "--out", str(out), "engine.device=cpu"]) == 0
    found = json.loads(out.read_text())
    rows = {(row["share"], row["way"]): row for row in found["rows"]}
    assert {share for share, _ in rows} == {1, 8}  # the tiny model has too few experts for 64 parts
    for (share, way), row in rows.items():
        assert row["bytes"] == (row["bytes_held"] if way == "ours" else rows[1, "ours"]["bytes"])
        assert row["seconds"] == sum(row[part] for part in ("encode_s", "transfer_s", "repack_s"))
        assert min(row["encode_s"], row["transfer_s"], row["repack_s"], row["path_gbps"]) > 0, (share, way)
    assert rows[8, "ours"]["bytes"] < rows[1, "ours"]["bytes"]
    assert "transfer_over_path" in capsys.readouterr().out and found["versions"]["torch"]


def test_bad_sizes_and_models_are_refused(capsys):
    assert run(["bench", "sync", "dsv4-tiny", "--experts", "0"]) == 2
    assert run(["bench", "sync", "qwen3-moe-tiny"]) == 2
    assert "not quantised" in capsys.readouterr().err
