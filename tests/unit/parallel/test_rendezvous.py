"""The ranks of an attempt agree on a token of their own, whatever an earlier attempt left in the launcher's store."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.parallel import rendezvous
from megatron_ext.parallel.rendezvous import agree
from tests.support.patched_in_one_module import replace_in

LONG = timedelta(seconds=60)


def arrive(pool: ThreadPoolExecutor, store: Store, ranks: Sequence[int], world_size: int) -> list[Future[str]]:
    return [pool.submit(agree, store, rank, world_size, LONG) for rank in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_an_attempt_agree_and_attempts_differ(world_size: int):
    store = HashStore()
    tokens = []
    with ThreadPoolExecutor(world_size) as pool:
        for _ in range(3):
            (token,) = {answer.result() for answer in arrive(pool, store, range(world_size), world_size)}
            tokens.append(token)
    assert len(set(tokens)) == 3


def test_ranks_that_come_before_rank_0_do_not_take_the_token_of_an_earlier_attempt():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        (old,) = {answer.result() for answer in arrive(pool, store, range(3), 3)}
        early = arrive(pool, store, [1, 2], 3)
        time.sleep(0.5)
        assert not any(answer.done() for answer in early), "rank 0 of this attempt is not there"
        new = agree(store, 0, 3, LONG)
        assert [answer.result() for answer in early] == [new, new]
    assert new != old


def test_an_attempt_that_broke_off_in_its_meeting_does_not_mislead_the_next():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        with pytest.raises(PeerLostError, match=r"ranks 1, 2 did not come to the start of the run\. tools/doctor"):
            agree(store, 0, 3, timedelta(seconds=0.1))
        with pytest.raises(PeerLostError, match="not all ranks came to the start"):
            agree(store, 1, 3, timedelta(seconds=0.1))
        assert len({answer.result() for answer in arrive(pool, store, range(3), 3)}) == 1


def test_who_waits_for_rank_0_in_vain_says_so():
    with pytest.raises(PeerLostError, match="rank 0 did not come to the start of the run"):
        agree(HashStore(), 1, 2, timedelta(seconds=0.1))


def test_one_rank_that_does_not_come_is_one():
    with pytest.raises(PeerLostError, match=r"^rank 1 did not come to the start of the run"):
        agree(HashStore(), 0, 2, timedelta(seconds=0.05))


def test_ranks_that_were_told_different_numbers_of_ranks_all_say_so():
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(agree, store, rank, size, LONG) for rank, size in ((0, 2), (1, 4))]
        for answer in told:
            with pytest.raises(ConfigurationError, match=r"WORLD_SIZE is 2 for rank 0, but 4 for rank 1"):
                answer.result()


def test_the_launchers_store_is_shared_by_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has keys of its own there."""
    store = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda timeout: (store, 0, 1))
    found, rank, size = rendezvous.meet(timedelta(seconds=5))
    found.set("key", "value")
    assert (rank, size, store.check(["key"]), found.check(["key"])) == (0, 1, False, True)
    [token] = [store.get("meeting/token").decode()]
    assert store.get(f"attempt/{token}/key") == b"value"


def test_pauses_grow_to_a_quarter_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    replace_in(monkeypatch, rendezvous, "time", sleep=slept.append)
    pause = 0.01
    for _ in range(12):
        pause = rendezvous._wait(pause)
    assert slept[:3] == pytest.approx([0.01, 0.015, 0.0225])
    assert slept[-1] == pause == 0.25
