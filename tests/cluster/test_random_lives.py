"""Random lives of a cluster in virtual time: each answer is whole, once, and that of one engine; decisions repeat.

First whole clusters over replicas in this process, then the orders of events message by message: each message, end of
a replica and decision is an event of its own, so also those orders occur that take a process or a network some luck.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.cluster.in_process import LocalReplica, Maker, run_virtually, virtual
from tests.cluster.running import asked, check, outputs_of
from tests.cluster.sleeping_engine import expected
from tests.example_counts import scaled
from tests.routing.integrity import check_integrity
from vlora.cluster.in_flight_request import InFlightRequest
from vlora.cluster.in_flight_requests import InFlightRequests
from vlora.cluster.members import Health
from vlora.cluster.status import Events
from vlora.errors import Aborted, BadAdapter, EngineDead
from vlora.routing import RULES, RecordedRouter, Room, Router, replay_calls
from vlora.types import ErrorValue, FinishReason, Request, RequestOutput, SamplingParams, Timings, seed_of


class Life:
    """One schedule of moves, deaths, pauses and cancellations.

    Attributes:
        lines: The record of the router's calls.
    """

    def __init__(self, seed: int, *, crowded: bool = False) -> None:
        """crowded: requests wait for replicas most of the time."""
        self.draws = random.Random(seed)
        queueing = [name for name, rule in RULES.items() if rule.queues]
        self.rule = self.draws.choice(queueing if crowded else list(RULES))
        self.over = 1.0 if crowded else self.draws.choice([1.0, 1.5, 4.0])
        self.batch = 1 if crowded else 8
        self.names = "abcd"[: 3 if crowded else self.draws.randint(1, 4)]
        self.lines: list[bytes] = []
        self.num_failed = self.num_moves = self.num_deaths = self.num_recalled = self.num_reports = 0

    async def run(self, cluster: Maker) -> None:
        self.router = RecordedRouter(self.lines.append, rule=self.rule, over=self.over).as_router
        async with cluster("", router=self.router, health=Health(beat_s=0.1, missed=3)) as self.here:
            for name in self.names:
                await self.here.add(name, LocalReplica(max_batch_size=self.batch))
            self.busy = True
            making = asyncio.create_task(self._make_trouble())
            await asyncio.gather(*(self._ask(number) for number in range(self.draws.randint(4, 30))))
            self.busy = False
            await making
            for replica in self.here.replicas.values():
                replica.wake()
                replica.start()
            check(asked("last", 5), await outputs_of(self.here.cluster, asked("last", 5)))
            await self.here.check_idle()
            # None is lost; the estimate exceeds the truth where a report came before the end that it includes.
            assert all(replica.free_blocks >= 1000 for replica in self.router.replicas.values())
            self.num_reports = sum(replica.num_reports for replica in self.here.replicas.values())

    async def _ask(self, number: int) -> None:
        draws = self.draws
        await asyncio.sleep(draws.uniform(0, 3))
        request = asked(
            f"r{number}",
            draws.randint(1, 60),
            whole=draws.random() < 0.2,
            logprobs=1 if draws.random() < 0.3 else None,
            seed=draws.choice([None, number]),
        )
        if draws.random() < 0.3:
            await self._leave_early(request)
            return
        found = await outputs_of(self.here.cluster, request)
        error, timings = found[-1].error, found[-1].timings
        if error is None:
            assert timings is not None
            self.num_moves += timings.num_moves
            self.num_deaths += timings.num_deaths
            check(request, found)
        else:  # by chance three replicas died under it
            assert error.code == "step_failed" and timings is not None and timings.num_deaths == 3
            self.num_failed += 1

    async def _leave_early(self, request: Request) -> None:
        """Cancel it, or close its stream, at any time: what came until then is the answer's beginning."""
        closes, after_s = self.draws.random() < 0.5, self.draws.uniform(0, 0.6)
        tokens: list[int] = []

        async def read() -> None:
            async for output in self.here.cluster.generate(request):
                tokens.extend(output.token_ids)
                assert output.error is None or output.error.code in ("aborted", "step_failed")

        reading = asyncio.create_task(read())
        await asyncio.sleep(after_s)
        if closes:
            reading.cancel()
        else:
            await self.here.cluster.cancel(request.request_id)
        await asyncio.wait({reading})
        assert reading.cancelled() or reading.exception() is None
        whole = expected(request, seed_of(request.request_id, request.sampling))
        assert tuple(tokens) == whole[: len(tokens)]

    async def _make_trouble(self) -> None:
        while self.busy:
            await asyncio.sleep(self.draws.expovariate(8))
            name = self.draws.choice(self.names)
            replica = self.here.replicas[name]
            match self.draws.choice(["move"] * 8 + ["kill", "hang"]):
                case "move" if name in self.router.replicas:
                    self.router.drain(name)
                    waits = self.router.num_waiting > 0
                    self.num_recalled += waits * self.here.cluster.consolidate()
                    if self.draws.random() < 0.5:
                        await asyncio.sleep(self.draws.uniform(0, 0.05))
                    if name in self.router.replicas:
                        self.here.cluster.resume(name)
                case "kill":
                    replica.kill()
                    await asyncio.sleep(self.draws.uniform(0, 0.3))
                    replica.start()
                case "hang" if replica.alive:
                    replica.hung = True
                    await asyncio.sleep(self.draws.choice([0.05, 0.2, 0.6]))
                    replica.wake()


def lived(cluster: Maker, number: int, *, crowded: bool = False) -> list[Life]:
    lives = [Life(seed, crowded=crowded) for seed in range(number)]
    for life in lives:
        run_virtually(life.run(cluster))
    return lives


def test_random_schedules_lose_double_and_change_nothing(cluster: Maker) -> None:
    """With the schedules' own proof that they contain what they are to test."""
    lives = lived(cluster, scaled(150))
    num_deaths = sum(life.num_deaths for life in lives)
    assert sum(life.num_moves for life in lives) > len(lives) < num_deaths
    assert sum(life.num_failed for life in lives) < num_deaths / 5
    assert sum(life.num_reports for life in lives) > 10 * len(lives)


def test_random_lives_repeat_their_decisions(cluster: Maker) -> None:
    """With kills, pauses, moves, drains while requests wait, and cancellations."""
    crowded = lived(cluster, scaled(60), crowded=True)
    assert sum(life.num_recalled for life in crowded) > len(crowded) < sum(life.num_deaths for life in crowded)
    records = [life.lines for life in (*crowded, *lived(cluster, 8))]
    for lines in records:
        found = replay_calls(lines)
        assert found.difference is None and found.num_calls == len(lines) - 1 > 20
    everything = b"".join(line for lines in records for line in lines)
    for name in ("join", "leave", "drain", "report", "submit", "ended", "grew", "consolidate", "recall"):
        assert everything.count(b'["%s",' % name.encode()) > 10, name
    assert any(line.startswith(b'["recall",[2],[[["r') for lines in records for line in lines)
    # Negative controls: another rule, and a call that is missing, lead to other decisions or to none.
    num_others = 0
    for lines in records:
        if b'"placed"' in lines[0]:
            other = [lines[0].replace(b"placed", b"punica"), *lines[1:]]
            num_others += replay_calls(other).difference is not None
        place = next(place for place, line in enumerate(lines) if line.startswith(b'["join"'))
        assert replay_calls(lines[:place] + lines[place + 1 :]).difference is not None
    assert num_others > 1


# -- message by message -----------------------------------------------------------------------------------------------

NUM_EVENTS = 150
EVENTS = (
    *("ask", "take", "step", "deliver", "cancel", "abandon", "drain", "resume", "consolidate", "refuse", "die"),
    *("remove", "shrink", "leave", "join"),
)
BROKEN = "broken on a"  # an adapter
TIMES = Timings(
    queue_s=0, ttft_s=0, latency_s=0, num_prompt_tokens=1, num_completion_tokens=0, num_preemptions=0, steps_by_mode={}
)


def request_of(name: str, num_prompt: int = 1, num_tokens: int = 3, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, seed=0)
    return Request(request_id=name, prompt_ids=(1,) * num_prompt, sampling=sampling, **fields)


class Line:
    """In place of an `EngineClient`: its engine takes one message at a time, and so does the front end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cause: str | None = None
        self.to_engine: list[Request | str] = []  # a string cancels
        self.to_front: list[RequestOutput] = []
        self.running: dict[str, tuple[Request, int]] = {}  # with the number of tokens
        self._streams: dict[str, Callable[[RequestOutput], None]] = {}

    def submit(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None:
        assert self.cause is None and request.request_id not in self._streams
        self._streams[request.request_id] = on_output
        self.to_engine.append(request)

    def post_cancel(self, request_id: str) -> None:
        if self.cause is None:
            self.to_engine.append(request_id)

    def abandon(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.post_cancel(request_id)

    def end(self) -> None:
        """The line is lost."""
        self.cause = "lost"
        streams, self._streams = self._streams, {}
        dead = ErrorValue.of(EngineDead(self.cause))
        for request_id, on_output in streams.items():
            on_output(RequestOutput(request_id=request_id, finish_reason="error", error=dead))

    def take(self) -> None:
        """The engine takes a message."""
        message = self.to_engine.pop(0)
        if isinstance(message, str):
            if self.running.pop(message, None) is not None:
                self._end(message, "cancelled", Aborted("cancelled"))
        elif message.adapter == BROKEN and self.name == "a":
            self._end(message.request_id, "error", BadAdapter("there is no such file"))
        else:
            self.running[message.request_id] = message, len(message.answered)

    def step(self) -> None:
        for request_id, (request, place) in tuple(self.running.items()):
            if place + 1 < request.sampling.max_tokens:
                self.running[request_id] = request, place + 1
                self.to_front.append(RequestOutput(request_id=request_id, token_ids=(place,)))
            else:
                del self.running[request_id]
                self._end(request_id, "length", tokens=(place,))

    def deliver(self) -> None:
        """The front end takes a message."""
        output = self.to_front.pop(0)
        if (on_output := self._streams.get(output.request_id)) is not None:
            if output.finished:
                del self._streams[output.request_id]
            on_output(output)

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        error: Aborted | BadAdapter | None = None,
        tokens: tuple[int, ...] = (),
    ) -> None:
        value = None if error is None else ErrorValue.of(error)
        self.to_front.append(
            RequestOutput(request_id=request_id, token_ids=tokens, finish_reason=reason, error=value, timings=TIMES)
        )


class Adapters:
    """In place of `ReplicatedAdapters`, whose files are there."""

    def __init__(self, bar: Callable[[str, str], None]) -> None:
        self.homes = dict.fromkeys("abc", SimpleNamespace(awaits_files=lambda names: False))
        self.former = self
        self.request_ended = self.began = self.cause_of = lambda *_: None
        self.refused = lambda replica, adapter, error: bar(replica, adapter)

    def __contains__(self, adapter: object) -> bool:
        return adapter == BROKEN


class Fleet:
    """Replicas by name, and what the front end's event loop has still to do about their ends."""

    def __init__(self, rule: str) -> None:
        self.router = Router(rule, over=1.0)
        self.lines: dict[str, Line] = {}
        self.left: dict[str, Callable[[], None]] = {}  # the next step of a replica's end
        self.in_flight = InFlightRequests(
            self.router,
            Events(),
            lambda name: None if name is None else self.lines.get(name),  # type: ignore[arg-type, return-value]
            Adapters(self._bar),  # type: ignore[arg-type]
            "k",
        )

    def _bar(self, replica: str, adapter: str) -> None:
        if replica in self.router.replicas:
            self.in_flight.send(self.router.bar(replica, adapter))

    def join(self, name: str) -> None:
        self.lines[name] = Line(name)
        self.in_flight.send(self.router.join(name, Room(max_batch_size=4, blocks=24)))

    def drain(self, name: str, draining: bool) -> None:
        self.in_flight.send(self.router.drain(name, draining))

    def arrive(self, name: str) -> None:
        """All messages of a replica arrive, around one step of it."""
        line = self.lines[name]
        while line.to_engine:
            line.take()
        line.step()
        while line.to_front:
            line.deliver()

    def leave(self, name: str) -> None:
        while name in self.left:
            self.left[name]()

    def die(self, name: str) -> None:
        """The line is lost, and the replica leaves in a later round of the event loop."""
        line = self.lines[name]

        def leave() -> None:
            del self.lines[name], self.left[name]
            self.in_flight.replica_left(name, "lost", died=True)

        self.left[name] = leave
        line.end()

    def remove(self, name: str) -> None:
        """An operator removes it: no client at first, then the line ends, then it leaves."""
        line = self.lines.pop(name)

        def leave() -> None:
            del self.left[name]
            self.in_flight.replica_left(name, "removed", died=False)

        def end() -> None:
            self.left[name] = leave
            line.end()

        self.left[name] = end


class Order:
    """One random order of events, some of which are frequent and others rare: each order differs in that too."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.weights = [2 ** self.draws.uniform(-3, 3) for _ in EVENTS]
        self.fleet = Fleet(self.draws.choice(["placed", "punica", "where_it_is"]))
        self.in_flight = self.fleet.in_flight
        self.asked: dict[str, Request] = {}
        self.found: dict[str, list[RequestOutput]] = {}
        self.abandoned: set[str] = set()
        self.names = self.draws.choice(["ab", "abc"])
        self.victim = "a"  # has most of the trouble for a time
        self.recalled = 0

    async def run(self) -> None:
        for name in self.names:
            self.fleet.join(name)
        for _ in range(12):
            self.ask()
        for _ in range(NUM_EVENTS):
            self.happen()
            await asyncio.sleep(self.draws.choice([0.0] * 20 + [0.3]))
        for _ in range(1000):
            if not self.in_flight.open:
                break
            self.heal()
            await asyncio.sleep(0.1)
        for _ in range(10):  # messages of ended requests
            self.heal()
        self.check()

    def happen(self) -> None:
        draws, fleet = self.draws, self.fleet
        if draws.random() < 0.1:
            self.victim = draws.choice(self.names)
        name = self.victim if draws.random() < 0.5 else draws.choice(self.names)
        line, joined = fleet.lines.get(name), name in fleet.router.replicas
        match draws.choices(EVENTS, self.weights)[0]:
            case "ask":
                self.ask()
            case "cancel":
                self.cancel_some(name)
            case "abandon" if self.in_flight.open:
                in_flight: InFlightRequest = self.in_flight.open[draws.choice(list(self.in_flight.open))]
                self.abandoned.add(in_flight.request.request_id)
                self.in_flight.abandon(in_flight)
            case "take" if line and line.to_engine:
                line.take()
            case "step" if line:
                line.step()
            case "deliver" if line and line.to_front and line.cause is None:
                line.deliver()
            case "drain" if joined:
                fleet.drain(name, True)
            case "resume" if joined:
                fleet.drain(name, False)
            case "consolidate":
                self.recalled += self.consolidate()
            case "refuse":
                self.in_flight.refuse()
            case "die" if line and name not in fleet.left:
                fleet.die(name)
            case "remove" if line and name not in fleet.left and fleet.router.replicas[name].draining:
                fleet.remove(name)
            case "shrink" if line and name not in fleet.left:
                fleet.drain(name, True)
                self.cancel_some(name)
                fleet.remove(name)
                self.recalled += self.consolidate()
            case "leave" if name in fleet.left:
                fleet.left[name]()
            case "join" if not joined and name not in fleet.left:
                fleet.join(name)

    def cancel_some(self, name: str) -> None:
        """Cancel about half of the requests of a replica."""
        for request_id in [each for each in self.in_flight.open if self.fleet.router.where(each) == name]:
            if self.draws.random() < 0.5:
                self.in_flight.cancel(request_id)

    def consolidate(self) -> int:
        """Returns the number of recalled requests."""
        waited = self.fleet.router.num_waiting > 0
        return waited * self.in_flight.consolidate()

    def ask(self) -> None:
        request_id = f"r{len(self.asked)}"
        num_prompt, num_tokens = self.draws.choice([1, 4, 16]), self.draws.randint(1, 6)
        adapter = self.draws.choice([None, None, BROKEN])
        self.asked[request_id] = request_of(request_id, num_prompt, num_tokens, adapter=adapter)
        self.found[request_id] = []
        self.in_flight.add(self.asked[request_id], self.found[request_id].append)

    def heal(self) -> None:
        """All replicas serve and all messages arrive."""
        for name in self.names:
            self.fleet.leave(name)
            if name not in self.fleet.router.replicas:
                self.fleet.join(name)
            self.fleet.drain(name, False)
            self.fleet.arrive(name)
        self.in_flight.refuse()

    def check(self) -> None:
        assert not self.in_flight.open, "a request waits for ever"
        check_integrity(self.fleet.router)
        assert not self.fleet.router.num_waiting
        assert not any(replica.holds for replica in self.fleet.router.replicas.values())
        assert not any(line.running for line in self.fleet.lines.values()), "a request runs where none expects it"
        for request_id, outputs in self.found.items():
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == list(range(len(tokens)))
            if request_id in self.abandoned:
                continue
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            if (error := outputs[-1].error) is None:
                assert len(tokens) == self.asked[request_id].sampling.max_tokens
            else:
                # An adapter that the only serving replica cannot load is refused while the others drain.
                refused = ("bad_adapter", "over_capacity") if self.asked[request_id].adapter == BROKEN else ()
                assert error.code in ("aborted", "step_failed", *refused), error


def test_no_order_of_events_lets_a_request_wait_for_ever() -> None:
    num_recalled, num_orders = 0, scaled(1000)
    for seed in {*range(num_orders), 820}:  # in the last one a refusal and a move cross

        async def main(seed: int = seed) -> int:
            order = Order(seed)
            await order.run()
            return order.recalled

        try:
            num_recalled += run_virtually(main())
        except Exception as error:
            raise AssertionError(f"order {seed}: {error}") from error
    assert num_recalled > num_orders / 4  # the orders contain what they are to test


@virtual
async def test_a_recall_that_ends_one_request_and_so_places_another() -> None:
    """The replica that drains is being removed, and one of its requests was cancelled."""
    fleet = Fleet("placed")
    found: dict[str, list[RequestOutput]] = {}

    def ask(name: str, num_prompt: int) -> None:
        fleet.in_flight.add(request_of(name, num_prompt), found.setdefault(name, []).append)

    fleet.join("a")
    ask("older", 1)
    ask("newer", 1)
    fleet.join("b")
    ask("on b", 10)
    ask("large", 20)  # more than b has left
    assert fleet.router.is_waiting("large") and fleet.router.where("newer") == "a"
    fleet.drain("a", True)
    fleet.in_flight.cancel("newer")
    fleet.remove("a")
    # Both are recalled: the newer one has b's last place, and ends at once, so the older one has it.
    assert fleet.in_flight.consolidate() == 2
    assert fleet.router.where("older") == "b" and found["newer"][-1].finish_reason == "cancelled"
    fleet.leave("a")
    for _ in range(12):
        fleet.arrive("b")
        await asyncio.sleep(0.1)
    answered = dict.fromkeys(("older", "on b", "large"), "length")
    assert {name: outputs[-1].finish_reason for name, outputs in found.items()} == {**answered, "newer": "cancelled"}


@virtual
async def test_any_number_of_requests_may_end_while_a_replica_joins() -> None:
    """Each one makes room for the next one, which has expired too."""
    fleet = Fleet("placed")
    found: list[RequestOutput] = []
    for number in range(600):
        fleet.in_flight.add(request_of(f"r{number}", max_latency_s=1.0), found.append)
    await asyncio.sleep(1.1)
    fleet.join("a")
    assert not fleet.in_flight.open and not fleet.router.num_waiting
    assert [output.error and output.error.code for output in found] == ["deadline_missed"] * 600
