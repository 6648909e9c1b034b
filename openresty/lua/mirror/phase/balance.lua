local edge = require("mirror.edge")
local balancer = require("ngx.balancer")
local ngx = ngx

local NO_LIVE_PEER = -3 -- NGX_BUSY: nginx then answers 502

return function()
    local ctx, peers = ngx.ctx, edge.balancer
    if ctx.peer then
        peers:fail(ctx.peer)
        peers:release(ctx.peer)
        ctx.tried = ctx.tried or {}
        ctx.tried[#ctx.tried + 1] = ctx.peer
        ctx.peer = nil
        -- nginx does not count a try on a kept connection, so its own limit is not enough.
        if #ctx.tried > peers:retries() then
            return ngx.exit(NO_LIVE_PEER)
        end
        edge.metrics:add("mirror_edge_retries_total", 1)
    else
        balancer.set_more_tries(peers:retries())
    end
    ctx.peer = peers:pick(ctx.tried)
    peers:acquire(ctx.peer)
    local is_set, reason = balancer.set_current_peer(ctx.peer)
    if not is_set then
        ngx.log(ngx.ERR, "gateway ", ctx.peer, " cannot be used: ", reason)
    end
end
