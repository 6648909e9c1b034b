local edge = require("mirror.edge")
local gauges = require("mirror.gauges")
local ngx = ngx

return function()
    -- No log phase follows a subrequest: what its balancer took is given back here.
    local ctx = {}
    local answer = ngx.location.capture("/gateway/metrics", { ctx = ctx })
    if ctx.peer then
        edge.balancer:release(ctx.peer)
    end
    local is_ok = answer.status == ngx.HTTP_OK and not answer.truncated
    local text = edge.metrics:text(gauges.read(is_ok))
    ngx.header["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
    ngx.print(text, is_ok and answer.body or "")
end
