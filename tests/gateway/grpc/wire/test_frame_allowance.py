"""A client whose frames ask for nothing loses its connection; one that keeps to the protocol never does."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from gateway.grpc.server import GrpcServer
from gateway.grpc.wire.frame_allowance import FRAMES, FRAMES_PER_S, FrameAllowance
from tests.gateway.grpc.wire.peer import INFER, LIVE, STREAM, Peer, peer_of
from tests.gateway.hostile import frame

TOLD = (ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_useless_frames")
DATA, PRIORITY, RST_STREAM, SETTINGS, WINDOW_UPDATE, UNKNOWN = 0, 2, 3, 4, 8, 0xEE
ACK, PADDED = 1, 8
USELESS = {
    "settings": frame(SETTINGS, 0, 0, b""),
    "window of the streams": frame(SETTINGS, 0, 0, struct.pack(">HI", SettingCodes.INITIAL_WINDOW_SIZE, 70_000)),
    "acknowledgements": frame(SETTINGS, ACK, 0, b""),
    "priorities": frame(PRIORITY, 0, 3, struct.pack(">IB", 0, 1)),
    "priorities of the call": frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 1)),
    "window of the connection": frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
    "window of the call": frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)),
    "pongs": frame(6, ACK, 0, bytes(8)),
    "no data": frame(DATA, 0, 1, b""),
    "padding": frame(DATA, PADDED, 1, b"\x05" + bytes(5)),
    "one byte": frame(DATA, 0, 1, b"\0"),
    "unknown": frame(UNKNOWN, 0, 0, b""),
    "resets": frame(RST_STREAM, 0, 1, bytes(4)),
}


@pytest.mark.parametrize("useless", USELESS.values(), ids=USELESS.keys())
async def test_a_client_of_useless_frames_is_told_off(rpc_server: GrpcServer, useless: bytes) -> None:
    async with peer_of(rpc_server.port) as flooding, peer_of(rpc_server.port) as other:
        flooding.call(STREAM)
        flooding.writer.write(frame(DATA, 0, 1, b"\0" + (100_000).to_bytes(4)))
        flooding.writer.write(useless * (FRAMES // 2))
        assert await is_served(flooding)
        assert not flooding.h2.goaways

        flooding.writer.write(useless * FRAMES)
        await flooding.until(lambda: flooding.closed)

        assert [TOLD] == [said[1:] for said in flooding.h2.goaways]
        assert await is_served(other)


async def test_thousands_of_settings_in_one_frame_are_not_read(rpc_server: GrpcServer) -> None:
    async with peer_of(rpc_server.port) as flooding, peer_of(rpc_server.port) as usual:
        usual.writer.write(frame(SETTINGS, 0, 0, struct.pack(">HI", SettingCodes.MAX_CONCURRENT_STREAMS, 7) * 32))
        assert await is_served(usual)

        flooding.writer.write(frame(SETTINGS, 0, 0, struct.pack(">HI", SettingCodes.MAX_CONCURRENT_STREAMS, 7) * 33))
        await flooding.until(lambda: flooding.closed)
        assert [ErrorCodes.ENHANCE_YOUR_CALM] == [code for _, code, _ in flooding.h2.goaways]


async def test_a_client_may_acknowledge_each_frame_of_an_answer_and_reset_each_call(
    rpc_server: GrpcServer, twin: Any
) -> None:
    """As curl and browsers do, and clients whose calls run out of time."""
    twin.respond = twin.hold
    async with peer_of(rpc_server.port) as peer:
        for _ in range(4):
            numbers = [peer.call(INFER) for _ in range(FRAMES)]
            for number in numbers:
                peer.say(number, bytes(20))
                peer.h2.reset_stream(number, ErrorCodes.CANCEL)
            peer.flush()
            await peer.writer.drain()
        for _ in range(FRAMES):
            number = peer.call(LIVE)
            peer.say(number, b"")
            peer.writer.write(2 * USELESS["window of the connection"] + 2 * USELESS["priorities"])
            await peer.status(number)

        assert await is_served(peer)
        assert not peer.h2.goaways


def test_what_is_used_up_comes_back_with_time() -> None:
    allowance, now = FrameAllowance(0.0), 0.0

    def use(frames: int) -> bool:
        allowance.left -= frames
        return allowance.is_spent(now)

    assert not use(FRAMES)
    now += 1.0
    assert not use(FRAMES_PER_S)
    assert use(1)
    now += 1e6
    assert not use(0)
    assert not use(FRAMES)
    assert use(1), "however long it was quiet, no more comes back than there was"


def test_a_client_that_pings_now_and_then_does_so_for_ever() -> None:
    allowance = FrameAllowance(0.0)

    for second in range(10 * FRAMES):
        allowance.left -= FRAMES_PER_S
        assert not allowance.is_spent(float(second))


async def is_served(peer: Peer) -> bool:
    number = peer.call(LIVE)
    peer.say(number, b"")
    return await peer.status(number) == ("0", "")
