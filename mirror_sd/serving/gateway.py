"""The HTTP application of one gateway process.

    gunicorn -k asgi --workers 1 --bind unix:<run>/gateway-<i>.sock \\
        'mirror_sd.serving.gateway:create_app()'

Tests wire their own parts through the arguments of `create_app`; a gateway reads the run directory
it was given.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import falcon
import falcon.asgi

from mirror_sd import logs
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import Config
from mirror_sd.run_dir import from_run_dir
from mirror_sd.serving import answers, status
from mirror_sd.serving.broker_client import BrokerClient
from mirror_sd.serving.error_answers import RequestIds, add_error_answers
from mirror_sd.serving.generation import Broker
from mirror_sd.serving.intake import Intake
from mirror_sd.serving.streaming import Send
from mirror_sd.serving.text_thread import TextThread

_log = logging.getLogger(__name__)

_PROMPT_THREADS = 4


class GatewayApp(falcon.asgi.App[falcon.asgi.Request, falcon.asgi.Response]):
    """Falcon's application, with a way past it for the requests that generate: `posts`, by path."""

    posts: Mapping[str, answers.GenerationRoute]

    async def __call__(  # type: ignore[override] # as falcon.asgi.App overrides falcon.App
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Send,
    ) -> None:
        route = self.posts.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is not None:
            await route(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class _Lifespan:
    """Starts and ends with the process what needs its event loop."""

    def __init__(self, parts: answers.Parts) -> None:
        self._parts = parts

    async def process_startup(self, scope: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        await self._parts.broker.start()
        preparing = self._parts.prompt_threads.submit(self._parts.intake.prepare)
        preparing.add_done_callback(_report_failure)

    async def process_shutdown(self, scope: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        await self._parts.broker.close()
        self._parts.text_thread.close()
        self._parts.prompt_threads.shutdown(wait=False)


def _report_failure(preparing: Future[None]) -> None:
    if not preparing.cancelled() and (error := preparing.exception()) is not None:
        _log.error("requests cannot be compared with others", exc_info=error)


def create_app(
    config: Config | None = None,
    tokenizer: Tokenizer | None = None,
    broker: Broker | None = None,
) -> GatewayApp:
    """The application; what is not given comes from `run_dir.from_run_dir()`.

    Raises `ConfigError` and `ModelError`, which keep the process from starting.
    """
    if config is None or tokenizer is None or broker is None:
        logs.configure("gateway")
        config, run_dir = from_run_dir()
        tokenizer = Tokenizer.from_directory(run_dir.tokenizer)
        identity = f"gateway-{os.environ.get('MIRROR_SD_GATEWAY_INDEX', '0')}"
        broker = BrokerClient(run_dir.gateway_endpoint, identity, config.broker)
    parts = answers.Parts(
        config=config,
        intake=_intake(config, tokenizer),
        broker=broker,
        prompt_threads=ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="prompt"),
        text_thread=TextThread(),
    )
    app = GatewayApp(middleware=[RequestIds(), _Lifespan(parts)])
    add_error_answers(app)
    _add_routes(app, parts)
    return app


def _intake(config: Config, tokenizer: Tokenizer) -> Intake:
    facts = tokenizer.facts
    own_limit = config.model.max_context
    return Intake(
        tokenizer,
        model=config.model.served_name or facts.name,
        max_context=facts.max_context if own_limit is None else min(own_limit, facts.max_context),
        timeout_s=config.server.request_timeout_s,
        merge=config.merge,
    )


def _add_routes(app: GatewayApp, parts: answers.Parts) -> None:
    models = status.Models(parts.intake, created=int(time.time()))
    app.posts = {
        "/v1/chat/completions": answers.GenerationRoute(parts, parts.intake.chat),
        "/v1/completions": answers.GenerationRoute(parts, parts.intake.completion),
    }
    for path in app.posts:
        app.add_route(path, answers.PostOnly())
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", models, suffix="one")
    app.add_route("/health", status.Health(parts.broker, parts.config.broker))
    app.add_route("/metrics", status.Metrics())
    app.add_route("/admin/state", status.State(parts.broker))
