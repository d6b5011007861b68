"""`moe-rl doctor`: its words and options stand in any order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from moe_rl import doctor
from moe_rl.cli import run
from moe_rl.config import Config
from moe_rl.config.load import split_words

WORDS = ("dsv4-pro", "cluster.nodes=32", "--hw=gb200", "--json")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that reach the examination, which takes seconds and patches the process."""
    seen: list[Config] = []

    def examine(config: Config) -> dict:
        seen.append(config)
        return {"profile": config.profile}

    monkeypatch.setattr(doctor, "examine", examine)
    return seen


@pytest.mark.parametrize("words", itertools.permutations(WORDS), ids=" ".join)
def test_every_order_says_the_same(words: tuple[str, ...], examined: list[Config], capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", *words]) == 0
    (config,) = examined
    assert (config.recipe, config.profile, config.cluster.nodes) == ("dsv4-pro", "gb200", 32)
    assert json.loads(capsys.readouterr().out) == {"profile": "gb200"}


@pytest.mark.parametrize("words", itertools.permutations(("dsv4-tiny", "rollout.replicas=2", "--refit")), ids=" ".join)
def test_a_refit_takes_its_recipe_from_anywhere(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    import moe_rl.trainer.refit as module

    class Done(Exception):
        pass

    def refit(config: Config) -> None:
        assert (config.recipe, config.rollout.replicas) == ("dsv4-tiny", 2)
        raise Done

    monkeypatch.setattr(module, "refit", refit)
    with pytest.raises(Done):
        from moe_rl.cli import app

        app(args=["doctor", *words], standalone_mode=False)


@pytest.mark.parametrize(
    "words, rule",
    [
        (["dsv4-tiny", "dsv4-pro"], "config.override"),  # one recipe
        (["layout.pp"], "config.override"),  # a key without its value is no recipe
        (["--json", "dsv4-tinny"], "config.recipe"),
        (["--refit"], "doctor.recipe"),
    ],
)
def test_words_that_say_nothing(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", *words]) == 2
    assert f"[{rule}]" in capsys.readouterr().err


def test_a_file_with_an_equals_sign_is_a_recipe(tmp_path: Path):
    file = tmp_path / "lr=1.yaml"
    file.write_text("layout: {pp: 1}\n")
    assert split_words(["layout.pp=2", str(file)]) == (str(file), ["layout.pp=2"])
