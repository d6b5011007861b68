"""Scoring: per-token log-probs of given token ids through the engine, in any layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.config import Config
from moe_rl.config.facts import ModelFacts
from moe_rl.config.problem import raise_all
from moe_rl.config.rules import scoring_problems, weights
from moe_rl.data.sources import read_jsonl
from moe_rl.durable import write_atomic
from moe_rl.errors import UserError
from moe_rl.models.family import get_family, read_facts
from moe_rl.trainer.placement import Cluster, TrainerGroup
from moe_rl.trainer.state import checkpoint_of, read_state, verify
from moe_rl.trainer.worker import Sequences

SHOWN = 10  # wrong lines listed in one message


def score(config: Config, source: str | Path, tokens: str | Path, out: str | Path) -> int:
    """Score the sequences of a file in the layout of `config`; their number. Needs neither tokenizer nor data.

    Args:
        source: a model directory, or a checkpoint of a run (whose architecture `config.model.path` gives).
        tokens: JSONL, ``{"tokens": [ids]}`` a line.
        out: JSONL to write, ``{"logprobs": [floats]}`` for each line in its order: natural log, temperature 1, the first
            token omitted, so that a line of one token gives an empty list.

    Raises:
        UserError: a line, a token id, the output path, the model or the layout is wrong; nothing has started.
        RunFailed: a rank failed, or the checkpoint is damaged.
    """
    raise_all(scoring_problems(config, None))
    facts = read_facts(config.model, config.model.family)
    raise_all(scoring_problems(config, facts))
    checkpoint = None if Path(source).resolve() == Path(config.model.path).resolve() else checkpoint_of(Path(source))
    if checkpoint:
        read_state(checkpoint)
        verify(checkpoint)
    else:
        raise_all([*weights(config, facts)])
        get_family(facts.family).check_weights(config.model)
    sequences = read_tokens(Path(tokens), facts.vocab_size, facts.max_positions)
    out = _writable(Path(out).absolute())

    rows = _run(config, facts, sequences, checkpoint)
    lines = (json.dumps({"logprobs": [float(x) for x in rows[i][0]]}) + "\n" for i in range(len(sequences)))
    write_atomic(out, "".join(lines))
    return len(sequences)


def _run(
    config: Config, facts: ModelFacts, sequences: list[np.ndarray], checkpoint: Path | None
) -> dict[int, tuple[Any, Any]]:
    """Log-probs float32 [L-1] of each sequence by its index, from a cluster of trainer ranks alone."""
    config = replace(config, rollout=replace(config.rollout, replicas=0))
    logs = Path(tempfile.mkdtemp(prefix="moe_rl_score_"))
    with Cluster(config, logs) as cluster:
        # a checkpoint brings its own weights: the model directory need not have any
        trainer = TrainerGroup(cluster, facts, train=False, random_init=checkpoint is not None)
        trainer.start()
        if checkpoint:
            trainer.load(checkpoint, ["model"])
        cuts = trainer.cuts([len(s) for s in sequences])
        rows = trainer.log_probs(Sequences(sequences, {}), cuts, temperature=1.0)
    shutil.rmtree(logs)  # after a failure they stay: its message names them
    return rows


def read_tokens(path: Path, vocab_size: int, max_positions: int) -> list[np.ndarray]:
    """The sequences of a token file, int32 [L] each; blank lines are passed over.

    Raises:
        UserError: lines that are no ``{"tokens": [...]}`` or hold what is no token id, each with file and line.
    """
    sequences, problems = [], []
    for row in read_jsonl(path, "--tokens"):
        problem = row.problem or _problem(row.fields, vocab_size, max_positions)
        if problem:
            problems.append(f"{row.where}: {problem}")
        else:
            sequences.append(np.array(row.fields["tokens"], np.int32))
    if problems or not sequences:
        shown = problems[:SHOWN] + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])
        what = f"{len(problems)} line(s) cannot be scored" if problems else f"{path} holds no sequence"
        raise UserError("score.tokens", what, "\n       ".join(shown), 'Give one {"tokens": [1, 2, 3]} a line.')
    return sequences


def _problem(fields: Mapping[str, Any], vocab_size: int, max_positions: int) -> str:
    ids = fields.get("tokens")
    if not isinstance(ids, list) or not ids:
        return "has no list of one or more token ids under tokens"
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if wrong:
        return f"{json.dumps(wrong[0])} is no token id; they go from 0 to {vocab_size - 1}"
    if len(ids) > max_positions:
        return f"{len(ids)} tokens, but the model has {max_positions} positions"
    return ""


def _writable(out: Path) -> Path:
    """`out`, after a proof that a file can be written there."""
    try:
        if out.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(
            "score.out",
            f"--out {out} cannot be written",
            str(error.strerror),
            "Give a file in a directory that exists.",
        ) from None
    return out
