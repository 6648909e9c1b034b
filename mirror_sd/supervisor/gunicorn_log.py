"""gunicorn's and the gateway's log lines in the form of every other process's."""

from __future__ import annotations

import logging
import os
from typing import Any

from gunicorn.glogging import Logger

from mirror_sd import logs


class GunicornLog(Logger):  # type: ignore[misc] # gunicorn has no annotations
    """Named on gunicorn's command line, so this is the gateway process's entry for logging."""

    # There is none; asking gunicorn's settings costs 2 % of a short request.
    access_log_enabled = False

    def setup(self, cfg: Any) -> None:
        """Leave gunicorn's loggers without handlers of their own."""
        logs.configure(f"gateway-{os.environ.get('MIRROR_SD_GATEWAY_INDEX', '0')}")
        self._cfg = cfg
        self.error_log.propagate = True
        self.error_log.setLevel(logging.INFO)
        self.access_log.setLevel(logging.CRITICAL)
