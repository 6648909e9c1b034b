"""What the path through nginx, gateway, broker and worker adds to the first token."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from typing import Any

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.bench.decode import greedy, run_engine
from mirror_sd.bench.options import authorization
from mirror_sd.bench.prompts import Messages
from mirror_sd.engine import Engine
from mirror_sd.errors import InternalError, SetupError


def first_token_overhead(
    engine: Engine, tokenizer: Tokenizer, chats: list[Messages], *, port: int, model: str
) -> dict[str, Any]:
    """Time to first token of each chat, by the engine alone and over HTTP, one after the other.

    Both compute the whole prompt: a number in front of each one keeps prefixes from being found
    again. Milliseconds.
    """
    alone: list[float] = []
    over_http: list[float] = []
    for index, chat in enumerate(chats):
        for turn, target in enumerate((alone, over_http)):
            messages = [{"role": "system", "content": f"[{time.time_ns()}-{turn}]"}, *chat]
            if target is alone:
                prompt = tuple(tokenizer.encode_chat([(m["role"], m["content"]) for m in messages]))
                run = run_engine(
                    engine,
                    [prompt],
                    greedy(1, tokenizer.facts.eos_token_ids, speculation=True),
                    tag=f"http{index}",
                )
                target.append(1e3 * run.first_s[0])
            else:
                target.append(1e3 * _stream_first(port, model, messages))
    added = [b - a for a, b in zip(alone, over_http, strict=True)]
    return {
        "requests": len(chats),
        "engine_ttft_ms_p50": round(statistics.median(alone), 2),
        "http_ttft_ms_p50": round(statistics.median(over_http), 2),
        "added_ms_p50": round(statistics.median(added), 2),
        "added_ms_p90": round(sorted(added)[int(0.9 * (len(added) - 1))], 2),
    }


def _stream_first(port: int, model: str, messages: Messages) -> float:
    """Seconds from sending the request to the first event with text, connection included."""
    body = json.dumps(
        {"model": model, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 4}
    )
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"Content-Type": "application/json"} | authorization()
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise InternalError(f"the server answered {response.status}: {response.read()[:300]!r}")
        first = None
        for line in response:
            if first is None and line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    first = time.perf_counter() - begin
        if first is None:
            raise InternalError("the stream ended without text")
        return first
    except OSError as error:
        raise SetupError(f"no stack answers on port {port}: {error.strerror or error}") from error
    finally:
        connection.close()
