"""A real gateway, gunicorn on a unix socket, before a real broker with scripted workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from mirror_sd.supervisor.processes import gateway_spec
from tests.unit.api.small_model import CHATML
from tests.unit.serving.broker_stack import ROOT, BrokerStack, broker_stack
from tests.unit.serving.scripted_worker import token_at

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def numbered_encoder() -> Encoder:
    """A text for every token that the scripted worker makes. Prompts are spelled in letters, whose
    ids stay clear of those that the worker takes for commands."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # it comes in another order each time
    words = [*SPECIALS, *(f"unused{i}" for i in range(20)), *letters]
    words += [f"Ġt{i}" for i in range(len(words), 50_000)]
    encoder = Encoder(models.BPE({word: id for id, word in enumerate(words)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return encoder


ENCODER = numbered_encoder()


def completion_text(prompt: str, count: int) -> str:
    """What a completion of `prompt` by the scripted worker says, without half a character at its
    end, which is never delivered."""
    ids = ENCODER.encode(prompt, add_special_tokens=False).ids
    text = ENCODER.decode([token_at(ids, i) for i in range(count)], skip_special_tokens=True)
    return text.rstrip("\ufffd")


class GatewayProcess:
    def __init__(self, stack: BrokerStack) -> None:
        self.stack = stack
        self.socket = stack.run_dir.gateway_socket(0)
        self._lay_out_files()
        spec = gateway_spec(stack.config, stack.run_dir, 0)
        environment = {**os.environ, **spec.env, "PYTHONPATH": str(ROOT)}
        self.log = stack.run_dir.path / "gateway.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *spec.argv[1:]],
                cwd=stack.run_dir.path,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def _lay_out_files(self) -> None:
        run_dir = self.stack.run_dir
        run_dir.metrics.mkdir()
        run_dir.tokenizer.mkdir()
        ENCODER.save(str(run_dir.tokenizer / "tokenizer.json"))
        (run_dir.tokenizer / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        facts = {
            "name": "scripted",
            "max_context": 4096,
            "vocab_size": 50_000,
            "bos_token_id": None,
            "eos_token_ids": [2],
            "add_bos": False,
        }
        (run_dir.tokenizer / "model.json").write_text(json.dumps(facts), encoding="utf-8")

    def http(self, **options: Any) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://gateway", timeout=20, **options)

    def wait_until_healthy(self, within_s: float = 15.0) -> None:
        deadline = time.monotonic() + within_s
        while True:
            # httpx leaks the socket of a connection that fails, so none is tried before its time.
            if self.socket.exists():
                with self.http() as client:
                    if client.get("/health").status_code == 200:
                        return
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def gateway_process(**sections: dict[str, Any]) -> Iterator[GatewayProcess]:
    """A healthy gateway; its worker is "w0" with 4 slots and 5 ms a token."""
    with broker_stack(**sections) as stack:
        stack.start_worker("w0")
        gateway = GatewayProcess(stack)
        try:
            gateway.wait_until_healthy()
            yield gateway
        finally:
            gateway.kill()
