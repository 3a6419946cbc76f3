"""Channels over real socket pairs: whole messages, descriptors, and the journal that outlives its reader."""

import fcntl
import os
import select
import signal
import socket

import msgspec
import pytest

from aqd import channel
from aqd.channel import MAX_MESSAGE, ChannelClosed, Peeked, Peer


@pytest.fixture
def ends():
    ours, theirs = channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


def in_child(work):
    """Runs ``work`` in a fork, which then dies by SIGKILL; waits for its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


# --- messages


def test_messages_are_whole_and_in_order(ends):
    ours, theirs = ends
    for message in (b"a", b"bb" * 1000, b"c" * (MAX_MESSAGE - 1)):
        channel.send(ours, message)
    assert channel.receive(theirs) == (b"a", [])
    assert channel.receive(theirs) == (b"bb" * 1000, [])
    assert channel.receive(theirs) == (b"c" * (MAX_MESSAGE - 1), [])


@pytest.mark.parametrize("size", [0, MAX_MESSAGE, MAX_MESSAGE + 1])
def test_an_empty_or_too_large_message_is_refused(ends, size):
    ours, theirs = ends
    with pytest.raises(ValueError, match="bytes"):
        channel.send(ours, b"x" * size)
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive(theirs)


def test_a_message_that_was_cut_off_is_refused_and_its_descriptors_closed(ends):
    ours, theirs = ends
    socket.send_fds(ours, [b"x" * (MAX_MESSAGE + 10)], [0])
    channel.send(ours, b"next")
    with pytest.raises(ValueError, match="cut off"):
        channel.receive(theirs)
    assert channel.receive(theirs) == (b"next", [])


def test_more_descriptors_than_expected_are_refused_and_closed(ends):
    ours, theirs = ends
    socket.send_fds(ours, [b"x"], [0] * 12)
    with pytest.raises(ValueError, match="cut off"):
        channel.receive(theirs)


def test_descriptors_arrive_close_on_exec(ends):
    ours, theirs = ends
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    channel.send(ours, b"take", [writer, reader])
    os.close(writer)
    data, (got_writer, got_reader) = channel.receive(theirs)
    assert data == b"take"
    assert not os.get_inheritable(got_writer)
    assert not os.get_inheritable(got_reader)
    os.write(got_writer, b"through")
    assert os.read(reader, 10) == b"through"
    for fd in (reader, got_reader, got_writer):
        os.close(fd)


def test_both_ends_are_close_on_exec_and_one_taken_over_too(ends):
    ours, theirs = ends
    assert not ours.get_inheritable()
    fd = os.dup(theirs.fileno())
    os.set_inheritable(fd, True)
    taken = channel.from_fd(fd)
    assert not taken.get_inheritable()
    channel.send(taken, b"hello")
    assert channel.receive(ours) == (b"hello", [])
    taken.close()


def test_the_end_is_told_apart_from_silence(ends):
    ours, theirs = ends
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        channel.receive(theirs)
    channel.send(ours, b"last words")
    ours.close()
    assert channel.receive(theirs) == (b"last words", [])
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            channel.receive(theirs)
    with pytest.raises(ChannelClosed):
        channel.send(theirs, b"anybody?")


def test_after_a_death_with_an_unread_message_all_it_had_sent_still_comes(ends):
    ours, theirs = ends
    channel.send(ours, b"never read")

    def worker():
        ours.close()
        for n in range(3):
            channel.send(theirs, b"outcome %d" % n)

    in_child(worker)
    theirs.close()
    assert [channel.receive(ours)[0] for _ in range(3)] == [b"outcome 0", b"outcome 1", b"outcome 2"]
    with pytest.raises(ChannelClosed):
        channel.receive(ours)


# --- the journal


def test_a_journal_peeks_in_order_and_forgets_only_what_is_consumed(ends):
    ours, theirs = ends
    journal = Peeked(theirs)
    assert journal.peek() is None
    for n in range(4):
        channel.send(ours, b"%d" % n * (n + 1))
    assert journal.peek() == (b"0", [])
    assert journal.peek() == (b"11", [])
    journal.consume()
    assert journal.peek() == (b"222", [])
    journal.consume()
    journal.consume()
    assert journal.peek() == (b"3333", [])
    assert journal.peek() is None
    channel.send(ours, b"later")
    assert journal.peek() == (b"later", [])
    successor = Peeked(theirs)
    assert successor.peek() == (b"3333", [])
    assert successor.peek() == (b"later", [])


def test_the_journal_survives_the_death_of_its_reader_and_of_its_writer(ends):
    ours, theirs = ends

    def writer():
        for n in range(5):
            channel.send(ours, b"outcome %d" % n)

    in_child(writer)
    ours.close()

    def reader():
        journal = Peeked(theirs)
        for _ in range(4):
            assert journal.peek() is not None
        journal.consume()

    in_child(reader)
    successor = Peeked(theirs)
    found = [successor.peek() for _ in range(4)]
    assert found == [(b"outcome %d" % n, []) for n in range(1, 5)]
    with pytest.raises(ChannelClosed):
        successor.peek()


def test_descriptors_in_the_journal_are_there_for_the_successor_too(ends):
    ours, theirs = ends
    fd = channel.to_memfd(b"a large result")
    channel.send(ours, b"done", [fd])
    os.close(fd)
    channel.send(ours, b"done too")

    def reader():
        _, (got,) = Peeked(theirs).peek()
        assert channel.from_memfd(got, 100) == b"a large result"

    in_child(reader)
    successor = Peeked(theirs)
    data, (got,) = successor.peek()
    assert data == b"done"
    assert not os.get_inheritable(got)
    assert channel.from_memfd(got, 100) == b"a large result"
    successor.consume()
    assert successor.peek() == (b"done too", [])


def test_consuming_wakes_nobody_and_a_new_message_does(ends):
    """Edge-triggered: outcomes that wait to be recorded must not make the loop spin."""
    ours, theirs = ends
    journal = Peeked(theirs)
    with select.epoll() as epoll:
        epoll.register(theirs, select.EPOLLIN | select.EPOLLET)
        channel.send(ours, b"one")
        assert epoll.poll(1)
        assert journal.peek() == (b"one", [])
        assert not epoll.poll(0)
        channel.send(ours, b"two")
        assert epoll.poll(1)
        journal.consume()
        assert not epoll.poll(0)
        assert journal.peek() == (b"two", [])


def test_what_a_worker_may_have_outstanding_fits_into_its_socket(ends):
    """The writer blocks when the reader only peeks; 100 outcomes (a frame) must always fit."""
    ours, theirs = ends
    ours.setblocking(False)
    journal = Peeked(theirs)
    for n in range(200):
        channel.send(ours, b"%064d" % n)
        assert journal.peek() is not None


# --- memfds


def test_a_memfd_is_sealed_and_bounded():
    data = b"x" * 1_000_000
    fd = channel.to_memfd(data)
    assert not os.get_inheritable(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"y", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 10)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    copy = os.dup(fd)
    assert channel.from_memfd(fd, len(data)) == data
    with pytest.raises(ValueError, match="limit"):
        channel.from_memfd(copy, len(data) - 1)
    with pytest.raises(OSError):
        os.fstat(copy)  # closed, refused or not


# --- peers


def test_a_peer_keeps_what_a_slow_reader_cannot_take(ends):
    ours, theirs = ends
    peer = Peer(ours, msgspec.msgpack.encode)
    sent = 0
    while peer.flush():
        peer.send([sent, "x" * 20_000])
        sent += 1
        assert sent < 1000, "a socket without bound"
    for _ in range(50):
        peer.send([sent, "x" * 20_000])
        sent += 1
    got = []
    theirs.setblocking(False)
    while len(got) < sent:
        try:
            got.append(msgspec.msgpack.decode(channel.receive(theirs)[0])[0])
        except BlockingIOError:
            peer.flush()
    assert got == list(range(sent))
    assert peer.flush()


def test_a_peer_tells_the_end_after_the_last_message(ends):
    ours, theirs = ends
    peer = Peer(ours, msgspec.msgpack.encode)
    channel.send(theirs, b"one")
    channel.send(theirs, b"two")
    assert [data for data, _ in peer.received()] == [b"one", b"two"]
    assert list(peer.received()) == []
    channel.send(theirs, b"three")
    theirs.close()
    messages = peer.received()
    assert next(messages) == (b"three", [])
    with pytest.raises(ChannelClosed):
        next(messages)
    with pytest.raises(ChannelClosed):
        peer.send("too late")


def test_a_message_that_only_rings_is_skipped_and_no_other(ends):
    ours, theirs = ends
    peeked = Peeked(ours)
    assert peeked.skip(b"bell") is None
    for message in (b"bell", b"bell", b"bells", b"bell"):
        theirs.send(message)
    assert peeked.skip(b"bell") is True
    assert peeked.skip(b"bell") is True
    assert peeked.skip(b"bell") is False
    assert peeked.peek() == (b"bells", [])
    assert Peeked(ours).peek() == (b"bells", []), "not consumed"
    with open(__file__) as file:
        channel.send(theirs, b"with a descriptor", [file.fileno()])
    peeked = Peeked(ours)
    assert peeked.skip(b"bell") is False
    peeked.consume()
    assert peeked.skip(b"bell") is True
    assert peeked.skip(b"bell") is False
    found = peeked.peek()
    assert found is not None
    assert found[0] == b"with a descriptor"
    assert len(found[1]) == 1
    os.close(found[1][0])
