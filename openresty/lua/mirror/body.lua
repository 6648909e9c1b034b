--- The request body: read under a deadline and kept for the proxy.

local ngx = ngx

local _M = {}

local CHUNK_BYTES = 65536

-- A chunked body close to the limit does not fit in nginx's buffer with its framing.
local function read_file(path)
    local file, reason = io.open(path, "rb")
    if not file then
        ngx.log(ngx.ERR, "request body in ", path, " cannot be read: ", reason)
        return nil, 500
    end
    local sample, length = file:read(CHUNK_BYTES), file:seek("end")
    file:close()
    return sample or "", length
end

-- ngx.req.socket cannot read chunked bodies, and there is none without a length.
local function read_by_nginx()
    ngx.req.read_body()
    local path = ngx.req.get_body_file()
    if path then
        return read_file(path)
    end
    local data = ngx.req.get_body_data() or ""
    return data, #data
end

--- The first bytes of the body (64 KiB at most) and its length, or nil and the status to refuse
-- with: 408 after `timeout_s` seconds of silence, 400 where the client stopped half-way (nginx's
-- own reader closes the connection without an answer in both cases), 500 on a disk failure.
function _M.read(timeout_s)
    local length = tonumber(ngx.var.http_content_length)
    if not length or length < 1 or ngx.var.http_transfer_encoding then
        return read_by_nginx()
    end
    local socket, reason = ngx.req.socket()
    if not socket then
        ngx.log(ngx.WARN, "request body left to nginx: ", reason)
        return read_by_nginx()
    end
    socket:settimeout(timeout_s * 1000)
    ngx.req.init_body(length)
    local sample, rest = nil, length
    while rest > 0 do
        local chunk, failure = socket:receive(math.min(rest, CHUNK_BYTES))
        if not chunk then
            return nil, failure == "timeout" and 408 or 400
        end
        ngx.req.append_body(chunk)
        sample = sample or chunk
        rest = rest - #chunk
    end
    ngx.req.finish_body()
    return sample, length
end

return _M
