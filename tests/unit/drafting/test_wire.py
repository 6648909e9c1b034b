"""Verifiers and drafters over real sockets: lost, hung, refused, fed garbage."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest
import zmq

from mirror_sd.drafting.client import DraftClient
from mirror_sd.drafting.frames import (
    MAX_FRAME_BYTES,
    MOST_ITEMS,
    MOST_LINES,
    Commit,
    Hello,
    Line,
    Open,
    Proposal,
    Proposals,
    Ready,
    Refused,
    Update,
    decode_from_drafter,
    decode_to_drafter,
    encode,
    encode_update,
)
from mirror_sd.drafting.server import DraftServer
from mirror_sd.errors import ConfigError, ProtocolError
from mirror_sd.speculative.drafters.remote import Terms
from tests.unit.drafting.drafters import drafter, request
from tests.unit.drafting.test_draft_engine import continuation

HELLO = Hello(verifier="v", vocab_size=64, tokenizer="words")


@contextlib.contextmanager
def serving(endpoint, engine=None, tokenizer="words"):
    server = DraftServer(engine or drafter(), endpoint, tokenizer=tokenizer, device_class="cpu")
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(5)
        assert not thread.is_alive()


@contextlib.contextmanager
def connected(*endpoints, hello=HELLO, clock=time.monotonic):
    named = [(f"d{i}", endpoint, Terms()) for i, endpoint in enumerate(endpoints)]
    client = DraftClient(named, hello, clock)
    try:
        yield client
    finally:
        client.close_all()


def until(client, claim, timeout_s=5.0, what=""):
    """Turns the client's wheel until `claim` of what came holds: proposals, and who is gone."""
    proposals, gone = [], []
    deadline = time.monotonic() + timeout_s
    while not claim(proposals, gone):
        assert time.monotonic() < deadline, f"not in time: {what}"
        client.flush()
        more, lost = client.receive(0.01)
        proposals += more
        gone += lost
    return proposals, gone


def opens(client, request):
    """Whether there is a drafter for it, which is then asked to draft."""
    if client.assign(request.session, len(request.tokens)) is None:
        return False
    client.open(request)
    return True


def ready(client, count=1):
    until(client, lambda *_: client.ready == count, what=f"{count} drafters")


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/d0.sock"


def test_a_session_is_drafted_for_from_its_opening_to_its_end(endpoint):
    engine = drafter()
    with serving(endpoint, engine), connected(endpoint) as client:
        ready(client)
        assert opens(client, request([5, 6, 7], session=3))
        found, _ = until(client, lambda p, _: p and len(p[-1].lines[0].tokens) >= 10)
        expected = continuation([5, 6, 7], 5)
        assert list(found[-1].lines[0].tokens[:5]) == expected
        client.commit(Commit(3, 3, tuple(expected), 4))
        found, _ = until(client, lambda p, _: p and p[-1].base == 8)
        client.close(3)
        until(client, lambda *_: engine.sessions == 0)


@pytest.mark.parametrize("endpoints", ["ipc", "tcp"])
def test_many_verifiers_share_drafters_and_each_gets_its_own_drafts(tmp_path, endpoints):
    if endpoints == "tcp":
        from mirror_sd.supervisor.preflight import free_ports

        places = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    else:
        places = [f"ipc://{tmp_path}/a.sock", f"ipc://{tmp_path}/b.sock"]
    engines = [drafter(), drafter()]
    with (
        serving(places[0], engines[0]),
        serving(places[1], engines[1]),
        connected(*places) as one,
        connected(*places) as two,
    ):
        for client, begin in ((one, 10), (two, 30)):
            ready(client, 2)
            for session in (1, 2):
                assert opens(client, request([begin + session], session=session))
            client.flush()
        for client, begin in ((one, 10), (two, 30)):
            found, _ = until(client, lambda p, _: {1, 2} <= {item.session for item in p})
            for item in found:
                tokens = item.lines[0].tokens
                assert list(tokens) == continuation([begin + item.session], len(tokens))
        assert [engine.sessions for engine in engines] == [2, 2]


def test_garbage_from_a_stranger_harms_nobody(endpoint):
    with (
        serving(endpoint) as server,
        connected(endpoint) as client,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        ready(client)
        opens(client, request([5, 6, 7], session=3))
        stranger.linger = 0
        stranger.connect(endpoint)
        for junk in (
            b"",
            b"\x00",
            b"\x01",
            b"\x01\xc1",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x01" + b"\x91" * 5000,
            encode(Ready(instance="x", device="d", engine="e", precision="p", max_context=1)),
            encode(Update(closed=(3,), commits=(Commit(3, 0, (1,), 4),))),
            encode(HELLO)[:-3],
        ):
            stranger.send(junk)
        stranger.send_multipart([b"\x01", b"two", b"three"])
        stranger.send(encode(HELLO))
        # A stranger that has said hello is a verifier like others, and its sessions its own.
        for bad in (
            Update(closed=(3, 3, 99)),
            Update(opened=(request([], session=3), request([99], session=4))),
            Update(opened=(request([5], session=-1, length=-1),)),
            Update(commits=(Commit(3, 3, (1,), 4), Commit(2**63, -(2**63), (), 0))),
        ):
            stranger.send(encode(bad))
        found, gone = until(client, lambda p, _: p and len(p[-1].lines[0].tokens) >= 10)
        assert gone == []
        assert list(found[-1].lines[0].tokens) == continuation([5, 6, 7], 10)
        answers = [decode_from_drafter(stranger.recv()) for _ in range(3)]
        assert all(isinstance(answer, Refused | Ready) for answer in answers)
        assert server._engine.sessions >= 1


def test_a_drafter_of_another_tokenizer_is_not_drafted_with(endpoint, caplog):
    with serving(endpoint, tokenizer="other words"), connected(endpoint) as client:
        with pytest.raises(AssertionError):
            until(client, lambda *_: client.ready, timeout_s=0.5)
        assert not opens(client, request())


@pytest.mark.parametrize("size", [1, 8, 63, 64, 72])
def test_a_target_whose_vocabulary_is_padded_otherwise_gets_drafts_of_its_own_ids(endpoint, size):
    hello = msgspec.structs.replace(HELLO, vocab_size=size)
    with serving(endpoint), connected(endpoint, hello=hello) as client:
        ready(client)
        assert opens(client, request([0, 0], session=1))
        found, _ = until(client, lambda p, _: p and len(p[-1].lines[0].tokens) >= 10)
        drafted = {token for line in found[-1].lines for token in line.tokens}
        assert max(drafted) < size
        client.commit(Commit(1, 2, (min(size, 64),), 4))
        opens(client, request([0], session=2, params={"logit_bias": {min(size, 64): 1.0}}))
        _, gone = until(client, lambda _, g: len(g) == 2)
        assert sorted(gone) == [1, 2] and client.ready == 1


def test_a_drafter_that_has_forgotten_its_verifier_is_greeted_anew(endpoint):
    with serving(endpoint) as server, connected(endpoint) as client:
        ready(client)
        opens(client, request([5, 6, 7], session=1))
        until(client, lambda p, _: p)
        server._welcome.clear()
        client.commit(Commit(1, 3, (1,), 4))
        _, gone = until(client, lambda _, g: g)
        assert gone == [1]
        ready(client)
        assert opens(client, request([5, 6, 7], session=2))
        until(client, lambda p, _: p and p[-1].session == 2)


def test_a_drafter_that_has_no_room_refuses_and_keeps_the_others(endpoint):
    with serving(endpoint, drafter(sessions=1)), connected(endpoint) as client:
        ready(client)
        opens(client, request([5, 6, 7], session=1))
        opens(client, request([5, 6, 7], session=2))
        found, gone = until(client, lambda p, g: p and g)
        assert gone == [2] and {item.session for item in found} == {1}


def test_a_sequence_goes_to_a_drafter_whose_context_it_fits(tmp_path):
    short, long = drafter(), drafter()
    short.max_context = 8
    places = [f"ipc://{tmp_path}/{name}.sock" for name in "ab"]
    with (
        serving(places[0], short),
        serving(places[1], long),
        connected(*places) as client,
    ):
        ready(client, 2)
        for session in range(1, 5):
            assert opens(client, request([5] * 8, session=session))
        assert not opens(client, request([5] * 512, session=5))
        until(client, lambda p, _: {1, 2, 3, 4} <= {item.session for item in p})
        assert (short.sessions, long.sessions) == (0, 4)


def test_sessions_of_a_drafter_that_ended_are_gone_and_its_successor_takes_new_ones(endpoint):
    with connected(endpoint) as client:
        with serving(endpoint):
            ready(client)
            opens(client, request([5, 6, 7], session=1))
            until(client, lambda p, _: p)
        _, gone = until(client, lambda _, g: g, what="the loss is seen")
        assert gone == [1] and client.ready == 0 and not opens(client, request(session=2))
        with serving(endpoint):
            ready(client)
            assert opens(client, request([5, 6, 7], session=3))
            found, _ = until(client, lambda p, _: p)
            assert found[-1].session == 3


def test_a_drafter_that_hangs_is_given_up_and_taken_back_when_it_answers(endpoint):
    engine = drafter()
    goes_on = threading.Event()
    goes_on.set()
    step = engine.step

    def hanging():
        goes_on.wait()
        return step()

    engine.step = hanging
    with serving(endpoint, engine), connected(endpoint) as client:
        ready(client)
        opens(client, request([5, 6, 7], session=1))
        until(client, lambda p, _: p)
        goes_on.clear()
        client.was_late([1])
        client.was_late([1])
        assert not client.is_answering(1)
        _, gone = until(client, lambda _, g: g, what="it is given up")
        assert gone == [1] and client.ready == 0
        goes_on.set()
        ready(client)
        until(client, lambda *_: engine.sessions == 0, what="its old session has ended")


def test_a_drafter_that_sends_garbage_is_left_alone_for_half_a_minute(endpoint):
    passed = [0.0]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as evil:
        evil.linger = 0
        evil.bind(endpoint)
        with connected(endpoint, clock=lambda: time.monotonic() + passed[0]) as client:
            deadline = time.monotonic() + 5
            while not evil.poll(10):
                client.flush()
                assert time.monotonic() < deadline
            verifier, hello = evil.recv_multipart()
            assert decode_to_drafter(hello) == HELLO
            good = Ready(instance="x", device="d", engine="e", precision="p", max_context=512)
            evil.send_multipart([verifier, encode(good)])
            ready(client)
            opens(client, request(session=1))
            foreign = drafter()
            foreign.open(7, request(session=7))
            evil.send_multipart([verifier, encode(Proposals(items=(foreign.step()[0][1],)))])
            for junk in (b"", b"\x02\x80", b"\x01junk"):
                evil.send_multipart([verifier, junk])
            evil.send_multipart([verifier, b"\x01", b"more"])
            found, gone = until(client, lambda _, g: g)
            assert found == [] and gone == [1] and client.bad_frames >= 3
            evil.send_multipart([verifier, encode(good)])
            with pytest.raises(AssertionError):
                until(client, lambda *_: client.ready, timeout_s=0.3)

            def is_ready(*_):
                while evil.poll(0):
                    if decode_to_drafter(evil.recv_multipart()[1]) == HELLO:
                        evil.send_multipart([verifier, encode(good)])
                return client.ready == 1

            passed[0] = 31.0
            until(client, is_ready, what="it is taken back")


@pytest.mark.parametrize(
    "data", [b"", b"\x02", b"\x01", b"\x01\x80", b"\x01" + b"\xff" * 9, b"\x01\x93" * 4000]
)
def test_what_is_no_frame_is_told_as_one_error(data):
    for decode in (decode_to_drafter, decode_from_drafter):
        with pytest.raises(ProtocolError):
            decode(data)


def test_frames_are_what_they_were(endpoint):
    for frame in (
        HELLO,
        Update(closed=(1,), opened=(request(),), commits=(Commit(1, 2, (3,), 4),)),
    ):
        assert decode_to_drafter(encode(frame)) == frame
    assert isinstance(decode_to_drafter(encode(Update(opened=(request(),)))).opened[0], Open)


def test_an_update_too_large_for_a_frame_goes_in_several_that_say_the_same():
    opened = tuple(request([2**31] * 120_000, session=n) for n in range(16))
    commits = tuple(Commit(n, 120_000, (7,), 4) for n in range(16))
    frames = list(encode_update(Update(closed=(1, 2), opened=opened, commits=commits)))
    assert len(frames) > 1 and max(map(len, frames)) <= MAX_FRAME_BYTES
    read = [decode_to_drafter(data) for data in frames]
    assert sum((update.closed for update in read), ()) == (1, 2)
    assert sum((update.opened for update in read), ()) == opened
    assert sum((update.commits for update in read), ()) == commits
    kinds = [[bool(u.closed), bool(u.opened), bool(u.commits)].index(True) for u in read]
    assert kinds == sorted(kinds), "ends, then new sequences, then new tokens"
    many = list(encode_update(Update(closed=tuple(range(5_000)))))
    assert sum((decode_to_drafter(data).closed for data in many), ()) == tuple(range(5_000))
    assert len(list(encode_update(Update(closed=(1,), commits=commits)))) == 1


def test_prompts_too_large_for_one_frame_cost_no_session(endpoint):
    engine, opened = drafter(), []
    engine.max_context = 2_000_000
    engine.open = lambda key, request, vocab_size: opened.append(request.session)
    with serving(endpoint, engine), connected(endpoint) as client:
        ready(client)
        for session in range(16):
            assert opens(client, request([2**31] * 120_000, session=session))
        assert not opens(client, request([2**31] * 1_000_000, session=16))
        _, gone = until(client, lambda *_: len(opened) == 16)
        assert gone == [] and client.ready == 1 and opened == list(range(16))


@pytest.mark.parametrize("junk", ["lines", "proposals"])
def test_a_frame_of_more_than_a_drafter_could_mean_is_not_read(junk):
    empty = Line(0, (), b"")
    many = (empty,) * (MOST_LINES + 1 if junk == "lines" else 1)
    items = (Proposal(1, 3, many, 0.0, 0.0),) * (1 if junk == "lines" else MOST_ITEMS + 1)
    with pytest.raises(ProtocolError, match="length <="):
        decode_from_drafter(encode(Proposals(items=items)))
    fewer = (Proposal(1, 3, many[:MOST_LINES], 0.0, 0.0),) * min(len(items), MOST_ITEMS)
    assert decode_from_drafter(encode(Proposals(items=fewer))).items == fewer


def test_an_endpoint_that_is_taken_is_an_error_that_names_it():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        server = DraftServer(
            drafter(), f"tcp://127.0.0.1:{port}", tokenizer="w", device_class="cpu"
        )
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            server.run()
