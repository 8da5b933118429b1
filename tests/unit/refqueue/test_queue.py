"""What a queue does when all is well, when somebody sleeps, and when it is given nonsense."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.unit.refqueue.peers import DEADLINE_S, Blob, digest, some_bytes
from vllmdiag.refqueue import Dialect, Handle, MessageQueue, errors
from vllmdiag.refqueue.framing import INLINE_BELOW, MOST_BUFFERS
from vllmdiag.refqueue.reader import LocalReader
from vllmdiag.refqueue.writer import Writer

QUICK = Dialect(busy_loop_s=0.05)
"""Readers sleep soon."""


@contextmanager
def queue_of(
    n: int = 1, *, dialect: Dialect = QUICK, reader_dialect: Dialect | None = None, **shape: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A ready writer and its readers, all in this process."""
    shape = {"max_chunk_bytes": 4096, "max_chunks": 3, "n_local_reader": n, **shape}
    with ExitStack() as stack:
        writer = stack.enter_context(MessageQueue(n, dialect=dialect, **shape))
        readers = [
            stack.enter_context(
                MessageQueue.create_from_handle(writer.export_handle(), rank, dialect=reader_dialect or dialect)
            )
            for rank in range(n)
        ]
        waiting = [threading.Thread(target=reader.wait_until_ready, args=(DEADLINE_S,)) for reader in readers]
        for thread in waiting:
            thread.start()
        writer.wait_until_ready(DEADLINE_S)
        for thread in waiting:
            thread.join()
        yield writer, readers


class InThread(threading.Thread):
    """A call in a thread; `answer` is what it returned, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: tuple[Any, BaseException | None] | None = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._call(), None
        except BaseException as error:  # noqa: BLE001 - `answer` raises it
            self._outcome = None, error

    def answer(self) -> Any:
        self.join(DEADLINE_S)
        assert self._outcome is not None, "the call has not returned"
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def asleep(reader: MessageQueue) -> threading.Event:
    """Is set each time that the reader goes to sleep in poll."""
    end = reader._end
    assert isinstance(end, LocalReader)
    poller, seen = end._spin._poller, threading.Event()
    poll = poller.poll

    def poll_and_tell(timeout: int | None = None) -> Any:
        if not poll(0):
            seen.set()
        return poll(timeout)

    poller.poll = poll_and_tell  # type: ignore[method-assign]
    return seen


def ping_count(writer: MessageQueue) -> list[int]:
    """The slots whose message was pinged, from now on."""
    end = writer._end
    assert isinstance(end, Writer)
    assert end.pinger is not None
    pinged: list[int] = []
    pinger, ping = end.pinger, end.pinger._ping
    pinger._ping = lambda: (pinged.append(len(pinged)), ping())[1]  # type: ignore[method-assign, func-returns-value]
    return pinged


def subscribed(writer: MessageQueue) -> None:
    """Wait until every reader can be pinged."""
    end = writer._end
    assert isinstance(end, Writer)
    assert end.pinger is not None
    deadline = time.monotonic() + DEADLINE_S
    while end.pinger._not_subscribed:
        assert time.monotonic() < deadline
        end.pinger._ping()


def test_messages_of_every_kind_reach_every_reader() -> None:
    sent = [None, {"a": 1}, b"", b"x" * 5000, Blob(some_bytes(10)), [Blob(some_bytes(INLINE_BELOW))] * 2]
    with queue_of(2, max_chunk_bytes=3 * INLINE_BELOW) as (writer, readers):
        for message in sent:
            writer.enqueue(message)
            assert [digest(reader.dequeue(DEADLINE_S)) for reader in readers] == [digest(message)] * 2


def test_what_came_out_of_band_can_be_written_to_and_outlives_its_slot() -> None:
    with queue_of(max_chunk_bytes=2 * INLINE_BELOW, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(Blob(bytearray(b"\x01" * INLINE_BELOW)))
        got = reader.dequeue(DEADLINE_S)
        writer.enqueue(Blob(bytearray(b"\x02" * INLINE_BELOW)))
        got.data[0] = 7
        assert bytes(got.data) == b"\x07" + b"\x01" * (INLINE_BELOW - 1)


@pytest.mark.parametrize("ip", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.needs("ipv6"))])
def test_remote_readers_get_everything_by_tcp(ip: str) -> None:
    with queue_of(2, n_local_reader=1, connect_ip=ip) as (writer, readers):
        assert writer.export_handle().remote_addr_ipv6 is (":" in ip)
        for message in ("small", Blob(some_bytes(INLINE_BELOW))):
            writer.enqueue(message)
            assert [digest(reader.dequeue(DEADLINE_S)) for reader in readers] == [digest(message)] * 2
        with pytest.raises(errors.QueueTimeoutError):
            readers[1].dequeue(timeout=0.01)


def test_a_queue_without_local_readers_makes_no_ring() -> None:
    with queue_of(1, n_local_reader=0) as (writer, (reader,)):
        assert writer.ring is None
        assert writer.export_handle().buffer_handle is None
        writer.enqueue("far away")
        assert reader.dequeue(DEADLINE_S) == "far away"


def test_ranks_of_the_readers_need_not_be_their_flags() -> None:
    with MessageQueue(2, 2, [4, 7]) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 7) as reader:
            assert isinstance(reader._end, LocalReader)
            assert reader._end._reader == 1


def test_waiting_for_readers_goes_on_where_a_timeout_broke_it_off() -> None:
    with MessageQueue(2, 2) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0) as first:
            with pytest.raises(errors.QueueTimeoutError, match=r"not all readers subscribed within 0\.2 s"):
                writer.wait_until_ready(0.2)
            with pytest.raises(errors.QueueTimeoutError, match="READY"):
                first.wait_until_ready(0)
            with MessageQueue.create_from_handle(handle, 1) as second:
                waiting = [InThread(lambda r=r: r.wait_until_ready(DEADLINE_S)) for r in (first, second)]  # type: ignore[misc]
                writer.wait_until_ready(DEADLINE_S)
                assert [thread.answer() for thread in waiting] == [None, None]


# --- sleeping and waking ---


def test_a_sleeping_reader_is_woken_by_the_ping() -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0.05, recheck_s=None)) as (writer, (reader,)):
        sleeps = asleep(reader)
        for message in ("first", "second", "third"):
            got = InThread(reader.dequeue)
            assert sleeps.wait(DEADLINE_S)
            writer.enqueue(message)
            assert got.answer() == message
            sleeps.clear()


def test_a_lost_ping_is_a_hang_until_the_next_message_where_readers_do_not_look_again() -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0.05, recheck_s=None)) as (writer, (reader,)):
        sleeps = asleep(reader)
        got = InThread(reader.dequeue)
        assert sleeps.wait(DEADLINE_S)
        writer.lose_pings()
        writer.enqueue("lost on")
        assert writer.ring is not None
        assert writer.ring.can_read(0, 0)
        got.join(0.5)
        assert got.is_alive()
        reader.shutdown()  # the one thing that still wakes it: and then it looks
        with pytest.raises(errors.QueueCancelledError):
            got.answer()
        assert reader.dequeue(timeout=0) == "lost on"


def test_a_lost_ping_is_a_delay_where_readers_look_again() -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0.05, recheck_s=0.2)) as (writer, (reader,)):
        sleeps = asleep(reader)
        got = InThread(reader.dequeue)
        assert sleeps.wait(DEADLINE_S)
        writer.lose_pings()
        writer.enqueue("found")
        assert got.answer() == "found"


def test_pings_are_left_out_while_readers_are_awake_and_sent_when_they_may_sleep() -> None:
    with queue_of(2, dialect=Dialect(busy_loop_s=10 * DEADLINE_S)) as (writer, readers):
        subscribed(writer)
        pinged = ping_count(writer)
        for number in range(200):
            writer.enqueue(number)
            assert [reader.dequeue(DEADLINE_S) for reader in readers] == [number] * 2
        assert len(pinged) == 2
    with queue_of(2, dialect=Dialect(busy_loop_s=0)) as (writer, readers):
        pinged = ping_count(writer)
        for number in range(20):
            writer.enqueue(number)
            assert [reader.dequeue(DEADLINE_S) for reader in readers] == [number] * 2
        assert len(pinged) == 20


def test_a_reader_that_lags_needs_no_ping_but_one_that_does_not_gets_it() -> None:
    with queue_of(2, dialect=Dialect(busy_loop_s=10 * DEADLINE_S), max_chunks=10) as (writer, readers):
        subscribed(writer)
        pinged = ping_count(writer)
        writer.enqueue(0)
        writer.enqueue(1)
        writer.enqueue(2)
        assert len(pinged) == 1
        assert [readers[0].dequeue(DEADLINE_S) for _ in range(3)] == [0, 1, 2]
        writer.enqueue(3)
        assert len(pinged) == 2


def test_before_all_have_subscribed_every_message_is_pinged() -> None:
    with MessageQueue(1, 1) as writer:
        pinged = ping_count(writer)
        for number in range(5):
            writer.enqueue(number)
        assert len(pinged) == 5


def test_the_next_message_makes_a_lost_ping_good() -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0.05, recheck_s=None), max_chunks=10) as (writer, (reader,)):
        sleeps = asleep(reader)
        got = InThread(reader.dequeue)
        assert sleeps.wait(DEADLINE_S)
        end = writer._end
        assert isinstance(end, Writer)
        assert end.pinger is not None
        end.pinger.lost = True
        writer.enqueue("late")
        end.pinger.lost = False
        time.sleep(0.05)  # pings are left out for half of busy_loop_s at most
        writer.enqueue("next")
        assert got.answer() == "late"


def test_a_reader_stopped_between_the_flags_and_the_clock_still_finds_a_message_without_a_ping() -> None:
    busy_loop_s = 1.0
    with queue_of(dialect=Dialect(busy_loop_s=busy_loop_s, recheck_s=None)) as (writer, (reader,)):
        pinged = ping_count(writer)
        end = reader._end
        assert isinstance(end, LocalReader)
        number = 0
        while True:  # until one is sent without a ping, which takes three on a quiet machine
            before = len(pinged)
            writer.enqueue(number)
            if len(pinged) == before:
                break
            assert reader.dequeue(DEADLINE_S) == number
            number += 1
        # Here the reader has looked before that message was written, and is stopped for longer than it would spin.
        end._spin._last_read = time.monotonic() - 2 * busy_loop_s
        events: list[Any] = []
        poller, poll = end._spin._poller, end._spin._poller.poll

        def poll_and_keep(timeout: int | None = None) -> Any:
            events.append(poll(timeout))
            return events[-1]

        poller.poll = poll_and_keep  # type: ignore[method-assign]
        end._spin.wait(DEADLINE_S * 1000 // 6)
        assert events[0], "it slept, and no ping was there to end that"
        assert reader.dequeue(timeout=0) == number


def test_shutdown_wakes_a_sleeping_reader_and_a_writer_that_waits() -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0.05, recheck_s=None)) as (writer, (reader,)):
        sleeps = asleep(reader)
        reading = InThread(reader.dequeue)
        assert sleeps.wait(DEADLINE_S)
        reader.shutdown()
        with pytest.raises(errors.QueueCancelledError, match="cancelled"):
            reading.answer()
        for number in range(3):
            writer.enqueue(number)
        writing = InThread(lambda: writer.enqueue("one too many"))
        writer.shutdown()
        with pytest.raises(errors.QueueCancelledError):
            writing.answer()


@pytest.mark.parametrize("n_local", [1, 0], ids=["local", "remote"])
def test_a_set_event_ends_a_wait(n_local: int) -> None:
    with queue_of(dialect=Dialect(busy_loop_s=0, recheck_s=None), n_local_reader=n_local) as (writer, (reader,)):
        cancel = threading.Event()
        reading = InThread(lambda: reader.dequeue(cancel=cancel))
        cancel.set()
        with pytest.raises(errors.QueueCancelledError):
            reading.answer()
        writer.enqueue("still there")
        assert reader.dequeue(DEADLINE_S) == "still there"


def test_a_long_wait_is_logged_in_the_words_of_vllm_unless_it_is_normal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllmdiag.refqueue")
    with queue_of(dialect=Dialect(busy_loop_s=0, warn_every_s=0.05)) as (_, (reader,)):
        with pytest.raises(errors.QueueTimeoutError):
            reader.dequeue(timeout=0.2, indefinite=True)
        assert caplog.messages == []
        with pytest.raises(errors.QueueTimeoutError):
            reader.dequeue(timeout=0.2)
    assert caplog.messages
    assert all(line.startswith("No available shared memory broadcast block found in ") for line in caplog.messages)


# --- bad input: a typed error, and the queue works on ---


class Unloadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise LookupError("not here")


def _nothing_was_sent(writer: MessageQueue, reader: MessageQueue) -> bool:
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0)
    writer.enqueue("next")
    return bool(reader.dequeue(DEADLINE_S) == "next")


@pytest.mark.parametrize("obj", [lambda: None, threading.Lock(), Blob(memoryview(b"abcd")[::2])], ids=str)
def test_an_object_that_cannot_be_pickled_is_refused(obj: Any) -> None:
    with queue_of() as (writer, (reader,)):
        with pytest.raises(errors.NotPicklableError):
            writer.enqueue(obj)
        assert _nothing_was_sent(writer, reader)


def test_more_buffers_than_can_be_counted_are_refused() -> None:
    block = bytearray(INLINE_BELOW)
    with queue_of() as (writer, (reader,)):
        with pytest.raises(errors.TooManyBuffersError, match=f"{MOST_BUFFERS + 1} buffers"):
            writer.enqueue([pickle.PickleBuffer(block) for _ in range(MOST_BUFFERS)])
        assert _nothing_was_sent(writer, reader)


def test_a_timeout_of_the_writer_sends_nothing() -> None:
    with queue_of(2, max_chunks=2) as (writer, readers):
        writer.enqueue(0)
        writer.enqueue(1)
        assert readers[0].dequeue(DEADLINE_S) == 0
        with pytest.raises(TimeoutError) as caught:
            writer.enqueue("lost", timeout=0.05)
        assert isinstance(caught.value, errors.QueueTimeoutError)
        assert readers[1].dequeue(DEADLINE_S) == 0
        writer.enqueue(2)
        assert [readers[0].dequeue(DEADLINE_S) for _ in range(2)] == [1, 2]
        assert [readers[1].dequeue(DEADLINE_S) for _ in range(2)] == [1, 2]


def test_a_long_message_that_comes_too_late_is_asked_for_again() -> None:
    with queue_of(max_chunk_bytes=64) as (writer, (reader,)):
        end = writer._end
        assert isinstance(end, Writer)
        assert end._local is not None
        held: list[Any] = []
        send = end._local.send_multipart
        end._local.send_multipart = held.append  # type: ignore[method-assign, assignment]
        writer.enqueue(b"long" * 100)
        with pytest.raises(errors.QueueTimeoutError):
            reader.dequeue(timeout=0.05)
        end._local.send_multipart = send  # type: ignore[method-assign]
        send(held[0])
        writer.enqueue("next")
        assert [reader.dequeue(DEADLINE_S) for _ in range(2)] == [b"long" * 100, "next"]


@pytest.mark.parametrize("padding", [0, 100], ids=["in the slot", "by the socket"])
def test_a_message_that_cannot_be_unpickled_counts_as_read(padding: int) -> None:
    with queue_of(max_chunk_bytes=128, max_chunks=1) as (writer, (reader,)):
        writer.enqueue([Unloadable(), b"x" * padding])
        with pytest.raises(errors.BadMessageError, match="cannot be unpickled") as caught:
            reader.dequeue(DEADLINE_S)
        assert isinstance(caught.value.__cause__, LookupError)
        writer.enqueue("next", DEADLINE_S)
        assert reader.dequeue(DEADLINE_S) == "next"


def test_each_end_does_only_its_own_part() -> None:
    with queue_of() as (writer, (reader,)):
        with pytest.raises(errors.WrongRoleError):
            writer.dequeue()
        with pytest.raises(errors.WrongRoleError):
            reader.enqueue("x")
        assert _nothing_was_sent(writer, reader)


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_reader_that_is_not_foreseen_cannot_attach(rank: int) -> None:
    with queue_of(2) as (writer, readers):
        with pytest.raises(errors.NoSuchReaderError):
            MessageQueue.create_from_handle(writer.export_handle(), rank)
        more_ranks = msgspec.structs.replace(writer.export_handle(), local_reader_ranks=(0, 1, rank))
        with pytest.raises(errors.NoSuchReaderError, match="readers 0 to 1, none 2"):
            MessageQueue.create_from_handle(more_ranks, rank)
        writer.enqueue("fine")
        assert [reader.dequeue(DEADLINE_S) for reader in readers] == ["fine"] * 2


@pytest.mark.parametrize(
    "shape",
    [
        {"n_reader": 0, "n_local_reader": 0},
        {"n_reader": 1, "n_local_reader": 2},
        {"n_reader": 1, "n_local_reader": 0, "connect_ip": "localhost"},
        {"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [1]},
        {"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [1, 1]},
        {"n_reader": 1, "n_local_reader": 1, "max_chunks": 0},
        {"n_reader": 1, "n_local_reader": 1, "max_chunk_bytes": 4},
        {"n_reader": 1, "n_local_reader": 1, "max_chunk_bytes": 1 << 32},
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused(shape: dict[str, Any]) -> None:
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(errors.QueueArgumentError):
        MessageQueue(**shape)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if _ours(name)]


def _ours(name: str) -> bool:
    with open("/proc/self/maps") as maps:
        return name in maps.read()


# --- handles ---


@dataclass
class HandleBeforePings:
    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    local_subscribe_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False


@dataclass
class HandleWithArena(HandleBeforePings):
    local_notify_addr: str | None = None
    tensor_arena_handle: tuple[int, int, int, str] | None = None


def test_a_handle_survives_pickle_json_and_the_way_to_vllm_and_back() -> None:
    with MessageQueue(3, 2, connect_ip="127.0.0.1") as writer:
        handle = writer.export_handle()
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert msgspec.json.decode(msgspec.json.encode(handle), type=Handle) == handle
    theirs = handle.to_vllm(HandleWithArena)
    assert theirs.local_reader_ranks == [0, 1]
    assert theirs.buffer_handle == handle.buffer_handle
    assert Handle.from_vllm(theirs) == handle
    without_pings = msgspec.structs.replace(handle, local_notify_addr=None)
    assert Handle.from_vllm(handle.to_vllm(HandleBeforePings)) == without_pings


def test_a_writer_with_a_tensor_arena_is_refused() -> None:
    with pytest.raises(errors.QueueArgumentError, match="arena"):
        Handle.from_vllm(HandleWithArena(tensor_arena_handle=(1, 2, 3, "psm_x")))


@pytest.mark.parametrize(
    ("version", "counted", "pings", "recheck_s"),
    [
        ("0.8.5", False, False, None),
        ("0.11.0", False, False, None),
        ("0.11.2", True, False, None),
        ("0.18.0", True, True, None),
        ("0.26.0", True, True, None),
        ("0.27.0", True, True, 5.0),
        ("0.32.0", True, True, 5.0),
    ],
)
def test_each_release_has_its_dialect(version: str, counted: bool, pings: bool, recheck_s: float | None) -> None:
    dialect = Dialect.of(version)
    assert (dialect.counted, dialect.pings, dialect.recheck_s) == (counted, pings, recheck_s)
    with MessageQueue(1, 1, dialect=dialect) as writer:
        assert (writer.export_handle().local_notify_addr is not None) is pings


def test_readers_of_a_release_without_pings_never_sleep() -> None:
    with queue_of(dialect=Dialect(pings=False, busy_loop_s=0)) as (writer, (reader,)):
        sleeps = asleep(reader)
        with pytest.raises(errors.QueueTimeoutError):
            reader.dequeue(timeout=0.1)
        assert not sleeps.is_set()
        writer.enqueue("x")
        assert reader.dequeue(DEADLINE_S) == "x"


def test_ctrl_c_in_the_middle_of_a_write_leaves_a_queue_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with queue_of() as (writer, (reader,)):
        end = writer._end
        assert isinstance(end, Writer)

        def interrupted(*_: Any) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("not reached")

        with monkeypatch.context() as patched:
            patched.setattr(end._framing, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.enqueue("broken off")
        assert _nothing_was_sent(writer, reader)
