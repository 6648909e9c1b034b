local edge = require("mirror.edge")
local usage = require("mirror.usage")
local ngx = ngx

return function()
    local ctx, var = ngx.ctx, ngx.var
    if ctx.peer then
        edge.balancer:release(ctx.peer)
        ctx.peer = nil
    end
    if ctx.caller then
        edge.admission:leave(ctx.caller)
    end
    if ctx.class then
        edge.count_flight(ctx.class, ctx.tier, -1)
        usage.settle(ctx)
        if not ctx.is_complete then
            edge.metrics:add("mirror_edge_incomplete_answers_total", 1)
        end
    end
    edge.metrics:request(
        ctx.class,
        ctx.tier,
        tonumber(var.status),
        tonumber(var.request_time) or 0,
        tonumber(var.request_length) or 0,
        tonumber(var.bytes_sent) or 0
    )
end
