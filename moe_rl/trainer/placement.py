"""Ray: where trainer ranks and rollout replicas run, and the driver's view of each group."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moe_rl.config import Config
from moe_rl.config.facts import ModelFacts
from moe_rl.config.flops import Flops
from moe_rl.config.host import resolve_device
from moe_rl.config.replicas import nodes_of_replica, part_name
from moe_rl.errors import RunFailed, UserError
from moe_rl.grpo.batching import micro_batches
from moe_rl.launch.node import EXCHANGE, NODES, meet, raise_failed
from moe_rl.reshard.plan import in_bundles, plan_shares, shares
from moe_rl.trainer.faults import WorkersLost, collect, missing
from moe_rl.trainer.session import Session, signals_held
from moe_rl.trainer.worker import OptimizerStep, RolloutWorker, Rows, Sequences, TrainerWorker

START_S = 600.0
NEED_WEIGHTS = ("generate", "score", "digests")  # what only a replica with weights can be asked
# One math thread each: two dozen threads on a few cores slow each other down, and results would depend on the count
CPU_ENVIRONMENT = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Cluster:
    """A Ray cluster for one run: a local one, or the one that RAY_ADDRESS names. Use it as a context manager."""

    def __init__(self, config: Config, logs: Path) -> None:
        self.config, self.logs = config, logs
        self.on_gpu = resolve_device(config.engine.device) == "cuda"
        self.workers: dict[str, Any] = {}
        self.slots: dict[str, tuple[type, int]] = {}  # what each worker is, and where
        self.places: dict[str, str] = {}  # the node of each worker
        self.group: Any = None
        self.session: Session | None = None
        self.bundles: list[int] = []  # of the trainer's ranks, then of the rollout replicas
        self.nodes: dict[int, str] = {}  # name of the node that holds a bundle

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR")
        try:
            exchange = Path(os.environ[EXCHANGE]) if EXCHANGE in os.environ else None
            if address := meet(exchange) if exchange else os.environ.get("RAY_ADDRESS"):
                with signals_held():
                    ray.init(address=address, **quiet)
                self._await_nodes(exchange)
            else:
                self.session = Session()
                store = int(self.config.cluster.object_store_gib * 2**30)
                self.session.start(num_cpus=self._slots(), object_store_memory=store, **quiet)
            self._reserve()
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            self.__exit__()
            raise RunFailed(
                "ray.start",
                f"Ray did not start: {error}",
                "",
                "Check memory, /dev/shm and RAY_ADDRESS; a cluster with a token asks for RAY_AUTH_MODE=token.",
            ) from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for worker in self.workers.values():
                ray.kill(worker)
            if self.group is not None:
                remove_placement_group(self.group)
        finally:
            self.session.end() if self.session else ray.shutdown()

    @property
    def span(self) -> int:
        """Nodes of one replica; without a cluster all of it is here."""
        return 1 if self.session else nodes_of_replica(self.config)

    def _slots(self) -> int:
        return self.config.cluster.nodes * self.config.cluster.gpus_per_node + self.config.rollout.replicas

    def _await_nodes(self, exchange: Path | None) -> None:
        """The barrier: no rank starts before every node of the run is there."""
        wanted, deadline = self.config.cluster.nodes, time.monotonic() + START_S
        while len(names := living_nodes()) < wanted:
            if exchange:
                raise_failed(exchange)
            if time.monotonic() > deadline:
                missing = sorted(set(os.environ.get(NODES, "").split()) - set(names.values()))
                raise RunFailed(
                    "cluster.nodes",
                    f"{len(names)} of {wanted} nodes joined Ray in {START_S:.0f} s"
                    + (f"; missing: {', '.join(missing)}" if missing else ""),
                    "",
                    f"See ray-NODE.log in {exchange}." if exchange else "Start Ray on the other nodes.",
                )
            time.sleep(0.2)

    def _reserve(self) -> None:
        """Room for every worker, all or none: a run never starts on half of what it needs.

        On this machine each worker has a bundle. On a cluster each node has one: its ranks follow each other, and
        replicas (or their parts, where one lies on several nodes) are dealt to the nodes in turn. Nodes count in the order
        of their names.
        """
        nodes, ranks = self.config.cluster.nodes, self.config.cluster.gpus_per_node
        replicas = self.config.rollout.replicas * self.span
        if self.session:
            sizes = [(1, 1)] * (nodes * ranks) + [(1, 0)] * replicas
            self.bundles = list(range(len(sizes)))
        else:
            sizes = [(ranks + -(-replicas // nodes), ranks)] * nodes
        bundles = [{"CPU": cpus, **({"GPU": gpus} if self.on_gpu and gpus else {})} for cpus, gpus in sizes]
        self.group = placement_group(bundles, strategy="PACK" if self.session else "STRICT_SPREAD")
        if not self.group.wait(timeout_seconds=START_S):
            raise UserError(
                "cluster.resources",
                f"Ray has no room for {nodes * ranks + replicas} workers: it has {ray.cluster_resources()}",
                "Another job holds them, or cluster.nodes and cluster.gpus_per_node ask for more than there is.",
                "Lower them, or wait for the other job.",
            )
        names = living_nodes()
        placed = placement_group_table(self.group)["bundles_to_node_id"]
        self.nodes = {bundle: names[node] for bundle, node in placed.items()}
        if not self.session:
            order = sorted(self.nodes, key=lambda bundle: natural(self.nodes[bundle]))
            self.bundles = [order[rank // ranks] for rank in range(nodes * ranks)]
            self.bundles += [order[i % nodes] for i in range(replicas)]

    def node_of(self, slot: int) -> str:
        """Name of the node of a slot: ranks first, then parts of replicas."""
        return self.nodes[self.bundles[slot]]

    def gpus_of(self, slot: int) -> range:
        """The GPUs of a replica's part, as its node numbers them: next to those of the part before it on that node.

        Ray counts GPUs for the trainer's ranks alone, whose node has as many; a part shares its own with them.
        """
        cluster, size = self.config.cluster, self.config.rollout.tp * self.config.rollout.dp // self.span
        ranks = cluster.nodes * cluster.gpus_per_node
        here, nodes = (ranks, 1) if self.session else (cluster.gpus_per_node, cluster.nodes)
        first = (slot - ranks) // nodes * size % here
        return range(first, first + size)

    def start(self, kind: type, name: str, slot: int) -> Any:
        """Start one worker process in its slot: ranks first, then parts of replicas; its output goes to logs/NAME.log."""
        log = self.logs / f"{name}.log"
        log.touch()
        environment = {} if self.on_gpu else dict(CPU_ENVIRONMENT)
        if self.session:
            environment["TMPDIR"] = str(self.session.path)  # what a killed worker leaves there goes with the session
        actor = (
            ray.remote(kind)
            .options(
                name=name,
                num_cpus=1,
                num_gpus=1 if self.on_gpu and kind is TrainerWorker else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=self.bundles[slot]
                ),
                runtime_env={"env_vars": environment},
            )
            .remote(str(log), *([self.gpus_of(slot)] if self.on_gpu and kind is RolloutWorker else []))
        )
        self.workers[name], self.slots[name], self.places[name] = actor, (kind, slot), self.node_of(slot)
        return actor

    def replace(self, name: str, why: str) -> None:
        """End a worker, whatever state it is in, and start another one in its slot; its log says why."""
        with (self.logs / f"{name}.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} started again: {why}\n")
        ray.kill(self.workers[name])
        deadline = time.monotonic() + START_S
        while not missing([name]):  # a name is free once its process has ended
            if time.monotonic() > deadline:
                raise RunFailed("worker.stays", f"{name} could not be ended in {START_S:.0f} s", why)
            time.sleep(0.05)
        kind, slot = self.slots[name]
        self.start(kind, name, slot)

    def ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Have a worker do something; the reference of what it will return."""
        return getattr(self.workers[name], method).remote(*arguments)

    def wait(self, calls: Mapping[str, Any], timeout_s: float, doing: str, needed: Collection[str] = ()) -> dict:
        """Results of what these workers were asked, by name. They, those `needed` besides, and the trainer's ranks, without
        which nothing goes on, are watched; see `collect`."""
        watched = [n for n, (kind, _) in self.slots.items() if n in calls or n in needed or kind is TrainerWorker]
        return collect(calls, {n: self.logs / f"{n}.log" for n in watched}, timeout_s=timeout_s, doing=doing)

    def call(
        self, names: Sequence[str], method: str, arguments: Callable[[str], tuple], timeout_s: float, doing: str
    ) -> dict:
        """`method` on each of the named workers at once; results by name."""
        return self.wait({n: self.ask(n, method, *arguments(n)) for n in names}, timeout_s, doing)


def living_nodes() -> dict[str, str]:
    """Names of the nodes of this Ray cluster that are alive, by their ids."""
    return {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}


def natural(name: str) -> list[tuple[str, int]]:
    """A key that sorts n2 before n10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


class TrainerGroup:
    """All trainer ranks as one: each method calls them together and joins what they return."""

    def __init__(self, cluster: Cluster, facts: ModelFacts, **options: bool) -> None:
        """`options` go to :meth:`Engine.create`: train, reference, random_init."""
        config = self.config = cluster.config
        self.flops = Flops.of(facts)
        self.cluster = cluster
        self.world = config.cluster.nodes * config.cluster.gpus_per_node
        self.names = [f"trainer_{rank}" for rank in range(self.world)]
        for rank, name in enumerate(self.names):
            cluster.start(TrainerWorker, name, rank)
        self.timeout_s = config.engine.distributed_timeout_s + 60.0
        self.seconds: dict[str, float] = {}
        self.routes: list[dict[int, Any]] = []
        self.rows: Rows = {}
        self.options = options

    def start(self) -> None:
        """Build the engines; their places in the layout become known."""
        address = self._one("free_address", "starting")
        if self.config.cluster.port:
            address = f"{address.rsplit(':', 1)[0]}:{self.config.cluster.port}"
        ranks = {name: rank for rank, name in enumerate(self.names)}
        self.ranks = self._all(
            "start", lambda name: (self.config, ranks[name], self.world, address, self.options), "starting", START_S
        )
        self.layout = self.ranks[self.names[0]]

    def _all(
        self, method: str, arguments: Callable[[str], tuple] = lambda _: (), doing: str = "", timeout_s: float = 0
    ) -> dict:
        return self.cluster.call(self.names, method, arguments, timeout_s or self.timeout_s, doing or method)

    def _one(self, method: str, doing: str) -> Any:
        return self.cluster.call(self.names[:1], method, lambda _: (), START_S, doing)[self.names[0]]

    def _time(self, results: Mapping[str, tuple[Any, ...]]) -> None:
        self.seconds = {name: result[1] for name, result in results.items()}

    def cuts(self, lengths: Sequence[int]) -> list[Any]:
        """Micro-batches of sequences of these lengths, for :meth:`log_probs` and :meth:`update`."""
        multiple = self.layout["pp"] if self.layout["vpp"] > 1 else 1
        budget = self.config.engine.max_tokens_per_micro_batch
        return micro_batches(lengths, budget, self.layout["dp"], multiple, self.flops.sequence)

    def log_probs(
        self,
        batch: Sequences,
        cuts: Sequence[Any],
        *,
        temperature: float,
        entropy: bool = False,
        reference: bool = False,
    ) -> Rows:
        """Log-probs float32 [L-1] and entropies (or None) of each sequence by its index.

        `cuts[d]` lists the micro-batches of data-parallel rank d (:func:`moe_rl.grpo.batching.micro_batches`). Under
        `rollout.router_replay=R2` the experts that the policy chose are left in `routes`, by index, for each rank.
        """
        shared = ray.put(batch)
        results = self._all(
            "score",
            lambda name: (shared, cuts[self.ranks[name]["dp_rank"]], temperature, entropy, reference),
            "computing log-probs",
        )
        self._time(results)
        self.routes = [routes for _, _, routes in results.values()]
        return {i: row for rows, _, _ in results.values() for i, row in rows.items()}

    def update(
        self,
        batch: Sequences,
        cuts: Sequence[Any],
        *,
        temperature: float,
        supervised: bool = False,
        scored: bool = False,
    ) -> OptimizerStep:
        """One optimizer step on the whole batch, with the algorithm's loss or the supervised one. With `scored` its log-probs
        and entropies are left in `rows`, as :meth:`log_probs` gives them."""
        shared = ray.put(batch)
        results = self._all(
            "update",
            lambda name: (shared, cuts[self.ranks[name]["dp_rank"]], temperature, supervised, scored),
            "updating",
        )
        self._time(results)
        self.rows = {i: row for _, _, rows in results.values() for i, row in rows.items()}
        return results[self.names[0]][0]

    def owned(self) -> list[Any]:
        return [item for items in self._all("owned", doing="listing weights").values() for item in items]

    def send(self, rank: int, boxes: Sequence[Any], dtypes: Mapping[str, str], version: int = 0) -> list[Any]:
        """Blocks that one rank owns, as packets in the dtypes given by name."""
        name = self.names[rank]
        arguments = (list(boxes), dict(dtypes), version)
        return self.cluster.call([name], "send", lambda _: arguments, self.timeout_s, "sending weights")[name]

    def digest(self) -> dict[str, int]:
        """The digest of each tensor by name, from all ranks."""
        return {name: d for part in self._all("digest", doing="digesting weights").values() for name, d in part.items()}

    def load_released(self, path: str) -> None:
        self._all("load_released", lambda _: (path,), "loading weights")

    def save(self, directory: Path, contents: Sequence[str]) -> None:
        self._all("save", lambda _: (str(directory), list(contents)), "saving a checkpoint")

    def finish_save(self) -> None:
        """Wait until no save is in flight. Raises RunFailed if it failed."""
        self._all("finish_save", doing="writing a checkpoint")

    def load(self, directory: Path, contents: Sequence[str]) -> dict[str, float]:
        """Have all ranks load; `seconds`, `host_peak_gib` and `gpu_peak_gib` of the rank with most of each."""
        reports = self._all("load", lambda _: (str(directory), list(contents)), "loading a checkpoint").values()
        return {name: max(report[name] for report in reports) for name in next(iter(reports))}

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        return self._all("peak_memory_gib", doing="reading memory use")

    def phase_peak_gib(self) -> dict[str, tuple[float, float]]:
        """By worker the most (host, GPU) memory since the last call, in GiB."""
        return self._all("phase_peak_gib", doing="reading memory use")


class RolloutGroup:
    """All rollout replicas as one. One that is lost, once it has had weights, is started again and asked again, at most
    `rollout.max_restarts` times each.

    `names` are the replicas', each its leader's; `workers` all their parts, in the order of the plan's receivers.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.config = cluster, cluster.config
        world, span = self.config.cluster.nodes * self.config.cluster.gpus_per_node, cluster.span
        self.parts = {
            part_name(i, 0): [part_name(i, k) for k in range(span)] for i in range(self.config.rollout.replicas)
        }
        self.names, self.workers = list(self.parts), [name for parts in self.parts.values() for name in parts]
        self.replica = {name: leader for leader, parts in self.parts.items() for name in parts}
        for i, name in enumerate(self.workers):
            cluster.start(RolloutWorker, name, world + i)
        self.seconds: dict[str, float] = {}
        self.restarts = dict.fromkeys(self.names, 0)
        self.empty: set[str] = set()  # replicas that were started again and have no weights yet
        self.refill: Callable[[Sequence[str]], Any] | None = None  # gives the named ones the weights of the others

    def _all(
        self,
        method: str,
        arguments: Callable[[str], tuple] = lambda _: (),
        doing: str = "",
        names: Sequence[str] = (),
    ) -> dict:
        """`method` on the named workers, all leaders by default; results by name, whichever process gave them in the end."""
        calls: dict[str, Any] = {}
        while True:
            try:
                if self.empty and self.refill and method in NEED_WEIGHTS:
                    self.refill(sorted(self.empty))
                for name in names or self.names:
                    if name not in calls:
                        calls[name] = self.cluster.ask(name, method, *arguments(name))
                needed = {part for name in calls for part in self.parts[self.replica[name]]}
                return self.cluster.wait(calls, self.config.rollout.timeout_s, doing or method, needed)
            except WorkersLost as fault:
                for name in {self.replica.get(worker, worker): None for worker in fault.workers}:
                    self._restart(name, fault)
                    for part in self.parts[name]:
                        calls.pop(part, None)

    def _restart(self, name: str, fault: WorkersLost) -> None:
        """Other processes in place of those of the replica `name`, or the fault where it may have none."""
        while True:
            most = self.config.rollout.max_restarts
            if self.refill is None or self.restarts.get(name, most) >= most:
                if self.restarts.get(name):
                    fault.why += f" It had been started again {most} times, as rollout.max_restarts allows."
                raise fault
            self.restarts[name] += 1
            for part in self.parts[name]:
                self.cluster.replace(part, fault.what)
            self.empty.add(name)
            try:
                self.ranks |= self._start([name], "starting again")
                return
            except WorkersLost as again:
                if name not in {self.replica.get(worker) for worker in again.workers}:
                    raise
                fault = again

    def start(self) -> None:
        self.ranks = self._start(self.names, "starting")

    def _start(self, names: Sequence[str], doing: str) -> dict:
        """Start replicas whole: a leader waits for its followers, and says what they hold."""
        limit = max(START_S, self.config.rollout.timeout_s)
        parts = {part: (name, k) for name in names for k, part in enumerate(self.parts[name])}
        followers = {part: place for part, place in parts.items() if place[1]}
        at = self.cluster.call(list(parts), "free_address", lambda _: (), limit, doing) if followers else {}

        def arguments(part: str) -> tuple:
            name, k = parts[part]
            return self.config, k, [at[other] for other in self.parts[name] if other in at]

        started = self.cluster.call(list(parts), "start", arguments, limit, doing)
        if followers:
            held = self.cluster.call(names, "held", lambda _: (), limit, doing)
            self.cluster.call(
                list(followers), "hold", lambda part: (held[parts[part][0]][parts[part][1]],), limit, doing
            )
        return started

    def holdings(self) -> dict[str, list[Any]]:
        numbers = {name: i for i, name in enumerate(self.workers)}
        return self._all("holdings", lambda name: (numbers[name],), "listing weights", self.workers)

    def receive(self, version: int, names: Mapping[int, Sequence[str]], packets: Mapping[str, list[Any]]) -> int:
        """Hand each worker in `packets` its own (object references) and have it prove the version whole; bytes that
        arrived. Replicas come with all of their parts."""
        wanted = {name: names[i] for i, name in enumerate(self.workers)}
        came = self._all(
            "receive", lambda name: (version, wanted[name], *packets[name]), "taking new weights", list(packets)
        )
        self.empty -= packets.keys()
        return sum(came.values())

    def score(self, sequences: Sequence[Any]) -> dict[str, list[Any]]:
        """Each replica's log-probs float32 [L-1] of all sequences, at temperature 1."""
        return self._all("score", lambda _: (list(sequences),), "scoring")

    def digests(self) -> dict[str, dict[str, int]]:
        """Each worker's digests of what it holds; a replica's leader has those of the live weights of all its ranks."""
        return self._all("digests", doing="digesting weights", names=self.workers)

    def generate(self, requests: Sequence[Any]) -> list[Any]:
        """One completion for each request, in their order; requests are dealt to the replicas in equal runs."""
        count = len(self.names)
        cut = [len(requests) * i // count for i in range(count + 1)]
        share = {name: list(requests[cut[i] : cut[i + 1]]) for i, name in enumerate(self.names)}
        results = self._all("generate", lambda name: (share[name],), "generating")
        self.seconds = {name: seconds for name, (_, seconds) in results.items()}
        return [completion for name in self.names for completion in results[name][0]]

    def peak_memory_gib(self) -> dict[str, dict[str, float]]:
        return self._all("peak_memory_gib", doing="reading memory use", names=self.workers)

    def phase_peak_gib(self) -> dict[str, tuple[float, float]]:
        """By worker the most (host, GPU) memory since the last call, in GiB."""
        return self._all("phase_peak_gib", doing="reading memory use", names=self.workers)


class WeightSync:
    """Moves the trainer's weights into the rollouts: planned once, proven each time."""

    def __init__(self, trainer: TrainerGroup, rollout: RolloutGroup) -> None:
        self.trainer, self.rollout = trainer, rollout
        held = shares(tensor for tensors in rollout.holdings().values() for tensor in tensors)
        self.plan = plan_shares(shares(trainer.owned()), held)
        self.bundles = in_bundles(self.plan, held)
        self.version = -1
        rollout.refill = lambda names: self.push(self.version, names)

    def push(self, version: int, replicas: Sequence[str] = ()) -> int:
        """Make `version` the weights of the named replicas, all by default; bytes that arrived.

        Raises:
            RunFailed: a tensor is missing, arrives twice, or differs from what was sent; that replica refuses to
                generate.
        """
        workers, names = self.trainer.cluster.workers, self.trainer.names
        self.version = version
        taking = replicas or self.rollout.names
        packets: dict[str, list[Any]] = {part: [] for name in taking for part in self.rollout.parts[name]}
        for _, source, receivers, cargo in self.bundles:
            wanted = [name for r in receivers if (name := self.rollout.workers[r]) in packets]
            if wanted:
                boxes, forms = [c.box for c in cargo], {c.box.name: c.form for c in cargo}
                sent = workers[names[source]].send.remote(boxes, forms, version)
                for name in wanted:
                    packets[name].append(sent)
        return self.rollout.receive(version, self.plan.names, packets)
