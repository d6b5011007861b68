"""Everything a run reads before it starts, checked in the order that gives the most telling message. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.config import Config, ModelFacts, preflight
from moe_rl.config.rules import model_directory
from moe_rl.data import Record, check_batch, check_overlap, load
from moe_rl.data.tokenizer import Tokenizer, load_tokenizer
from moe_rl.errors import UserError
from moe_rl.models.family import get_family, read_facts, special_ids
from moe_rl.rewards import describe as describe_verifier
from moe_rl.trainer.state import is_foreign

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """What the configuration names, read. `arch` holds the model's sizes (the family's own type)."""

    facts: ModelFacts
    arch: Any
    tokenizer: Tokenizer
    records: list[Record]
    validation: list[Record]


def read_inputs(
    config: Config,
    run_dir: Path,
    *,
    reward: Callable[..., Any] | None = None,
    dataset: Rows | None = None,
    validation: Rows | str | None = None,
    resume: str = "auto",
) -> Inputs:
    """Rules, model files, verifier, data: in this order, all checked, nothing started or written.

    Args:
        run_dir: where the run would write; its disk is looked at.
        reward, dataset, validation: given in place of `reward.name`, `data.train` and `data.validation`.
        resume: as for :class:`moe_rl.trainer.api.GRPOTrainer`; whether the checkpoint is one of this run's own is looked at.

    Raises:
        UserError: anything in them is wrong.
    """
    own_data = dataset is not None
    given: dict[str, Any] = {"own_data": own_data, "foreign_checkpoint": is_foreign(resume, run_dir)}
    if any(model_directory(config)):  # the model's facts can be read only where model.path is right
        preflight(config, run_dir=run_dir, **given)
    facts = read_facts(config.model, config.model.family)
    preflight(config, facts, run_dir=run_dir, **given)
    family = get_family(facts.family)
    family.check_weights(config.model)
    ends, _ = special_ids(config.model, facts.vocab_size)
    describe_verifier(reward or config.reward.name, config.reward.args, config.rollout.max_response)
    chat = (config.data.chat_template, config.data.enable_thinking)
    tokenizer = load_tokenizer(config.model.path, *chat, config.model.config)
    records = load(config.data.train if dataset is None else dataset, config.data, tokenizer, "data.train")
    _check_end(config, tokenizer, ends)
    check_batch(records, config.data.prompts_per_step)
    # a shipped recipe's validation set belongs to the recipe's own task
    if validation is None and not (own_data and config.origin("data.validation").startswith("recipe ")):
        validation = config.data.validation
    held_out = load(validation, config.data, tokenizer, "data.validation") if validation else []
    check_overlap(records, held_out)
    return Inputs(facts, family.read_arch(config.model), tokenizer, records, held_out)


def _check_end(config: Config, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
    """Raise UserError where a chat's answers would run on behind the token that ends them."""
    if config.data.chat_template != "none" and tokenizer.eos_id is not None and tokenizer.eos_id not in ends:
        raise UserError(
            "data.stop_token",
            f"an answer of a chat ends with token {tokenizer.eos_id}, which does not end a completion: the eos_token_id of"
            f" {config.model.path} is {list(ends)} (data.chat_template from {config.origin('data.chat_template')})",
            "Every completion would run to rollout.max_response.",
            f"add {tokenizer.eos_id} to eos_token_id in generation_config.json",
        )
