--- The id by which a client, the logs and the answer know a request.

local find = string.find
local ngx = ngx

local _M = {}

--- Whether an id that a client sent may be used as it is.
function _M.is_sane(id)
    return type(id) == "string" and #id >= 1 and #id <= 128 and not find(id, "[^A-Za-z0-9._-]")
end

--- The current request's id: the client's where that is sane, else nginx's own random one.
function _M.get()
    local ctx = ngx.ctx
    if not ctx.request_id then
        local sent = ngx.var.http_x_request_id
        ctx.request_id = _M.is_sane(sent) and sent or ngx.var.request_id
    end
    return ctx.request_id
end

return _M
