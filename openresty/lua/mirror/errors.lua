--- Errors in the OpenAI shape for whatever the edge or nginx itself refuses.
--
-- The classes of `mirror_sd/errors.py` and these entries agree; `tests/contracts/errors.json`
-- holds both to it.

local cjson = require("cjson.safe")
local request_id = require("mirror.request_id")
local ngx = ngx

local _M = {}

local INVALID, SERVER, TIMEOUT = "invalid_request_error", "server_error", "timeout_error"

local BY_STATUS = {
    [400] = { type = INVALID, code = "bad_request", message = "This is not a valid HTTP request." },
    [401] = {
        type = INVALID,
        code = "unauthorized",
        message = "This needs an API key.",
    },
    [403] = { type = "permission_error", code = "forbidden", message = "This is not allowed." },
    [404] = { type = "not_found_error", code = "not_found", message = "There is no such path." },
    [405] = {
        type = INVALID,
        code = "method_not_allowed",
        message = "This path does not take that method.",
    },
    [408] = {
        type = TIMEOUT,
        code = "request_timeout",
        message = "The request body did not arrive in time.",
    },
    [411] = { type = INVALID, code = "length_required", message = "Content-Length is missing." },
    [413] = {
        type = INVALID,
        code = "payload_too_large",
        message = "The request body is too large.",
    },
    [414] = { type = INVALID, code = "uri_too_long", message = "The request line is too long." },
    [415] = {
        type = INVALID,
        code = "unsupported_media_type",
        message = "This type of body is not supported.",
    },
    [429] = {
        type = "rate_limit_error",
        code = "rate_limited",
        message = "There are too many requests; try again later.",
        retry_after_s = 1,
    },
    [431] = {
        type = INVALID,
        code = "headers_too_large",
        message = "The request headers are too large.",
    },
    [499] = { type = INVALID, code = "client_closed", message = "The client closed the request." },
    [500] = { type = SERVER, code = "internal_error", message = "The server failed." },
    [501] = { type = INVALID, code = "not_implemented", message = "This is not supported." },
    [502] = {
        type = SERVER,
        code = "bad_gateway",
        message = "The gateway went away before it answered.",
    },
    [503] = {
        type = "service_unavailable",
        code = "no_gateway",
        message = "No gateway takes requests at the moment; try again later.",
        retry_after_s = 1,
    },
    [504] = {
        type = TIMEOUT,
        code = "gateway_timeout",
        message = "The gateway did not answer in time.",
    },
    [505] = { type = INVALID, code = "http_version", message = "This version of HTTP is unknown." },
}

-- What the edge refuses for a reason of its own, by name.
local REFUSALS = {
    no_api_key = {
        status = 401,
        type = INVALID,
        code = "no_api_key",
        message = "Send an API key in the header `Authorization: Bearer KEY`.",
    },
    invalid_api_key = {
        status = 401,
        type = INVALID,
        code = "invalid_api_key",
        message = "There is no such API key.",
    },
    key_revoked = {
        status = 403,
        type = "permission_error",
        code = "key_revoked",
        message = "This API key has been revoked.",
    },
    invalid_admin_token = {
        status = 401,
        type = INVALID,
        code = "invalid_admin_token",
        message = "The admin endpoints need the stack's own token as bearer token.",
    },
    rate_limited = { status = 429, type = "rate_limit_error", code = "rate_limited" },
    degraded = {
        status = 503,
        type = "service_unavailable",
        code = "degraded",
        message = "The server is overloaded and takes no standard requests at the moment.",
        retry_after_s = 5,
    },
    draining = {
        status = 503,
        type = "service_unavailable",
        code = "draining",
        message = "The server takes no new requests: it is about to stop.",
        retry_after_s = 5,
    },
    invalid_document = { status = 400, type = INVALID, code = "invalid_document" },
}

local TRUNCATED = {
    type = INVALID,
    code = "incomplete_body",
    message = "The request body ended before its Content-Length.",
}

local INTERRUPTED = {
    type = SERVER,
    code = "stream_interrupted",
    message = "The answer broke off: its gateway went away. Send the request again.",
}

local function entry_of(status)
    return BY_STATUS[status] or (status < 500 and BY_STATUS[400] or BY_STATUS[500])
end

local function encode(entry, id, text)
    local message = text or entry.message
    if id then
        message = message .. " (request id " .. id .. ")"
    end
    return cjson.encode({
        error = { message = message, type = entry.type, code = entry.code, param = cjson.null },
    })
end

--- The JSON body for a status, and the seconds of Retry-After or nil.
function _M.body(status, id)
    local entry = entry_of(status)
    return encode(entry, status >= 500 and entry.type ~= INVALID and id), entry.retry_after_s
end

--- The server-sent event that ends a stream whose gateway was lost.
function _M.event(id)
    return "data: " .. encode(INTERRUPTED, id) .. "\n\n"
end

--- Answer with the error of `status` and end the request.
function _M.send(status, is_truncated)
    local body, retry_after_s = _M.body(status, request_id.get())
    if is_truncated then
        body = encode(TRUNCATED)
    end
    ngx.status = status
    ngx.header["Content-Type"] = "application/json"
    ngx.header["Content-Length"] = #body
    ngx.header["Retry-After"] = retry_after_s
    -- What is left of the request must not be taken for the next one.
    ngx.header["Connection"] = "close"
    ngx.print(body)
    -- Not `ngx.exit(status)`: nginx drops the connection without an answer on 408.
    return ngx.exit(ngx.HTTP_OK)
end

--- Answer with the refusal `name` and end the request. `details`, optional: `message` and
-- `retry_after_s` instead of the refusal's own. The connection stays.
function _M.refuse(name, details)
    local entry, header = REFUSALS[name], ngx.header
    local body = encode(entry, nil, details and details.message)
    if not ngx.ctx.is_body_read then
        ngx.req.discard_body()
    end
    ngx.status = entry.status
    header["Content-Type"] = "application/json"
    header["Content-Length"] = #body
    header["Retry-After"] = details and details.retry_after_s or entry.retry_after_s
    if entry.status == 401 then
        header["WWW-Authenticate"] = "Bearer"
    end
    if details and details.is_final then
        header["x-should-retry"] = "false"
    end
    ngx.print(body)
    return ngx.exit(ngx.HTTP_OK)
end

--- Whether a response with this status and Content-Type is an error in another shape than ours.
function _M.is_foreign(status, content_type)
    if status < 400 then
        return false
    end
    return not (content_type and content_type:find("^application/json"))
end

return _M
