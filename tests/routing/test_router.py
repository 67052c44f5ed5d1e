"""The router's rules, order, reports, moves, recalls and contents, one at a time; and the index of first blocks."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.routing.integrity import check_integrity
from vlora.errors import BadConfig
from vlora.orchestrator.admission.kv_admission import OLDEST_EVERY, entry_order
from vlora.orchestrator.fairness import FairShares, adapter_of, tenant_of
from vlora.orchestrator.request_state import TrackedRequest
from vlora.routing import RULES, MoveCosts, Need, Report, Room, Router, Rule
from vlora.routing.fleet import PrefixIndex
from vlora.routing.router import Refusal
from vlora.routing.rules import PlacedAdapters
from vlora.types import Request, SamplingParams

NUMBERS = itertools.count()


def need(adapter: str | None = None, blocks: int = 1, **values: object) -> Need:
    number = next(NUMBERS)
    return Need(f"n{number}", adapter, blocks, number)._replace(**values)  # type: ignore[arg-type]


def routed(rule: str | Rule, names: str, room: Room | None = None, **settings: object) -> Router:
    router = Router(rule, **settings)  # type: ignore[arg-type]
    for name in names:
        router.join(name, room or Room(4, 100))
    return router


def send(router: Router, each: Need) -> str | None:
    """Submit a request; the replica that it is sent to."""
    found = [name for placed, name in router.submit(each) if placed.request_id == each.request_id]
    return found[0] if found else None


# -- rules ------------------------------------------------------------------------------------------------------------


def test_punica_fills_the_busiest_and_prefers_the_highest_name() -> None:
    router = routed("punica", "abc")
    assert [send(router, need()) for _ in range(9)] == ["c"] * 4 + ["b"] * 4 + ["a"]
    router = routed("punica", "ab", Room(4, 10))
    assert send(router, need(blocks=8)) == "b"
    assert send(router, need(blocks=3)) == "a", "b has two blocks left"


def test_punica_takes_one_batch_and_other_queueing_rules_more() -> None:
    for name, rule in RULES.items():
        router = routed(name, "a", Room(4, 1000))
        sent = sum(send(router, need("x")) is not None for _ in range(20))
        assert sent == {"punica": 4, "placed": 6, "where_it_is": 6}.get(name, 20)
        assert router.num_waiting == (20 - sent if rule.queues else 0)


def test_least_loaded_and_round_robin() -> None:
    router = routed("least_loaded", "ab")
    first = need()
    assert [send(router, each) for each in (first, need(), need())] == ["a", "b", "a"]
    router.ended(first.request_id)
    assert send(router, need()) == "a"
    assert [send(router, need()) for router in [routed("round_robin", "abc")] for _ in range(4)] == ["a", "b", "c", "a"]


def test_where_it_is_stays_with_the_adapter() -> None:
    router = routed("where_it_is", "ab", Room(4, 100, adapters=1))
    assert send(router, need("x")) == "b"
    assert send(router, need("y")) == "a", "b has no place for a second adapter"
    assert send(router, need("x")) == "b" and send(router, need("y")) == "a"
    assert router.num_loads == 2


def lives(router: Router, num_requests: int, num_adapters: int, num_running: int) -> None:
    """Requests for equally popular adapters; so many run at a time."""
    draws = random.Random(0)
    running: list[str] = []
    for number in range(num_requests):
        each = need(f"x{draws.randrange(num_adapters)}")
        assert send(router, each) is not None
        running.append(each.request_id)
        if len(running) > num_running:
            router.ended(running.pop(draws.randrange(len(running))))
        if number % 100 == 0:
            router.replan()


def test_placed_keeps_requests_at_the_home_of_their_adapter() -> None:
    placed, least = (routed(rule, "abcd", Room(16, 1000, adapters=4)) for rule in ("placed", "least_loaded"))
    for router in (placed, least):
        lives(router, 2000, 12, 24)
    assert placed.num_loads < 0.05 * 2000 < 0.5 * least.num_loads
    assert all(1 <= len(set(placed.rule.homes(f"x{number}"))) <= 3 for number in range(12))


def test_the_number_of_homes_is_bounded_until_the_demand_exceeds_them() -> None:
    router = routed(PlacedAdapters(most_homes=3), "abcdefghijkl", Room(8, 1000, adapters=6))
    for number in range(100):
        each = need(f"x{number % 5}")
        send(router, each)
        router.ended(each.request_id)
    for _ in range(24):
        send(router, need("hot"))
    assert sum(s.has("hot") for s in router.replicas.values()) == 3, "a fifth of the demand, on full batches"
    for _ in range(6):
        send(router, need("hot"))
    assert sum(s.has("hot") for s in router.replicas.values()) > 3, "no request waits behind a full batch"
    router = routed(PlacedAdapters(most_homes=3), "abcdefghijkl", Room(8, 1000, adapters=6))
    for _ in range(60):
        send(router, need("hot"))
    router.replan()
    assert len(set(router.rule.homes("hot"))) == 12, "all of the demand is for this adapter"


def test_a_known_prefix_decides_between_about_equal_replicas() -> None:
    router = routed("placed", "abc", Room(8, 1000))
    prefix = (b"1", b"2")
    assert send(router, need(prefix=prefix)) == "a"
    assert send(router, need(prefix=prefix)) == "a", "one request more than the others is about equal"
    assert send(router, need()) == "b"
    for _ in range(4):
        send(router, need(prefix=prefix))
    assert router.replicas["a"].size <= 4, "but not many requests more"


def test_a_replica_that_cannot_load_an_adapter_gets_none_of_its_requests() -> None:
    for rule in RULES:
        router = routed(rule, "ab")
        router.bar("a", "x")
        assert {send(router, need("x")) for _ in range(4)} == {"b"}
    router.bar("a", "x", barred=False)
    assert send(router, need("x")) == "a"


# -- the queue's order ------------------------------------------------------------------------------------------------


def drained(router: Router) -> list[str]:
    """The order of all waiting requests, with one place at a time."""
    order: list[str] = []
    (running,) = router.replicas["a"].holds
    while placed := router.ended(running):
        ((each, _),) = placed
        running = each.request_id
        order.append(running)
    return order


def one_place(**settings: object) -> Router:
    router = routed("placed", "a", Room(1, 10_000), over=1.0, **settings)
    send(router, need())
    return router


def test_priority_then_arrival_and_punica_by_arrival_alone() -> None:
    waiting = [need(priority=priority) for priority in (0, 1, 0, 2, 1)]
    router = one_place()
    assert all(send(router, each) is None for each in waiting)
    assert drained(router) == [waiting[place].request_id for place in (3, 1, 4, 0, 2)]
    router = routed("punica", "a", Room(1, 10_000))
    send(router, need(request_id="first"))
    for each in waiting:
        send(router, each)
    assert drained(router) == [each.request_id for each in waiting]


def test_returned_requests_come_first_and_then_those_with_a_deadline() -> None:
    router = one_place()
    waiting = [need(priority=5), need(answer_by=9.0), need(returned=True), need(returned=True)]
    for each in reversed(waiting):
        send(router, each)
    assert drained(router) == [waiting[place].request_id for place in (2, 3, 1, 0)]


def tracked_of(each: Need) -> TrackedRequest:
    """The same request as the engine's scheduler knows it."""
    request = Request(
        request_id=each.request_id,
        prompt_ids=(0,) * each.blocks,
        sampling=SamplingParams(max_tokens=1),
        adapter=each.adapter,
        priority=each.priority,
        tenant=each.tenant,
        max_ttft_s=each.answer_by,
    )
    tracked = TrackedRequest(request, 0.0, None)
    tracked.arrival, tracked.num_preemptions = each.arrival, int(each.returned)
    return tracked


@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_that_of_the_orchestrator(seed: int) -> None:
    """The oracle: the orchestrator's order of all waiting requests, computed before each placement."""
    draws = random.Random(seed)
    by_tenant = seed % 2 == 0
    weights = {"north": 3.0, "south": 1.0} if by_tenant else {"x": 3.0, "y": 0.5}
    waiting = [
        need(
            draws.choice(("x", "y", None)),
            draws.randint(1, 9),
            tenant=draws.choice(("north", "south", None)),
            priority=draws.choice((0, 0, 1)),
            answer_by=draws.choice((None, None, 1e9)),
            returned=draws.random() < 0.1,
        )
        for _ in range(60)
    ]
    router = one_place(**{"tenant_weights" if by_tenant else "weights": weights})
    for each in waiting:
        send(router, each)
    shares = FairShares(weights, tenant_of if by_tenant else adapter_of)
    left = [tracked_of(each) for each in waiting]
    running = tracked_of(need())
    shares.add(running)
    shares.count_service(running, 1)
    for tracked in left:
        shares.add(tracked)
    expected: list[str] = []
    num_entries = 1
    while left:
        shares.remove(running)
        running = next(entry_order(left, [shares], lambda: num_entries))  # noqa: B023
        left.remove(running)
        num_entries += not running.num_preemptions
        shares.count_service(running, running.new_tokens)
        expected.append(running.request_id)
    assert drained(router) == expected


def test_the_waiting_bound_holds_against_any_newer_requests() -> None:
    """A request of the lowest priority and the worst share, with five older ones, against an endless supply."""
    router = one_place(tenant_weights={"low": 1e-6})
    older = [need(tenant="low", priority=-1) for _ in range(5)]
    last = need(tenant="low", priority=-1)
    for each in (*older, last):
        send(router, each)
    num_before = 0
    (running,) = router.replicas["a"].holds
    while running != last.request_id:
        send(router, need(tenant="high", priority=9, answer_by=1e9))
        ((each, _),) = router.ended(running)
        running = each.request_id
        num_before += 1
    assert OLDEST_EVERY * 5 <= num_before <= OLDEST_EVERY * (len(older) + 1), "it took turns, and within the bound"


def test_requests_that_cannot_be_served_are_refused() -> None:
    router = routed("placed", "a", Room(1, 10), over=1.0)
    send(router, need())
    late, huge, fine = need(answer_by=5.0), need(blocks=11), need(blocks=10)
    for each in (late, huge, fine):
        assert send(router, each) is None
    assert [(r.need, r.reason) for r in router.refuse(4.0, 0.5).refusals] == [(huge, "room")]
    assert [(r.need, r.reason) for r in router.refuse(4.0, 1.5).refusals] == [(late, "deadline")]
    assert router.num_waiting == 1
    assert Router().refuse(0.0).refusals == []
    assert router.ended("unknown") == []


def test_a_request_that_only_a_draining_replica_could_take_holds_up_none() -> None:
    router = routed("placed", "ab")
    router.bar("a", "x")
    router.drain("b")
    stuck, fine = need("x"), need()
    assert send(router, stuck) is None and send(router, fine) is None
    refused = router.refuse(0.0)
    assert [(r.need, r.reason) for r in refused.refusals] == [(stuck, "room")]
    assert [(placed.need, placed.replica) for placed in refused.placed] == [(fine, "a")]
    router.drain("a")
    assert send(router, waiting := need("x")) is None
    assert not router.refuse(0.0).refusals, "all drain, so one of them may serve again"
    assert [placed.need for placed in router.drain("b", False)] == [waiting]


def test_a_replica_may_join_while_it_drains() -> None:
    router = Router()
    assert send(router, waiting := need()) is None
    assert router.join("a", Room(4, 100), draining=True) == []
    assert [placed.need for placed in router.drain("a", False)] == [waiting]


def test_without_replicas_requests_wait_whatever_their_size() -> None:
    router = Router()
    each = need("x", blocks=50)
    assert router.submit(each) == [] and router.refuse(0.0).refusals == []
    assert router.join("a", Room(4, 100)) == [(each, "a")]


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_late_report_is_corrected_by_what_was_sent_since() -> None:
    router = routed("placed", "a", Room(8, 100))
    first, second = need("x", blocks=30), need("y", blocks=40)
    send(router, first)
    send(router, second)
    replica = router.replicas["a"]
    # Made after the first request, which holds more than estimated.
    router.report("a", Report(60, taken=1, ended=0, adapters={"z"}))
    assert replica.free_blocks == 60 - 40
    assert replica.resident.keys() == {"x", "y", "z"}, "both are needed, whether or not they are loaded already"
    assert send(router, need(blocks=21)) is None, "without the correction it would be sent"
    router.ended(first.request_id)
    router.report("a", Report(20, taken=2, ended=0))
    assert replica.free_blocks == 50 - 21, "the report does not include the end; the third request was sent then"
    router.report("a", Report(45, taken=3, ended=1))
    assert replica.free_blocks == 45


def test_a_report_may_include_an_end_before_the_router_knows_of_it() -> None:
    router = routed("placed", "a", Room(8, 100))
    first, second = need(blocks=30), need(blocks=40)
    send(router, first)
    send(router, second)
    replica = router.replicas["a"]
    router.report("a", Report(60, taken=2, ended=1))
    router.ended(first.request_id)
    assert replica.free_blocks == 60, "its blocks are free already"
    router.ended(second.request_id)
    assert replica.free_blocks == 100


def test_requests_of_other_front_ends_take_places() -> None:
    router = routed("placed", "ab", Room(4, 100))
    router.report("a", Report(50, taken=0, ended=0, num_requests=5))
    assert [send(router, need()) for _ in range(8)] == ["b"] * 5 + ["a"] + ["b"] + [None]
    router.report("a", Report(90, taken=1, ended=0, num_requests=1))
    assert router.num_waiting == 0


def test_of_several_front_ends_each_has_a_share_of_a_replica_whatever_the_others_have() -> None:
    """Otherwise one whose own requests always wait would take each place that becomes free."""
    router = routed("placed", "a", Room(4, 100))  # 6 requests at a time
    assert [send(router, need(blocks=60)) for _ in range(2)] == ["a", None]
    router.report("a", Report(-20, taken=1, ended=0, num_requests=9, num_sharing=2))
    check_integrity(router)
    assert router.num_waiting == 0
    assert [send(router, need()) for _ in range(2)] == [None, None]
    router.report("a", Report(90, taken=2, ended=0, num_requests=5, num_sharing=2))
    check_integrity(router)
    assert router.num_waiting == 1  # one place was free


# -- moves ------------------------------------------------------------------------------------------------------------


def test_the_newest_request_is_evicted_and_does_not_return_there() -> None:
    router = routed("punica", "ab", Room(4, 10))
    older, newer = need(blocks=5), need(blocks=4)
    assert send(router, older) == send(router, newer) == "b"
    router.grew(older.request_id, 7)
    assert router.replicas["b"].free_blocks == -1
    eviction = router.evict("b")
    assert eviction is not None and eviction.need == newer._replace(returned=True)
    assert eviction.placed == [(eviction.need, "a")]
    assert router.evict("b") is None, "the last request remains"


def test_consolidation_moves_all_requests_of_a_replica_or_none() -> None:
    router = routed("punica", "ab", Room(4, 10))
    needs = [need(blocks=blocks) for blocks in (4, 4, 4, 4)]
    assert [send(router, each) for each in needs] == ["b", "b", "a", "a"]
    assert router.consolidate() == [], "b has two blocks left"
    router.ended(needs[0].request_id)
    assert router.consolidate() == [], "b takes one of two"
    router.ended(needs[2].request_id)
    assert router.consolidate() == [(needs[3].request_id, "a", "b")]
    router.ended(needs[1].request_id)
    assert router.advice().release == ("a",)
    distributing = routed("placed", "ab", Room(4, 10))
    for _ in range(2):
        send(distributing, need())
    assert distributing.consolidate() == []


def test_rebalancing_moves_the_newest_requests_with_their_adapter() -> None:
    router = routed("where_it_is", "ab", Room(8, 100, adapters=2))
    needs = [need("x") for _ in range(8)]
    assert {send(router, each) for each in needs} == {"b"}
    moves = router.rebalance(1.0, MoveCosts(load_s=0.5, again_s=0.1))
    assert len(moves) == 3 and {move.target for move in moves} == {"a"}
    assert {move.request_id for move in moves} == {each.request_id for each in needs[5:]}
    assert router.rebalance(1.0, MoveCosts(load_s=0.5, again_s=0.1)) == []
    check_integrity(router)


def test_advice_follows_the_load() -> None:
    router = routed("punica", "ab", Room(4, 1000))
    assert router.advice() == (0, ("a",), ()), "one of the idle ones is kept"
    needs = [need() for _ in range(8)]
    for each in needs:
        send(router, each)
    assert router.advice() == (1, (), ())
    for _ in range(5):
        send(router, need())
    assert router.advice().add == 2, "five wait, a batch is four"
    assert Router().advice().add == 1
    alone = routed("placed", "a", Room(4, 1000))
    for _ in range(4):
        send(alone, need())
    alone.leave("a")
    for _ in range(9):
        send(alone, need())
    assert alone.advice().add == 1, "without a replica the size of a batch is not known"
    spread = routed("placed", "abcd", Room(8, 1000))
    for _ in range(9):
        send(spread, need())
    assert spread.advice() == (0, (), ("d",)), "nine requests on three replicas are below half a batch each"
    spread.ended(next(iter(spread.replicas["a"].holds)))
    send(spread, need())
    assert spread.advice() == (0, (), ("d",)), "the same one while the load is low"
    for _ in range(4):
        send(spread, need())
    assert spread.advice() == (0, (), ())


def test_invalid_settings_are_reported() -> None:
    with pytest.raises(BadConfig, match=r"no routing rule named 'random'; choose one of placed, punica"):
        Router("random")
    with pytest.raises(BadConfig, match=r"over is 0\.5"):
        Router(over=0.5)


QUEUEING = [name for name, rule in RULES.items() if rule.queues]


# -- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(RULES))
def test_only_replicas_with_the_content_get_an_answer(rule: str) -> None:
    router = routed(rule, "abc", Room(20, 1000))
    router.lack("a", "x", "1")
    router.lack("c", "x", "1")
    began = [need("x", version="1") for _ in range(5)]
    assert {send(router, each) for each in began} == {"b"}
    # Other contents of this adapter, and other adapters, are not concerned.
    router.lack("b", "x", "2")
    router.lack("b", "y", "1")
    assert {send(router, need("x", version="2")), send(router, need("y", version="1"))} <= {"a", "c"}
    router.lack("b", "x", "1")
    router.lack("a", "x", "1", False)
    assert send(router, need("x", version="1")) == "a"
    check_integrity(router)


@pytest.mark.parametrize("rule", QUEUEING)
def test_a_drained_answer_is_not_moved_to_other_content(rule: str) -> None:
    router = routed(rule, "ab")
    name = send(router, first := need("x"))
    other = "b" if name == "a" else "a"
    router.lack(other, "x", "1")
    router.began(first.request_id, "1")
    assert name is not None
    router.drain(name)
    assert router.consolidate() == []
    router.lack(other, "x", "1", False)
    assert [move[:] for move in router.consolidate()] == [(first.request_id, name, other)]


@pytest.mark.parametrize("rule", QUEUEING)
def test_a_drained_replica_takes_an_answer_that_no_other_can_continue(rule: str) -> None:
    router = routed(rule, "ab")
    router.drain("a")
    router.lack("b", "x", "1")
    returned = need("x", version="1", returned=True)
    assert send(router, returned) is None
    placed = router.refuse(0.0)
    assert placed.refusals == [] and placed.placed == [(returned, "a")]
    router.lack("a", "x", "1")
    # One that is lost is no reason to refuse another one of the same size and adapter, which waits for a place.
    lost, other = (need("x", blocks=100, version=version, returned=True) for version in ("1", "2"))
    for each in (need(blocks=50, returned=True), lost, other):
        send(router, each)
    assert router.refuse(0.0).refusals == [Refusal(lost, "content")] and router.is_waiting(other.request_id)
    router.ended(other.request_id)
    large = need("x", blocks=1000, version="1")
    assert send(router, large) is None
    assert router.refuse(0.0).refusals == [Refusal(large, "room")]
    check_integrity(router)


# -- recalls: draining while requests wait ----------------------------------------------------------------------------


def full() -> Router:
    """Replica a has requests 0 to 3, replica b 4 to 7; 8 and 9 wait. a drains."""
    router = Router("placed", over=1.0)
    router.join("a", Room(4, 100))
    for number in range(4):
        router.submit(Need(str(number), None, 5, number, answer_by=1.0))
    router.join("b", Room(4, 100))
    for number in range(4, 10):
        router.submit(Need(str(number), None, 5, number, priority=5))
    assert router.num_waiting == 2
    router.drain("a")
    return router


def test_requests_of_a_draining_replica_get_the_next_places() -> None:
    router = full()
    assert router.consolidate() == []
    recalled = router.recall()
    assert [need.request_id for need in recalled.needs] == ["3", "2"]  # the newest
    assert recalled.placed == [] and router.recall().needs == []  # two at a time
    router.refuse(2.0)  # after the bound on their first answer
    assert [place.need.request_id for place in router.ended("4")] == ["2"]
    assert [need.request_id for need in router.recall().needs] == ["1"]
    for number in (5, 6, 7):
        router.ended(str(number))
        router.recall()
    assert [router.where(str(number)) for number in range(4)] == ["b"] * 4
    assert not router.replicas["a"].holds and router.num_waiting == 2  # 8 and 9, in spite of their priority
    check_integrity(router)


def test_a_request_that_fits_nowhere_else_stays() -> None:
    router = full()
    router.bar("b", "x")
    router.drain("a", False)
    router.ended("2")
    router.ended("8")
    router.ended("9")
    (place,) = router.submit(Need("barred", "x", 1, 20))
    assert place.replica == "a"
    router.grew("3", 101)
    router.submit(Need("waits", None, 5, 21))
    router.drain("a")
    assert [need.request_id for need in router.recall(9).needs] == ["1", "0"]
    assert {router.where(name) for name in ("3", "barred")} == {"a"}


def test_nothing_is_recalled_unless_requests_wait_and_others_serve() -> None:
    router = full()
    router.drain("b")
    assert router.recall().needs == []
    router.drain("b", False)
    router.ended("8")
    router.ended("9")
    assert router.num_waiting == 0 and router.recall().needs == []
    router.ended("4")
    assert [move.request_id for move in router.consolidate()] == ["0"]


# -- the index of first blocks ----------------------------------------------------------------------------------------


def keys(text: str) -> tuple[bytes, ...]:
    """Chained keys, as those of `TokenChain`: each includes all before it."""
    return tuple(text[: place + 1].encode() for place in range(len(text)))


def test_leading_blocks_are_counted_by_replica() -> None:
    index = PrefixIndex()
    for name in "ab":
        index.add(name, 100)
    index.record("a", keys("frame"), 8)
    index.record("b", keys("fresh"), 8)
    assert index.known(keys("framed")) == {"a": 5, "b": 2}
    assert index.known(keys("other")) == index.known(()) == {}
    index.remove("a")
    assert index.known(keys("framed")) == {"b": 2} and len(index) == 5


def test_blocks_expire_with_the_blocks_computed_since() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    index.record("a", keys("old"), 4)
    index.record("a", keys("new"), 6)
    assert index.known(keys("old")) == {"a": 3}, "ten blocks fit"
    index.record("a", keys("new"), 5)
    assert index.known(keys("old")) == {} and index.known(keys("new")) == {"a": 3}


def test_use_renews_and_the_number_of_keys_is_bounded() -> None:
    index = PrefixIndex()
    index.add("a", 10)
    index.record("a", keys("old"), 4)
    index.record("a", keys("x"), 5)
    index.record("a", keys("old"), 5)
    index.record("a", keys("y"), 5)
    assert index.known(keys("old")) == {"a": 3}
    index.add("b", 10**9)
    for number in range(20_000):
        index.record("b", (str(number).encode(),), 1)
    assert len(index) < 10_000 and index.known((b"19999",)) == {"b": 1} and index.known((b"1",)) == {}
