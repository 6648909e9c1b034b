from __future__ import annotations

import asyncio
import contextlib

from mirror_sd.errors import NoWorker
from mirror_sd.serving.broker_client import BrokerClient
from tests.unit.serving.broker_stack import broker_stack


async def wait_until_answered(client: BrokerClient) -> None:
    while True:
        with contextlib.suppress(NoWorker):
            await client.stats()
            return


def test_a_client_links_to_a_broker_that_was_up_before_it() -> None:
    # The handshake with such a broker is over within a millisecond; it was missed one time in 20.
    async def scenario() -> None:
        async with stack.client("first") as client:
            await wait_until_answered(client)
        for number in range(60):
            async with stack.client(f"gateway-{number}") as client:
                await client.stats()

    with broker_stack() as stack:
        asyncio.run(scenario())
