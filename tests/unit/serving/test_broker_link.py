from __future__ import annotations

import asyncio

from tests.unit.serving.broker_stack import broker_stack


def test_a_client_links_to_a_broker_that_was_up_before_it() -> None:
    # The handshake with such a broker is over within a millisecond; it was missed one time in 20.
    async def scenario() -> None:
        async with stack.client("first") as client:
            while not client.alive:
                await asyncio.sleep(0.05)
        for number in range(60):
            async with stack.client(f"gateway-{number}") as client:
                await client.stats()

    with broker_stack() as stack:
        asyncio.run(scenario())
