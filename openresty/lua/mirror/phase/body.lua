local edge = require("mirror.edge")
local errors = require("mirror.errors")
local request_id = require("mirror.request_id")
local ngx = ngx

return function()
    local ctx, arg = ngx.ctx, ngx.arg
    if ctx.replacement then
        arg[1] = ctx.replacement
        ctx.replacement = ""
    elseif ctx.event_stream then
        local chunk = arg[1]
        local passed, is_lost = ctx.event_stream:pass(chunk, arg[2])
        -- To assign is to copy, and nearly every chunk passes as it is.
        if passed ~= chunk then
            arg[1] = passed
        end
        if is_lost then
            edge.metrics:add("mirror_edge_stream_errors_total", 1)
            ctx.event_stream = nil
            arg[1] = errors.event(request_id.get())
            arg[2] = true
        end
    end
    ctx.is_complete = arg[2]
end
