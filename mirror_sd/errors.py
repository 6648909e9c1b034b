"""Every error that Mirror-SD raises on purpose, with the HTTP answer it turns into.

    MirrorError
    |-- RequestError          the client can mend it: its text is shown
    |   |-- InvalidRequest        400 invalid_request_error   a field is wrong
    |   |   `-- ContextLengthExceeded  400 context_length_exceeded
    |   |-- NotFound              404 not_found_error         no such path
    |   |   `-- ModelNotFound         404 model_not_found
    |   |-- MethodNotAllowed      405 invalid_request_error
    |   `-- PayloadTooLarge       413 invalid_request_error
    |-- CapacityError         try again later: carries Retry-After
    |   |-- QueueFull             429 rate_limit_error
    |   `-- NoWorker              503 service_unavailable     no live worker for the class
    |-- DeadlineExceeded      504 timeout_error
    |-- InternalError         500 server_error: the client sees a request id, not the text
    `-- SetupError            never on the wire: a command ends with one sentence and status 1
        |-- ConfigError           a configuration key has a bad value
        |-- ModelError            a model is missing, corrupt or not supported
        |   `-- UnsupportedModel      sound, but not of a family that our own decoder knows
        `-- ProtocolError         a frame from another process cannot be read

The gateway, the Lua edge and the command line all render the same shape, `to_openai`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MirrorError(Exception):
    """Base of the tree; `status`, `type` and `code` are those of the OpenAI error object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def to_openai(self) -> dict[str, Any]:
        """The body `{"error": {"message", "type", "param", "code"}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class RequestError(MirrorError):
    status = 400
    type = "invalid_request_error"
    code: ClassVar[str | None] = None


class InvalidRequest(RequestError):
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class CapacityError(MirrorError):
    status = 503
    type = "service_unavailable"
    code = "overloaded"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class NoWorker(CapacityError):
    code = "no_worker"


class DeadlineExceeded(MirrorError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class InternalError(MirrorError):
    pass


class SetupError(MirrorError):
    """A command or a process cannot start; the message is one sentence for a person."""


class ConfigError(SetupError):
    code = "config_error"


class ModelError(SetupError):
    code = "model_error"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class ProtocolError(SetupError):
    code = "protocol_error"


# What crosses a process boundary as `Failed.code` and is raised again on the other side.
BY_CODE: dict[str, type[MirrorError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        ModelNotFound,
        QueueFull,
        NoWorker,
        DeadlineExceeded,
        InternalError,
    )
    if cls.code is not None
}
