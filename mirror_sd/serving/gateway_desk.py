"""The broker's dealings with gateways."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from mirror_sd.errors import CapacityError, InvalidRequest, NoWorker
from mirror_sd.messages import Cancel, FromGateway, Ping, Pong, Stats, StatsRequest, Submit
from mirror_sd.scheduler.ticket import TIERS, Ticket
from mirror_sd.serving.outbox import Outbox
from mirror_sd.serving.peers import Gateway
from mirror_sd.serving.request_book import RequestBook

_log = logging.getLogger(__name__)


class GatewayDesk:
    """`classes` may be asked for; any other becomes the first of them, because names that nobody
    has would make unbounded queues and metric labels."""

    def __init__(
        self,
        book: RequestBook,
        outbox: Outbox,
        *,
        instance: str,
        classes: tuple[str, ...],
        patience_s: float,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        stats: Callable[[int], Stats],
    ) -> None:
        self._book = book
        self._outbox = outbox
        self._instance = instance
        self._classes = classes
        self._patience_s = patience_s
        self._clock = clock
        self._unix_clock = unix_clock
        self._stats = stats
        self._gateways: dict[bytes, Gateway] = {}
        self._sessions = 0
        self.is_closed = False

    def pids(self) -> list[int]:
        return [gateway.pid for gateway in self._gateways.values()]

    def handle(self, identity: bytes, message: FromGateway, frame: bytes) -> None:
        """Act on a frame and its decoded message."""
        gateway = self._hear(identity)
        match message:
            case Submit():
                self._submit(identity, message, frame)
            case Cancel(request_id=request_id):
                if self._book.owner(request_id) == identity:
                    _log.info("%s: cancelled", request_id)
                    self._book.withdraw(request_id)
            case Ping():
                gateway.pid = message.pid
                self._outbox.send("gateway", identity, Pong(instance=gateway.session))
            case StatsRequest():
                self._outbox.send("gateway", identity, self._stats(message.token))

    def lose(self, identity: bytes, reason: str) -> None:
        """Cancel all its requests; an unknown gateway is ignored."""
        if self._gateways.pop(identity, None) is None:
            return
        request_ids = self._book.owned_by(identity)
        name = identity.decode("utf-8", "backslashreplace")
        _log.warning("gateway %s lost (%s); %d requests cancelled", name, reason, len(request_ids))
        for request_id in request_ids:
            _log.info("%s: cancelled with its gateway", request_id)
            self._book.withdraw(request_id)

    def process_died(self, pid: int) -> None:
        for gateway in [g for g in self._gateways.values() if g.pid == pid]:
            self.lose(gateway.identity, "its process ended")

    def tick(self) -> None:
        """Give up the gateways that have been silent for too long."""
        now = self._clock()
        for gateway in list(self._gateways.values()):
            if now - gateway.heard_at > self._patience_s:
                self.lose(gateway.identity, f"silent for {now - gateway.heard_at:.1f} s")

    def forgive(self) -> None:
        """Count silence from now."""
        for gateway in self._gateways.values():
            gateway.heard_at = self._clock()

    def _hear(self, identity: bytes) -> Gateway:
        gateway = self._gateways.get(identity)
        if gateway is None:
            self._sessions += 1
            session = f"{self._instance}.{self._sessions}"
            gateway = self._gateways[identity] = Gateway(identity, session, self._clock())
            _log.info("gateway %s joined", identity.decode("utf-8", "backslashreplace"))
        gateway.heard_at = self._clock()
        return gateway

    def _submit(self, identity: bytes, submit: Submit, frame: bytes) -> None:
        request_id = submit.request_id
        owner = self._book.owner(request_id)
        if owner == identity:
            return
        try:
            if owner is not None:
                raise InvalidRequest(f"request id {request_id} is in use by another gateway")
            if self.is_closed:
                raise NoWorker("the server is shutting down")
            self._book.open(identity, submit, self._ticket(submit), frame)
        except (InvalidRequest, CapacityError) as error:
            _log.warning("%s: refused: %s", request_id, error)
            self._outbox.fail(identity, request_id, error)

    def _ticket(self, submit: Submit) -> Ticket:
        is_known = submit.device_class in self._classes
        arrived_at = self._clock() - submit.age_s(self._unix_clock())
        timeout_s = math.inf if submit.timeout_s is None else submit.timeout_s
        return Ticket(
            request_id=submit.request_id,
            device_class=submit.device_class if is_known else self._classes[0],
            tier=submit.tier if submit.tier in TIERS else TIERS[-1],
            tenant=submit.tenant,
            arrived_at=arrived_at,
            deadline=math.inf if math.isnan(timeout_s) else arrived_at + timeout_s,
            cost=_cost(submit),
            tokens_left=submit.params.max_tokens - len(submit.delivered),
            is_resumed=bool(submit.delivered) or self._book.is_returning(submit.request_id),
            waits_for_batch=submit.degrade_level == 0,
            spare=submit.spare,
        )


def _cost(submit: Submit) -> float:
    """The work that it asks for, about, in decoding steps: a step reads many prompt tokens. A
    `max_tokens` that fills the context is hardly meant."""
    wanted = submit.params.max_tokens - len(submit.delivered)
    return 1.0 + len(submit.prompt) / 16 + max(0, min(wanted, 512))
