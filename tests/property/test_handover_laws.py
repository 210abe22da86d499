"""Laws of the handover between a gateway and its recorder: whoever is killed, whenever, each call is spooled once and in order, or counted."""

import asyncio
import tempfile
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_support import settings_of

from spanloop.collectors.gateway_finished import Finished
from spanloop.collectors.gateway_handover import Messages, Status, packed
from spanloop.collectors.gateway_sender import Sender, _Line
from spanloop.collectors.gateway_spool import Spool

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def finished(number):
    return Finished(
        tenant="default", shape="chat", call_id=str(number), request=b"{}", answer=b"", folds=False, runtime="", sticky="",
        sticky_source="prompt", route="pass", policy_version="", exploration=0.0, asked_tokens=False, start_ns=1, end_ns=2,
        status=200, error="", parent=None, task_key="", turn_type="", server_address="", server_port=0,
    )  # fmt: skip


class Socket(asyncio.Transport):
    """What was written waits until it is read."""

    def __init__(self):
        super().__init__()
        self.messages, self.inbox = Messages(), []

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.inbox += self.messages.feed(bytes(data))


class Recorder:
    """A recorder at its own pace over a real spool: what is in its socket it takes and spools when told to."""

    def __init__(self, sender, folder, *, resumed, owner):
        self.spool = Spool(folder, max_bytes=10**7, segment_bytes=400, resumed=resumed, owner=owner)
        self.sender, self.socket = sender, Socket()
        self.line = _Line(sender._told, sender._send)
        self.line.connection_made(self.socket)
        sender._line = self.line

    def take(self, count):
        if taken := self.socket.inbox[:count]:
            self.spool.append(taken)
            del self.socket.inbox[: len(taken)]

    def tell(self):
        status = Status(
            str(self.spool.folder), self.spool.next, 0, self.spool.waiting, self.spool.num_bytes, 0, 0, 0,
            log_fails=False, lost=dict(self.spool.lost),
        )  # fmt: skip
        self.sender._told(self.line, status)

    def kill(self):
        self.spool.abandon()
        self.sender._line = None


def spooled(folder):
    """Ids of the calls on a spool, in order."""
    spool, found = Spool(folder, max_bytes=10**7), []
    while (batch := spool.read(100)) is not None:
        found += batch.payloads
        spool.done(batch, len(batch.payloads))
    spool.abandon()
    return found


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "put", "take", "tell", "kill recorder"]), st.integers(1, 4)),
    max_size=40,
)


@given(STEPS, st.booleans())
@MANY
def test_a_call_is_spooled_once_whenever_the_recorder_is_killed(steps, last_words):
    with tempfile.TemporaryDirectory() as name:
        folder, sender, number, begun = Path(name) / "0", Sender(settings_of(Path(name))), 0, 0
        recorder = Recorder(sender, folder, resumed=False, owner=1)
        for what, count in steps:
            if what == "begin":
                begun += 1
                sender.begin()
            elif what == "put":
                for _ in range(count):
                    sender.begin()
                    sender.put(finished(number))
                    number += 1
            elif what == "take":
                recorder.take(count)
            elif what == "tell":
                recorder.tell()
            else:
                recorder.kill()
                sender._ended()
                recorder = Recorder(sender, folder, resumed=bool(sender._status.folder), owner=1)
        assert not sender.lost
        kept = sender.depth
        if last_words:  # the gateway lives on: all of it arrives
            recorder.tell()
            recorder.take(10**6)
            recorder.tell()
            assert (sender.depth, sender.waiting) == (0, number)
            kept = 0
        unspooled = number - recorder.spool.next
        met = recorder.line.is_met
        recorder.kill()  # and the gateway with it
        after = Spool(folder, max_bytes=10**7)
        if met:
            lost = {"killed": unspooled, "in_flight": begun}
            assert after.lost == {k: v for k, v in lost.items() if v}
        assert kept >= unspooled
        after.abandon()
        found = spooled(folder)
        want = [sender_message(n) for n in range(number - unspooled)]
        assert found == want


def sender_message(number):
    return msgspec.msgpack.encode(finished(number))


@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(1, 30), max_size=40))
@MANY
def test_messages_come_out_whole_in_any_pieces(messages, cuts):
    data, found, at, reader = b"".join(map(packed, messages)), [], 0, Messages()
    for cut in [*cuts, len(data)]:
        found += reader.feed(data[at : at + cut])
        at += cut
    assert found == messages


def test_what_does_not_fit_is_counted_and_the_rest_arrives(tmp_path):
    sender = Sender(settings_of(tmp_path, gateway={"queue_max": 3}))
    assert [sender.put(finished(n)) for n in range(5)] == [True, True, True, False, False]
    assert (sender.depth, sender.num_lost) == (3, 2)
    recorder = Recorder(sender, tmp_path / "0", resumed=False, owner=1)
    recorder.tell()
    recorder.take(2)
    recorder.tell()
    assert sender.put(finished(5))
    recorder.kill()
    after = Spool(tmp_path / "0", max_bytes=10**7)
    assert after.lost == {"killed": 2}  # the two that did not fit were told
    after.abandon()
    assert spooled(tmp_path / "0") == [sender_message(0), sender_message(1)]


def test_a_recorder_with_another_spool_gets_all_that_is_kept(tmp_path):
    sender = Sender(settings_of(tmp_path))
    first = Recorder(sender, tmp_path / "0", resumed=False, owner=1)
    first.tell()
    for n in range(4):
        sender.put(finished(n))
    first.take(2)
    first.kill()
    sender._ended()
    second = Recorder(sender, tmp_path / "1", resumed=False, owner=1)
    second.spool.append([b"of somebody else"])
    second.tell()
    second.take(10)
    second.tell()
    assert sender.depth == 0
    second.kill()
    assert spooled(tmp_path / "1")[1:] == [sender_message(n) for n in range(4)]
