"""A worker that speaks the real protocol and makes tokens that depend on prompt and position only.

    python -m tests.unit.serving.scripted_worker ENDPOINT WORKER_ID SLOTS STEP_MS BEAT_MS [CLASS]

The token 13 in a prompt makes it hang (it beats, but makes no step), 14 makes it skip a token once
in the process's life, 15 makes it refuse the request, 16 makes it exit at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from mirror_sd import messages
from mirror_sd.messages import (
    Cancel,
    Chunk,
    Failed,
    Finished,
    Heartbeat,
    Register,
    Reset,
    SequenceUsage,
    Submit,
    TokenLogprob,
)

HANG, SKIP, REFUSE, EXIT = 13, 14, 15, 16


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token that any worker makes at a position of the completion."""
    return (sum(prompt) * 31 + len(prompt) * 7 + position * position * 13 + position) % 50_000


class ScriptedWorker:
    def __init__(
        self, endpoint: str, worker_id: str, slots: int, step_s: float, beat_s: float, kind: str
    ) -> None:
        self.worker_id, self.slots, self.step_s, self.beat_s = worker_id, slots, step_s, beat_s
        self.kind = kind
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, worker_id.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.connect(endpoint)
        self.running: dict[str, tuple[Submit, int]] = {}
        self.steps = 0
        self.has_skipped = False
        self.register()

    def register(self) -> None:
        self.running.clear()
        self.send(
            Register(
                worker_id=self.worker_id,
                device_class=self.kind,
                pid=os.getpid(),
                model="scripted",
                engine="scripted",
                precision="fp32",
                slots=self.slots,
                max_context=4096,
            )
        )

    def send(self, message: messages.AnyMessage) -> None:
        self.socket.send(messages.encode(message))

    def run(self) -> None:
        next_step = next_beat = time.monotonic()
        while os.getppid() != 1:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self.beat_s
                self.beat()
            if now >= next_step:
                next_step = now + self.step_s
                self.step()
            wait_s = min(next_beat, next_step) - time.monotonic()
            if self.socket.poll(max(0, int(wait_s * 1000) + 1)):
                self.receive()

    def beat(self) -> None:
        self.send(
            Heartbeat(
                worker_id=self.worker_id,
                running=len(self.running),
                waiting=0,
                kv_blocks_used=len(self.running),
                kv_blocks_free=100,
                steps=self.steps,
            )
        )

    def receive(self) -> None:
        while self.socket.poll(0):
            match messages.decode(self.socket.recv()):
                case Submit() as submit:
                    self.add(submit)
                case Cancel(request_id=request_id):
                    self.running.pop(request_id, None)
                case Reset():
                    self.register()
                case _:
                    pass

    def add(self, submit: Submit) -> None:
        if EXIT in submit.prompt:
            os._exit(3)
        if REFUSE in submit.prompt or submit.request_id in self.running:
            self.send(
                Failed(
                    request_id=submit.request_id,
                    code="context_length_exceeded",
                    message="too long",
                    param="messages",
                )
            )
            return
        self.running[submit.request_id] = (submit, len(submit.delivered))

    def step(self) -> None:
        if any(HANG in submit.prompt for submit, _ in self.running.values()):
            return
        self.steps += bool(self.running)
        made: list[messages.Output] = []
        for request_id, (submit, position) in list(self.running.items()):
            if position >= submit.params.max_tokens:
                usage = SequenceUsage(prompt_tokens=len(submit.prompt), completion_tokens=position)
                made.append(Finished(request_id=request_id, reason="length", usage=usage))
                del self.running[request_id]
                continue
            self.running[request_id] = (submit, position + 1)
            if SKIP in submit.prompt and position == 3 and not self.has_skipped:
                self.has_skipped = True
                continue
            made.append(self.chunk(submit, position))
        if made:
            frame, count = messages.encode_outputs(made)
            assert count == len(made)
            self.socket.send(frame)

    def chunk(self, submit: Submit, position: int) -> Chunk:
        token = token_at(submit.prompt, position)
        is_first = position == len(submit.delivered)
        wants_prompt = submit.params.prompt_logprobs and is_first
        return Chunk(
            request_id=submit.request_id,
            index=position,
            tokens=(token,),
            logprobs=None if submit.params.logprobs is None else (TokenLogprob(token, -0.5),),
            prompt_logprobs=(None, *(TokenLogprob(t, -1.0) for t in submit.prompt[1:]))
            if wants_prompt
            else None,
        )


def main() -> None:
    endpoint, worker_id, slots, step_ms, beat_ms, *kind = sys.argv[1:]
    worker = ScriptedWorker(
        endpoint,
        worker_id,
        int(slots),
        float(step_ms) / 1e3,
        float(beat_ms) / 1e3,
        kind[0] if kind else "cpu",
    )
    worker.run()


if __name__ == "__main__":
    assert Path("mirror_sd").is_dir(), "run it from the repository root"
    main()
