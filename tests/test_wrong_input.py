"""Wrong input: each case ends in one message, exit code and rule; the table of docs/wrong_input.md is written from here.

`python -m tests.test_wrong_input` rewrites the table between its markers.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moe_rl.cli import run
from moe_rl.config import host
from moe_rl.models.family import get_family
from moe_rl.trainer.state import RunDirectory
from tests import small_qwen
from tests.small_v4 import model_config

DOC = Path(__file__).parent.parent / "docs" / "wrong_input.md"
BEGIN, END = "<!-- written by tests/test_wrong_input.py -->", "<!-- end -->"
VOCAB = 260
RECIPE = """\
model: {path: model}
layout: {pp: 2, ep: 2}
cluster: {gpus_per_node: 4}
data: {train: train.jsonl, validation: validation.jsonl}
"""

Edit = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """`edit` breaks a good directory; `arguments` follow `moe-rl train mine.yaml --dry-run`, or are a whole command."""

    wrong: str
    rule: str
    arguments: str = ""
    edit: Edit | None = None
    says: str = ""


def write_good(work: Path) -> None:
    """A recipe, a model directory with weights of the right shapes and a byte tokenizer, and two data files."""
    model = work / "model"
    model.mkdir(parents=True)
    (work / "mine.yaml").write_text(RECIPE)
    (model / "config.json").write_text(json.dumps(model_config(vocab_size=VOCAB)))
    write_weights(model)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    for name, start in (("train", 0), ("validation", 50)):
        rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(start, start + 40)]
        (work / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def write_weights(model: Path) -> None:
    family = get_family("deepseek_v4")
    dtypes = {"fp32": np.float32, "bf16": np.float32, "int32": np.int32, "int64": np.int64}
    expected = family.weight_table(family.read_arch(model)).expected()
    save_file({n: np.zeros(s.shape, dtypes[s.dtype]) for n, s in expected.items()}, model / "model.safetensors")


def rewrite_json(name: str, **changes: object) -> Edit:
    def edit(work: Path) -> None:
        file = work / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def as_qwen(kind: str, **changes: object) -> Edit:
    """Make the model a Qwen of that kind (its weights stay: what is wrong shows before they are looked at)."""
    config = small_qwen.model_config(kind, **({"vocab_size": VOCAB} | changes))
    return write("model/config.json", json.dumps(config))


def rewrite_weights(change: Callable[[dict[str, np.ndarray]], object]) -> Edit:
    def edit(work: Path) -> None:
        file = work / "model" / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


def truncate(work: Path) -> None:
    file = work / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def write(name: str, text: str) -> Edit:
    return lambda work: (work / name).write_text(text)


def a_run(work: Path) -> None:
    RunDirectory(work / "run").create()
    (work / "run" / "config.resolved.yaml").write_text(RECIPE)


def remove(name: str) -> Edit:
    return lambda work: (work / name).unlink()


def append(name: str, text: str) -> Edit:
    def edit(work: Path) -> None:
        with (work / name).open("a") as file:
            file.write(text)

    return edit


CASES = [
    # the configuration
    Case("unknown key", "config.unknown_key", "layout.ppp=2", says="nearest: layout.pp"),
    Case("wrong type", "config.type", "layout.pp=two", says="not of type int"),
    Case("value not in the list", "config.choice", "engine.dtype=fp8"),
    Case("learning rate not positive", "config.range", "optimizer.lr=0"),
    Case("more nodes than anyone has", "config.range", "cluster.nodes=1000000000"),
    Case("temperature zero in training", "config.range", "rollout.temperature=0"),
    Case("an override without =", "config.override", "layout.pp"),
    Case("a section given a value", "config.section", "layout=2"),
    Case("several at once", "config.several", "layout.ppp=2 optimizer.lr=fast"),
    Case("unknown recipe", "config.recipe", "train dsv4-tinny", says="nearest: dsv4-tiny"),
    Case("unknown profile", "config.profile", "--hw cpus", says="nearest: cpu"),
    Case("a --file that is not there", "config.file", "--file more.yaml"),
    Case("a recipe that is not YAML", "config.yaml", edit=write("mine.yaml", "layout: [2\n")),
    Case("a recipe with a YAML tag", "config.yaml", edit=write("mine.yaml", "model: {path: !!python/tuple [a]}\n")),
    Case("a key given twice in a file", "config.duplicate", edit=append("mine.yaml", "model: {path: other}\n")),
    Case("explain of an unknown key", "config.unknown_key", "explain optimizer.learning_rate"),
    # the layout
    Case("ranks do not divide by tp * pp", "layout.world", "layout.pp=3"),
    Case("ranks do not divide by pp * ep", "layout.ep", "layout.ep=4"),
    Case("ep does not divide the experts", "layout.experts", "layout.ep=3 cluster.gpus_per_node=6"),
    Case("tensor parallelism for a family without it", "layout.tp", "layout.tp=2"),
    Case(
        "tp does not divide the key-value heads",
        "layout.heads",
        "layout.tp=4 layout.pp=1 layout.ep=1",
        edit=as_qwen("qwen3"),
    ),
    Case(
        "tp does not divide a feed-forward layer",
        "layout.columns",
        "layout.tp=2 layout.ep=1",
        edit=as_qwen("qwen2", intermediate_size=49),
    ),
    Case(
        "tp with fewer token ids than ranks",
        "layout.vocabulary",
        "layout.tp=2 layout.ep=1",
        edit=as_qwen("qwen2", vocab_size=1),
    ),
    Case(
        "rounding for a family that is released unrounded",
        "engine.fake_quant",
        "engine.fake_quant=all layout.ep=1",
        edit=as_qwen("qwen3"),
    ),
    Case(
        "router replay without experts",
        "rollout.router_replay",
        "rollout.router_replay=R3 layout.ep=1",
        edit=as_qwen("qwen3"),
    ),
    Case("etp for a model without experts", "layout.experts", "layout.etp=2 layout.ep=1", edit=as_qwen("qwen2")),
    Case("etp other than tp on a CPU", "layout.etp", "layout.etp=2 layout.ep=1", edit=as_qwen("qwen3_moe")),
    Case("more stages than layers", "layout.too_many_stages", "layout.pp=8 layout.ep=1 cluster.gpus_per_node=8"),
    Case("virtual stages without a pipeline", "layout.vpp", "layout.pp=1 layout.vpp=2"),
    Case("stages that are not pp * vpp", "layout.segments", "layout.stages=Ettt|t|tL"),
    Case("stages with another number of layers", "layout.layers", "layout.stages=Ettt|tL"),
    Case("stages without the loss at the end", "layout.ends", "layout.stages=EttL|ttt"),
    Case("a stage without a layer", "layout.empty_stage", "layout.stages=Ettttt|L"),
    Case("an unknown sign in the stages", "layout.stages", "layout.stages=Ettt|xxL"),
    Case("a hash layer outside stage 0", "layout.hash_layers", "layout.stages=Et|ttttL"),
    # the model
    Case("model.path that is not there", "model.path", "model.path=nowhere"),
    Case("model.path that is a file", "model.path", "model.path=mine.yaml"),
    Case("a run's directory as a model", "model.path", "model.path=run", edit=a_run),
    Case("no config.json", "model.config", edit=remove("model/config.json")),
    Case("config.json that is not JSON", "model.config", edit=write("model/config.json", "{")),
    Case("config.json with text for a size", "model.config", edit=rewrite_json("model/config.json", hidden_size="32")),
    Case("config.json with a factor of zero", "model.config", edit=rewrite_json("model/config.json", rope_theta=0)),
    Case("a Qwen with a sliding window", "model.config", edit=as_qwen("qwen2", use_sliding_window=True)),
    Case(
        "a figure that config.json does not have",
        "model.config",
        "model.config.o_grops=4",
        says="nearest: model.config.o_groups",
    ),
    Case("a figure of another type", "model.config", "model.config.o_groups=many"),
    Case("an end token that is none", "model.special_ids", edit=rewrite_json("model/config.json", eos_token_id=9999)),
    Case("generation_config.json not JSON", "model.config", edit=write("model/generation_config.json", "{")),
    Case("a model type of no known family", "model.family", edit=rewrite_json("model/config.json", model_type="gpt2")),
    Case("an unknown family", "model.family", "model.family=gpt2"),
    Case("no weights", "model.weights", edit=remove("model/model.safetensors")),
    Case("truncated weights", "model.weights", edit=truncate),
    Case("a missing tensor", "model.weights", edit=rewrite_weights(lambda t: t.pop("head.weight"))),
    Case("a tensor too many", "model.weights", edit=rewrite_weights(lambda t: t.update(mine=np.zeros(3, np.float32)))),
    Case(
        "a tensor of another shape",
        "model.weights",
        edit=rewrite_weights(lambda t: t.update({"norm.weight": np.zeros(3, np.float32)})),
    ),
    Case("no tokenizer", "model.tokenizer", edit=remove("model/tokenizer.json")),
    Case("a tokenizer that is not JSON", "model.tokenizer", edit=write("model/tokenizer.json", "{")),
    Case(
        "a tokenizer with more ids than the model",
        "model.vocabulary",
        edit=lambda work: (rewrite_json("model/config.json", vocab_size=256)(work), write_weights(work / "model")),
    ),
    # the data and the reward
    Case("no training data", "data.train", "data.train="),
    Case("a data file that is not there", "data.path", "data.train=nowhere.jsonl"),
    Case("a data file of an unknown kind", "data.format", "data.train=mine.yaml"),
    Case("empty data", "data.empty", edit=write("train.jsonl", "")),
    Case("fewer prompts than a step takes", "data.batch", "data.prompts_per_step=41"),
    Case(
        "a line that is not JSON", "data.record", edit=append("train.jsonl", "{question: 1}\n"), says="train.jsonl:41"
    ),
    Case("a record without an answer", "data.record", edit=append("train.jsonl", '{"question": "2"}\n')),
    Case("a column that is not there", "data.record", "data.prompt_key=problem"),
    Case("a prompt that is too long", "data.record", "data.max_prompt=6"),
    Case("validation prompts that are trained on", "data.overlap", "data.validation=train.jsonl"),
    Case("validation without data", "data.validation", "data.validation="),
    Case("a template without the question", "data.template", "data.template=hello"),
    Case(
        "a chat template that raises",
        "data.chat_template",
        "data.chat_template=tokenizer",
        edit=rewrite_json("model/tokenizer_config.json", chat_template="{{ 1 / 0 }}"),
    ),
    Case("a chat format that the tokenizer does not have", "data.chat_template", "data.chat_template=auto"),
    Case(
        "a chat whose end does not end a completion",
        "data.stop_token",
        "data.chat_template=auto",
        edit=rewrite_json("model/tokenizer_config.json", chat_template="{{ messages[0].content }}"),
    ),
    Case("an unknown verifier", "reward.name", "reward.name=last_numbr", says="last_number"),
    Case("an argument the verifier does not have", "reward.args", "reward.args.buffer=3"),
    # the batch and the algorithm
    Case("a group of one", "rollout.group", "rollout.n=1"),
    Case("a batch that does not divide", "algorithm.minibatches", "algorithm.minibatches=3"),
    Case("a response beyond the model's positions", "rollout.positions", "rollout.max_response=200"),
    Case("a micro-batch shorter than a sequence", "engine.token_budget", "engine.max_tokens_per_micro_batch=64"),
    Case("nucleus sampling in training", "rollout.top_p", "rollout.top_p=0.9"),
    Case("top-k sampling in training", "rollout.top_k", "rollout.top_k=50"),
    Case("more replicas than prompts", "rollout.replicas", "rollout.replicas=17"),
    Case("ranks of a replica that is one process", "rollout.layout", "rollout.dp=2"),
    Case("one beta", "optimizer.betas", "optimizer.betas=[0.9]"),
    Case("a final learning rate above the first", "optimizer.min_lr", "optimizer.min_lr=1"),
    Case("bf16 gradients of fp32 weights", "optimizer.grad_dtype", "optimizer.grad_dtype=bf16"),
    Case("masters in the optimizer of fp32 weights", "optimizer.precision_aware", "optimizer.precision_aware=true"),
    Case("bf16 moments in the plain optimizer", "optimizer.moment_dtype", "optimizer.moment_dtype=bf16"),
    Case("a patch that is none", "config.choice", "patches.disable=[hybrid_mastres]", says="nearest: hybrid_masters"),
    Case("a dual clip that is none", "algorithm.dual_clip", "algorithm.dual_clip=0.5"),
    Case(
        "old log-probs that come too late",
        "algorithm.old_logprobs",
        "algorithm.old_logprobs=update algorithm.minibatches=2",
    ),
    Case("checkpoints without the weights", "checkpoint.contents", "checkpoint.contents=[optimizer]"),
    Case(
        "a resume of what is not saved",
        "checkpoint.load_contents",
        "checkpoint.contents=[model] checkpoint.load_contents=[model,optimizer]",
        says="asks for optimizer",
    ),
    Case("a resume without the weights", "checkpoint.load_contents", "checkpoint.load_contents=[optimizer,extra]"),
    # the machine
    Case("a GPU asked for where there is none", "engine.device", "engine.device=cuda"),
    Case("bf16 on a CPU", "engine.dtype", "engine.dtype=bf16"),
    Case("kernels that need a GPU", "engine.attention_backend", "engine.attention_backend=triton"),
    Case("a port in use", "cluster.port", "cluster.port=PORT"),
    Case("a disk too small for the checkpoints", "checkpoint.disk", "DISK"),
    # other commands
    Case("score of what is no model", "score.source", "score data --tokens t.jsonl --out o.jsonl"),
    Case(
        "score of a model without weights",
        "model.weights",
        "score model --tokens t.jsonl --out o.jsonl",
        edit=lambda work: (write("t.jsonl", '{"tokens": [1, 2]}\n')(work), remove("model/model.safetensors")(work)),
    ),
    Case("score without its tokens file", "score.tokens", "score model --tokens t.jsonl --out o.jsonl"),
    Case(
        "score of a token id that is none",
        "score.tokens",
        "score model --tokens t.jsonl --out o.jsonl",
        edit=write("t.jsonl", '{"tokens": [1, 2]}\n{"tokens": [1, 999]}\n'),
        says="t.jsonl:2: 999",
    ),
    Case(
        "score into a directory that is not there",
        "score.out",
        "score model --tokens t.jsonl --out nowhere/o.jsonl",
        edit=write("t.jsonl", '{"tokens": [1, 2]}\n'),
    ),
    Case("a refit of an unknown recipe", "config.recipe", "doctor --refit dsv4-tinny", says="nearest: dsv4-tiny"),
    Case("a refit of no recipe", "doctor.recipe", "doctor --refit layout.pp=1"),
    Case("report of what is no run", "report.run_dir", "report model"),
    Case("a case the benchmark does not have", "bench.case", "bench optimizer --cases whole-offload0-fp23"),
    Case("a task the benchmark does not have", "bench.task", "bench optimizer --task grop", says="nearest: grpo"),
    Case("a benchmark of no step", "bench.max_step", "bench optimizer --max-step 0"),
    Case("a benchmark without time", "bench.timeout", "bench optimizer --case-timeout 0"),
    Case("a value that the benchmark's cases vary", "bench.key", "bench optimizer optimizer.offload_fraction=1"),
    Case("results where a file is", "bench.out", "bench optimizer --out mine.yaml"),
    Case("results beneath a file", "bench.out", "bench optimizer --out mine.yaml/results"),
    Case(
        "a training benchmark's results beneath a file", "bench.out", "bench train mine.yaml --out mine.yaml/a/b.json"
    ),
    Case("a training benchmark's results where a directory is", "bench.out", "bench train mine.yaml --out ."),
    Case("a sync benchmark's results beneath a file", "bench.out", "bench sync dsv4-tiny --out mine.yaml/b.json"),
    Case("input that is wrong for every case", "rollout.group", "bench optimizer mine.yaml rollout.n=1"),
    Case("a training benchmark of nothing", "bench.size", "bench train mine.yaml --sequences 0"),
]


def outcome(case: Case, good: Path, work: Path) -> tuple[int, str]:
    """Exit code and message of a case run in a copy of the good directory at `work`, the working directory."""
    shutil.copytree(good, work, dirs_exist_ok=True)
    if case.edit:
        case.edit(work)
    command = case.arguments.split()
    if not command or command[0] not in ("train", "score", "report", "explain", "bench", "doctor"):
        command = ["train", "mine.yaml", *command]
    if command[0] == "train":
        command.append("--dry-run")
    out, err = StringIO(), StringIO()
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        taken.bind(("", 0))
        taken.listen()
        patch.chdir(work)
        patch.setattr(host, "gpu_count", lambda: 0)
        if "DISK" in command:
            patch.setattr(host, "free_bytes", lambda path: 1000)
        port = str(taken.getsockname()[1])
        code = run([a.replace("PORT", port) for a in command if a != "DISK"])
    message = err.getvalue().replace(port, "PORT").replace(f"{work.resolve()}/", "").replace(str(work), "")
    return code, re.sub(r"runs/mine-\d+-\d+", "runs/mine-TIME", message)


def table_row(case: Case, code: int, message: str) -> str:
    what = message.removeprefix("error: ").split(f" [{case.rule}]")[0]
    what = re.sub(r"\s+", " ", what).replace("|", "\\|")
    return f"| {case.wrong} | {what} | `{case.rule}` | {code} |"


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("good") / "work"
    write_good(work)
    return work


@pytest.fixture(scope="session")
def documented() -> list[str]:
    return DOC.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]


def test_the_good_input_is_good(good: Path, tmp_path: Path):
    code, message = outcome(Case("nothing", ""), good, tmp_path)
    assert (code, message) == (0, "")


@pytest.mark.parametrize("case", CASES, ids=[c.wrong for c in CASES])
def test_wrong_input(case: Case, good: Path, tmp_path: Path, documented: list[str]):
    code, message = outcome(case, good, tmp_path)
    assert code == 2, message
    assert f"[{case.rule}]" in message and case.says in message
    assert message.startswith("error: ") and "Traceback" not in message
    assert message.count("error: ") == 1 and "  fix: " in message
    assert table_row(case, code, message) in documented, "run python -m tests.test_wrong_input"


def test_the_table_holds_nothing_else(documented: list[str]):
    assert len(documented) == len(CASES) >= 25
    assert len({c.wrong for c in CASES}) == len(CASES)


def rows() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        good = Path(scratch) / "good"
        write_good(good)
        for i, case in enumerate(CASES):
            yield table_row(case, *outcome(case, good, Path(scratch) / str(i)))


def main() -> None:
    before, rest = DOC.read_text().split(BEGIN)
    after = rest.split(END)[1]
    table = ["| what is wrong | message | rule | exit code |", "|---|---|---|---|", *rows()]
    DOC.write_text("\n".join([before + BEGIN, *table, END]) + after)
    print("\n".join(table), file=sys.stderr)


if __name__ == "__main__":
    main()
