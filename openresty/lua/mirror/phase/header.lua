local edge = require("mirror.edge")
local errors = require("mirror.errors")
local event_stream = require("mirror.event_stream")
local methods = require("mirror.methods")
local request_id = require("mirror.request_id")
local ngx = ngx

local function was_never_connected()
    local times = ngx.var.upstream_connect_time
    return times ~= nil and not times:find("%d")
end

local function put_into_shape(ctx, header, id)
    if ngx.status == 502 and was_never_connected() then
        ngx.status = 503
    end
    if ngx.status == 405 then
        header["Allow"] = header["Allow"] or methods.allow(ngx.var.uri)
    end
    ctx.replacement, header["Retry-After"] = errors.body(ngx.status, id)
    header["Content-Type"] = "application/json"
    header["Content-Length"] = #ctx.replacement
end

return function()
    local ctx, header = ngx.ctx, ngx.header
    local id, content_type = request_id.get(), header["Content-Type"]
    header["X-Request-Id"] = id
    local limits = ctx.identity and edge.admission:headers(ctx.identity)
    if limits then
        for name, value in pairs(limits) do
            header[name] = value
        end
    end
    if content_type and content_type:find("^text/event%-stream") then
        -- nginx keeps this header of the gateway to itself; the next proxy needs it too.
        header["X-Accel-Buffering"] = "no"
        ctx.event_stream = event_stream.new()
    elseif errors.is_foreign(ngx.status, content_type) then
        put_into_shape(ctx, header, id)
    end
end
